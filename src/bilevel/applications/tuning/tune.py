"""Tuning: continuous hyperparameters by gradient (the paper's Eq. 2).

    min over the hyperparameters of the loss on `valid`   subject to   the model is trained on `train` with them

Every candidate is a training from scratch, and the one with the least loss on `valid` wins (see `value_search`). The
gradient is

- of the minimum, for a single linear layer: its training is convex, and `implicit_descent` keeps it at its minimum;
- through all steps of the training (see `unrolled_training`), for a network of moderate size;
- of the penalty method on minibatches, for a large network. The weights of this run have seen the validation data, so
  its values are a candidate as all others are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bilevel import Callback, OptionError, Penalty, Solution
from bilevel._util.checks import ShortRepr, brief, check_counts, in_range, one_of
from bilevel.applications.tuning.examples import Examples, columns_of, objective_of
from bilevel.applications.tuning.hyperparameters import LearningRate, values
from bilevel.applications.tuning.knob import Knob
from bilevel.applications.tuning.losses import OwnLoss
from bilevel.applications.tuning.searches import (
    OnProgress,
    Tries,
    TuningTask,
    convex_search,
    minibatch_search,
    solved_on_batches,
    training_search,
)
from bilevel.applications.tuning.value_search import Candidate, ValueSearch, comparison, least
from bilevel.methods.base import Method
from bilevel.running.run_identity import claim, described, digest_of

STEPS, CONVEX_STEPS = 1000, 60
# A linear layer is tuned without minibatches if its inputs times its outputs are at most this many numbers.
SMALL = 50_000_000
# A network is tuned through its training if the steps times its weights are at most this many.
UNROLLED = 400_000_000
RATE, GRID, ROUNDS, BATCH = 1e-3, 5, 10, 100
Mode = Literal["convex", "training", "minibatch"]
# The options that not every mode reads: the modes that do, and the default.
READ_IN: dict[str, tuple[tuple[Mode, ...], Any]] = {
    "rounds": (("training",), ROUNDS),
    "truncate": (("training",), None),
    "rate": (("training", "minibatch"), None),
    "batch": (("training", "minibatch"), BATCH),
    "final_steps": (("training", "minibatch"), None),
    "callbacks": (("minibatch",), ()),
    "engine": (("minibatch",), "auto"),
    "log_every": (("minibatch",), None),
}


@dataclass(frozen=True, repr=False)
class Tuned(ShortRepr):
    """The tuned hyperparameters and the trained model. `tune` returns it.

    Fields:
        values: The tuned values by the names of their knobs.
        model: The model that was passed, trained on `train` only.
        curve: The validation loss after each step of the run in the modes "convex" and "minibatch" (there of a batch,
            with the weights of the run); in the mode "training" of each training.
        valid_loss: The validation loss of `model`.
        mode: "convex", "training" or "minibatch".
        seconds: The time of the tuning and of all trainings.
        candidates: The values that were tried, each with the loss of a model trained from scratch. Default: none.
        solution: The `Solution` of the bilevel run. Default: None, except in the mode "minibatch".
        settings: The options that were used. Default: empty.

    >>> x = torch.randn(40, 3)
    >>> y = x[:, 0]
    >>> found = tune(nn.Linear(3, 1), (x[:30], y[:30]), (x[30:], y[30:]), {"decay": WeightDecay()}, steps=5)
    >>> found.mode, found.valid_loss == found.best.valid_loss
    ('convex', True)
    """

    values: dict[str, Tensor]
    model: nn.Module
    curve: list[float]
    valid_loss: float
    mode: Mode
    seconds: float
    candidates: tuple[Candidate, ...] = ()
    solution: Solution | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """Return the candidate that won."""
        return least(self.candidates)

    @property
    def message(self) -> str:
        """Say what won, and by how much."""
        return comparison(self.candidates)


def tune(
    model: nn.Module,
    train: Examples,
    valid: Examples,
    hyper: Mapping[str, Knob],
    *,
    loss: OwnLoss | None = None,
    valid_loss: OwnLoss | None = None,
    mode: Mode | None = None,
    method: Method | None = None,
    steps: int | None = None,
    final_steps: int | None = None,
    batch: int = BATCH,
    rate: float | None = None,
    grid: int = GRID,
    rounds: int = ROUNDS,
    truncate: int | None = None,
    candidates: Mapping[str, Mapping[str, Any]] | None = None,
    measure: Callable[[nn.Module], Any] | None = None,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    on_progress: OnProgress | None = None,
    engine: str = "auto",
    log_every: int | None = None,
    checkpoint: str | Path | None = None,
) -> Tuned:
    """Tune the hyperparameters on `valid`, and train `model` in place on `train` with them.

    The start, a grid of single values and the points of a descent are tried, each by a training from scratch. The
    values with the least loss on `valid` are returned, with their model.

    Args:
        model: The model with its first weights.
        train: (inputs, targets). Whole numbers are classes, and the loss is the cross-entropy; other targets are
            numbers, and the loss is half the squared error. With `SourceWeights`, a third entry has the source of each
            example.
        valid: (inputs, targets) to tune on; the model is not trained on them.
        hyper: The knobs by name, such as `{"decay": WeightDecay()}`.
        loss: A function (values, model, batch) that replaces the part of the training loss that depends on data. None
            (default): the usual loss.
        valid_loss: The same for the loss on `valid`. None (default): the usual loss.
        mode: "convex", to the minimum without minibatches; "training", through the steps of the training; or
            "minibatch", by a bilevel run. None (default): "convex" for a single linear layer on data of moderate size,
            "minibatch" with a `method` or if the steps times the weights exceed 4e8, else "training".
        method: The method of the bilevel run, only in the mode "minibatch". None (default):
            `Penalty(cotangent="same", decay="linear")`.
        steps: The number of steps of the training and of the bilevel run, or of the descent in the mode "convex". None
            (default): 1,000, or 60 in the mode "convex".
        final_steps: The number of steps of the training, except in the mode "convex". None (default): `steps`.
        batch: The number of examples in a batch, except in the mode "convex". Default: 100.
        rate: The learning rate of the training, except in the mode "convex". It falls linearly to zero. None (default):
            1e-3; in the mode "minibatch" without a `method`, the rate that the default method chose.
        grid: How many single values of each penalty, smoothing or strength to try. At an end of a default range the
            grid grows. 0: none. Default: 5.
        rounds: The most trainings of the descent, only in the mode "training". Default: 10.
        truncate: How many steps of the training to differentiate, counted from the last one, only in the mode
            "training". None (default): all.
        candidates: Further values to try: a name for each, and numbers or tensors by the names of the knobs. Knobs
            that are left out keep their start. None (default): none.
        measure: A function that is called with each trained model, such as its test loss; what it returns is kept in
            the candidates. With a `checkpoint`, it returns tensors, numbers, text, or dicts and lists of them. None
            (default): nothing is called.
        seed: The seed of all random draws. Default: 0.
        callbacks: Callbacks of the bilevel run, only in the mode "minibatch". Default: none.
        on_progress: A function that is called after each step as `on_progress(stage, done, total)`. None (default):
            nothing is called.
        engine: What runs the steps, as in `solve`, only in the mode "minibatch". Default: "auto".
        log_every: The number of steps between calls of the callbacks, only in the mode "minibatch". None (default): as
            in `solve`.
        checkpoint: A folder to write to, and to resume from if it holds a state of the same tuning: the same data,
            first weights, knobs and losses. None (default): nothing is written.

    >>> x = torch.randn(40, 3)
    >>> y = x[:, 0]
    >>> found = tune(nn.Linear(3, 1), (x[:30], y[:30]), (x[30:], y[30:]), {"decay": WeightDecay()}, steps=5)
    >>> found.values["decay"].shape
    torch.Size([1])
    """
    began, like = time.perf_counter(), next(model.parameters())
    columns, kept = columns_of(train, "train", like.dtype), columns_of(valid, "valid", like.dtype)
    goal, u = objective_of(model, columns, kept, hyper, loss, valid_loss)
    _check(mode, method, {"grid": grid, "rounds": rounds}, rate, hyper)
    check_counts(steps=steps, final_steps=final_steps, batch=batch, truncate=truncate)
    final = final_steps or steps or STEPS
    mode = mode or mode_of(model, columns, hyper, method, loss, final)
    options: dict[str, Any] = {"callbacks": tuple(callbacks), "engine": engine, "log_every": log_every}
    given = {"rounds": rounds, "truncate": truncate, "rate": rate, "batch": batch, "final_steps": final_steps}
    _refuse_unused(mode, given | options)
    folder = None if checkpoint is None else Path(checkpoint)
    identity = {} if folder is None else _claimed(folder, [*columns, *kept], mode, [loss, valid_loss], hyper, model)
    tries, told = _tries(hyper, u, candidates or {}, grid), on_progress or (lambda *_: None)
    task = TuningTask(goal, hyper, model, (columns, kept), tries, seed, (folder, identity), told, measure)
    count = steps or (CONVEX_STEPS if mode == "convex" else STEPS)
    training: dict[str, Any] = {"steps": final, "batch": batch, "rate": rate or RATE}
    solution: Solution | None = None
    if mode == "convex":
        search, curve = convex_search(task, u, count)
    elif mode == "training":
        search, curve = training_search(task, training | {"truncate": truncate}, rounds)
    else:
        solution = solved_on_batches(
            task, u, method or Penalty(cotangent="same", decay="linear"), count, batch, options | {"seed": seed}
        )
        training["rate"] = rate or _rate_of(solution, method)
        search, curve = minibatch_search(task, u, training), solution.history["upper"]
    model.load_state_dict(search.state)
    settings = {"batch": batch, "seed": seed, "hyper_parameters": sum(t.numel() for t in u.values()), "steps": count}
    settings |= {} if mode == "convex" else {"final_steps": final, "rate": training["rate"]}
    return _tuned(search, model, curve, mode, time.perf_counter() - began, solution, settings)


def _tuned(search: ValueSearch, model: nn.Module, curve: list[float], mode: Mode, *rest: Any) -> Tuned:
    best, (seconds, solution, settings) = search.best, rest
    tried = tuple(search.candidates)
    return Tuned(best.values, model, curve, best.valid_loss, mode, seconds, tried, solution, settings)


def _rate_of(solution: Solution, method: Method | None) -> float:
    """Return the rate of the training that follows a bilevel run: the default method has chosen one."""
    return max(solution.history["lower_rate"]) if method is None and len(solution.history) else RATE


def _claimed(
    folder: Path,
    columns: Sequence[Tensor],
    mode: Mode,
    losses: Sequence[OwnLoss | None],
    hyper: Mapping[str, Knob],
    model: nn.Module,
) -> dict[str, Any]:
    """Write to the folder what this tuning is of, or check that the folder is of it; return it."""
    identity: dict[str, Any] = {
        "examples": digest_of(columns),
        "mode": mode,
        "loss": [described(loss) for loss in losses],
        "hyper": {name: described(knob) for name, knob in hyper.items()},
        "first weights": digest_of(model.state_dict().values()),
    }
    claim(folder, identity)
    return identity


def _check(
    mode: Mode | None, method: Method | None, counts: Mapping[str, int], rate: float | None, hyper: Mapping[str, Knob]
) -> None:
    one_of("mode", mode, ("convex", "training", "minibatch"), optional=True)
    if mode in ("convex", "training") and method is not None:
        raise OptionError("method is for mode='minibatch'; leave it out, or pass that mode.")
    if (mode in ("convex", "minibatch") or method is not None) and _rates(hyper):
        raise OptionError("LearningRate is for mode='training', which differentiates the steps; leave out the mode.")
    for name, count in counts.items():
        in_range(name, count, least=0)
    in_range("rate", rate, above=0)


def _refuse_unused(mode: Mode, given: Mapping[str, Any]) -> None:
    """Refuse an option that this mode does not read, unless it is the default."""
    for name, value in given.items():
        modes, default = READ_IN[name]
        if mode not in modes and value != default:
            raise OptionError(
                f"{name}={brief(value)} is for mode={' or '.join(map(repr, modes))}, and the mode here is {mode!r}. "
                "Leave it out, or pass that mode."
            )


def _rates(hyper: Mapping[str, Knob]) -> bool:
    return any(isinstance(knob, LearningRate) for knob in hyper.values())


def mode_of(
    model: nn.Module,
    columns: Sequence[Tensor],
    hyper: Mapping[str, Knob],
    method: Method | None,
    loss: OwnLoss | None,
    steps: int,
) -> Mode:
    """Return the mode for the model and the size of its training."""
    if _rates(hyper):
        return "training"
    if method is None and loss is None and _convex(model, columns, hyper):
        return "convex"
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return "training" if method is None and steps * weights <= UNROLLED else "minibatch"


def _tries(
    hyper: Mapping[str, Knob], u: Mapping[str, Tensor], candidates: Mapping[str, Mapping[str, Any]], grid: int
) -> Tries:
    """Return the values at the start, and the caller's candidates as tensors of the right shapes."""
    first, found = {name: value.detach().cpu() for name, value in values(hyper, u).items()}, {}
    for name, value in candidates.items():
        if unknown := [key for key in value if key not in first]:
            raise OptionError(f"candidates[{name!r}] must name knobs of hyper, {list(first)}; got {unknown}.")
        try:
            found[name] = {
                key: torch.as_tensor(value.get(key, like)).to(like).broadcast_to(like.shape).clone()
                for key, like in first.items()
            }
        except (RuntimeError, TypeError, ValueError) as error:
            raise OptionError(
                f"candidates[{name!r}] must hold numbers, or tensors of the knobs' shapes: {error}"
            ) from error
    return Tries(first, found, grid)


def _convex(model: nn.Module, columns: Sequence[Tensor], hyper: Mapping[str, Knob]) -> bool:
    """Return True if the model is one linear layer, the same for every batch, and the data is of moderate size."""
    layers = [m for m in model.modules() if not list(m.children())]
    linear = [m for m in layers if isinstance(m, nn.Linear)]
    return (
        all(isinstance(m, (nn.Linear, nn.Flatten, nn.Identity)) for m in layers)
        and len(linear) == 1
        and all(type(knob).inputs is Knob.inputs and type(knob).losses is Knob.losses for knob in hyper.values())
        and next(model.parameters()).device.type == "cpu"
        and columns[0].numel() * linear[0].out_features <= SMALL
    )
