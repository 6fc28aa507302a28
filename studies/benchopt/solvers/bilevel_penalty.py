"""`Penalty()` of bilevel as a solver of benchopt's benchmark_bilevel.

    cp studies/benchopt/solvers/bilevel_penalty.py CHECKOUT/solvers
    benchopt run CHECKOUT -s bilevel-penalty -s SOBA -d simulated

The environment needs benchopt, jax, torch and bilevel. The benchmark's functions are in jax: `Value` and `Slope` give
torch their values and derivatives, without copies of arrays.
"""

from functools import partial

from benchopt import BaseSolver, safe_import_context
from benchopt.stopping_criterion import SufficientProgressCriterion

with safe_import_context() as import_ctx:
    import jax
    import jax.numpy as jnp
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from bilevel import Callback, Penalty, Problem, solve


def to_jax(*tensors):
    return [jnp.from_dlpack(x.detach().contiguous()) for x in tensors]


def to_torch(*arrays):
    """Return tensors of finished arrays: torch can change its tensors in place afterwards."""
    return tuple(torch.from_dlpack(x) for x in jax.block_until_ready(arrays))


class Objective:
    """An objective of the benchmark, and what is needed of its derivatives, compiled."""

    def __init__(self, function, batch_size):
        function = partial(function, batch_size=batch_size)

        def curved(v, u, start, a, b):
            return jax.vjp(lambda v, u: jax.grad(function, argnums=(0, 1))(v, u, start), v, u)[1]((a, b))

        self.value = jax.jit(function)
        self.slope = jax.jit(jax.grad(function, argnums=(0, 1)))
        self.curved = jax.jit(curved)

    def __call__(self, u, v, batch):
        return Value.apply(v, u, int(batch[0]), self)


class Value(torch.autograd.Function):
    """The value of an objective; its derivative is `Slope`."""

    @staticmethod
    def forward(context, v, u, start, objective):
        context.save_for_backward(v, u)
        context.rest = start, objective
        return to_torch(objective.value(*to_jax(v, u), start))[0]

    @staticmethod
    def backward(context, scale):
        found = Slope.apply(*context.saved_tensors, *context.rest)
        return scale * found[0], scale * found[1], None, None


class Slope(torch.autograd.Function):
    """The derivatives of an objective in v and in u; theirs are products with second derivatives."""

    @staticmethod
    def forward(context, v, u, start, objective):
        context.save_for_backward(v, u)
        context.rest = start, objective
        return to_torch(*objective.slope(*to_jax(v, u), start))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, a, b):
        start, objective = context.rest
        v, u, a, b = to_jax(*context.saved_tensors, a, b)
        return *to_torch(*objective.curved(v, u, start, a, b)), None, None


class Until(Callback):
    """Ends the run when benchopt says so."""

    def __init__(self, callback):
        self.callback = callback

    def log(self, run):
        return not self.callback()


class Solver(BaseSolver):
    """The penalty method with tracked multipliers, without options."""

    name = "bilevel-penalty"
    requirements = ["jax", "pip::torch", "pip::bilevel"]  # noqa: RUF012
    parameters = {"batch_size": [64], "eval_freq": [128], "random_state": [1]}  # noqa: RUF012
    stopping_criterion = SufficientProgressCriterion(patience=100, strategy="callback")

    @staticmethod
    def get_next(stop_val):
        return stop_val + 1

    def set_objective(self, f_inner, f_outer, n_inner_samples, n_outer_samples, inner_var0, outer_var0):
        torch.set_num_threads(1)
        self.problem = Problem(Objective(f_outer, self.batch_size), Objective(f_inner, self.batch_size))
        self.data = self.batches(n_outer_samples), self.batches(n_inner_samples)
        self.start = inner_var0, outer_var0
        self.run_once(2)  # compiles

    def batches(self, count):
        """Return the first example of each batch, in a random order in each pass."""
        return DataLoader(TensorDataset(torch.arange(0, count, self.batch_size)), batch_size=1, shuffle=True)

    def run(self, callback):
        self.v, self.u = (torch.from_dlpack(x.copy()).clone().requires_grad_() for x in self.start)
        if callback():
            solve(
                self.problem,
                Penalty(),
                self.u,
                self.v,
                self.data,
                max_steps=10**7,
                seed=self.random_state,
                callbacks=[Until(callback)],
                log_every=self.eval_freq,
                engine="eager",
                hypergradient=False,
            )

    def get_result(self):
        return {"inner_var": jnp.array(self.v.detach().numpy()), "outer_var": jnp.array(self.u.detach().numpy())}
