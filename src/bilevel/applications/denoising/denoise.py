"""Denoising: one importance for each training example, learnt from a small trusted set.

    min_u  mean over the trusted set of l(x, y; v)   subject to
    v  =   argmin_v  sum_i w_i l(x_i, y_i; v) / sum_i w_i,    w_i = sigmoid(u_i)              (the paper's Eq. 3)

The model is trained on the trusted set alone first. How the labels differ from what it says tells which class is
labelled as which (`mistakes`), and so how probable each label is: u starts there. The classifier that is handed out is
trained afterwards, in two rounds. In the first, every example counts by its importance, a trusted one by 1. In the
second, every label is replaced by the probabilities of the classes, given the first round's answer and the label. All
three trainings begin at the model's first weights. An example is a suspect if its importance is below 1/2 and the
classifier says another class.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, TensorDataset

from bilevel._util.atomic_files import write_whole
from bilevel._util.checks import in_range
from bilevel._util.random_state import derived
from bilevel.applications.denoising.examples import Examples, with_trusted
from bilevel.applications.denoising.label_mistakes import mistakes
from bilevel.applications.training import Augment, Trainer, probabilities
from bilevel.derivatives.mixed_precision import Precision
from bilevel.distributed.process_group import first_rank
from bilevel.distributed.weighted_mean import weighted_mean
from bilevel.errors import CheckpointError, OptionError, ProblemError
from bilevel.measures.batch_scales import DEEP_RATE
from bilevel.methods.base import Method
from bilevel.methods.penalty import Penalty
from bilevel.problem.problem import Problem
from bilevel.problem.rows import Rows
from bilevel.results import Solution, Status
from bilevel.running.callbacks import Callback
from bilevel.running.solve import solve

PASSES, LEAST_STEPS = 12, 1200
"""A run sees every example this often, and has at least this many steps."""
CERTAIN = 2.5
"""The largest log-odds of a right label that a run starts from."""
VISITS = 24
"""Where an example is seen less often than this, its importance moves by less: few gradients tell little of it."""
BATCH = 100, 200
"""The size of a batch, and from LARGE examples on."""
LARGE = 10_000
Tell = Callable[[str, int, int], object]
"""Told a stage, the steps done in it and the steps that it has."""


@dataclass(frozen=True)
class Denoised:
    """What was learnt of each training example, in the order they came in, and the classifier.

    `suggested` is the class that the classifier gives, `confidence` its probability. `quality` is the importance times
    the probability of the label as given: the order to review in.
    """

    importance: Tensor
    quality: Tensor
    suspect: Tensor
    suggested: Tensor
    confidence: Tensor
    model: nn.Module
    solution: Solution
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def noise_rate(self) -> float:
        """The share of suspects: an estimate of the share of wrong labels."""
        return float(self.suspect.double().mean())


def denoise(
    train: Examples,
    trusted: Examples,
    model: nn.Module,
    *,
    method: Method | None = None,
    steps: int | None = None,
    final_steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    watch: Tell | None = None,
    engine: str = "auto",
    precision: Precision | None = None,
) -> Denoised:
    """Learn the importance of each training example, and train `model` in place on what that leaves.

    `model` maps inputs to one score for each class; it may be on any device. Whole numbers as inputs stay so where it
    takes them, as a model of words does. `steps` are those of the bilevel run; None: 12 passes over `train`,
    and 1,200 at least. `final_steps` are those of each training before and after it; None: as many. `rate` is the
    learning rate of the trainings; None: 1e-3 before the run, and after it the one that the method chose for the lower
    level. `augment` changes inputs at random in all of it. `checkpoint` names a folder that a stopped run goes on from
    with `resume=True`. `callbacks` watch the bilevel run, `watch` the trainings.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be an nn.Module; got {type(model).__name__}.")
    began = time.perf_counter()
    (x, y), (x_trusted, y_trusted), classes = with_trusted(train, trusted, model)
    in_range("batch", batch, least=1, whole=True)
    in_range("steps", steps, least=1, whole=True)
    in_range("final_steps", final_steps, least=1, whole=True)
    in_range("rate", rate, above=0)
    size = min(batch or BATCH[len(y) >= LARGE], len(y))
    steps = steps or max(LEAST_STEPS, PASSES * len(y) // size)
    rounds = final_steps or steps
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None and first_rank():
        _same_task(folder, {"train": _digest(x, y), "trusted": _digest(x_trusted, y_trusted), "steps": steps}, resume)
    first = copy.deepcopy(model.state_dict())
    device = next(model.parameters()).device
    count = len(y) + len(y_trusted)
    trainer = Trainer(
        model,
        (torch.cat([x, x_trusted]), one_hot(torch.cat([y, y_trusted]), classes).float(), torch.ones(count)),
        steps=3 * rounds,
        augment=augment,
        precision=precision,
    )
    rows, every = torch.arange(len(y)), torch.arange(count)

    def trained(stage: str, part: Tensor, rate: float) -> Tensor:
        """Train the model anew on a part of the examples; returns its probabilities on the training inputs."""
        model.load_state_dict(first)
        trainer.train(
            part,
            steps=rounds,
            batch=size,
            rate=rate,
            seed=derived(seed, stage),
            checkpoint=folder and folder / stage.replace(" ", "-"),
            watch=watch and (lambda done: watch(stage, done, rounds)),
        )
        found = probabilities(model, x, precision=precision, augment=augment, seed=derived(seed, stage))
        if not bool(torch.isfinite(found).all()):
            raise ProblemError(f"training at the rate {rate:g} diverged. Give a smaller rate, or scale the inputs.")
        return found

    guess = trained("trusted set", every[len(y) :], rate or DEEP_RATE)
    noise = mistakes(guess, y)
    right = noise.posterior(guess, y, noise.temperature)[rows, y]
    start = torch.logit(right, eps=1e-6).clamp(-CERTAIN, CERTAIN)
    scale = max(1.0, VISITS * len(y) / (steps * size))
    model.load_state_dict(first)
    v, u = copy.deepcopy(model).train(), Rows(len(y), init=scale * start, device=device)
    solution = solve(
        importance_problem(augment, lambda u: torch.sigmoid(u / scale)),
        method or Penalty(),
        u,
        v,
        loaders(x, y, x_trusted, y_trusted, size),
        max_steps=steps,
        seed=seed,
        hypergradient=False,
        callbacks=callbacks,
        engine=engine,
        precision=precision,
        checkpoint=folder and folder / "importance",
        resume=resume,
    )
    if solution.interrupted:
        raise KeyboardInterrupt
    importance = torch.sigmoid(u.values / scale).float().cpu()
    if solution.status is Status.DIVERGED or not bool(torch.isfinite(importance).all()):
        raise ProblemError(
            f"the bilevel run diverged after {solution.steps} steps, and nothing was learnt. Scale the inputs, or use "
            "another model, method or seed."
        )
    rate = rate or _final_rate(method, solution)
    trainer.w[: len(y)] = importance.to(device)
    found = trained("round 1", every, rate)
    trainer.w.fill_(1.0)
    trainer.y[: len(y)] = noise.posterior(found, y).to(device)
    found = trained("round 2", every, rate)
    confidence, suggested = found.max(1)
    return Denoised(
        importance=importance,
        quality=importance * found[rows, y],
        suspect=(importance < 0.5) & (suggested != y),
        suggested=suggested,
        confidence=confidence,
        model=model,
        solution=solution,
        seconds=time.perf_counter() - began,
        settings={"steps": steps, "final_steps": rounds, "batch": size, "rate": rate, "seed": seed},
    )


def importance_problem(
    augment: Augment | None = None, importance: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Problem:
    """Eq. 3 of the paper over batches (x, y) of trusted examples and (x, y, row) of others.

    u holds one row for each of the others; `importance` maps it into [0, 1].
    """

    def upper(u: Rows, v: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return cross_entropy(v(augment(x) if augment else x), y)

    def lower(u: Rows, v: nn.Module, triple: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, row = triple
        w = importance(u[row])
        losses = cross_entropy(v(augment(x) if augment else x), y, reduction="none")
        return weighted_mean(losses, w)

    return Problem(upper, lower)


def _final_rate(method: Method | None, solution: Solution) -> float:
    """The rate that the penalty method took from the scale of the loss; other methods' is not one of Adam."""
    own = method is None or (isinstance(method, Penalty) and method.lower_optimizer is None)
    return float(max(solution.history["lower_rate"])) if own and len(solution.history) else DEEP_RATE


def _digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return found.hexdigest()


def _same_task(folder: Path, task: dict[str, Any], resume: bool) -> None:
    """Refuse to go on from the checkpoints of another run; write down what this one is of."""
    file = folder / "task.json"
    if file.exists():
        if not resume:
            raise CheckpointError(
                f"{folder} holds a run already, and nothing is overwritten. Pass resume=True to go on from it, or "
                "another folder."
            )
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError):
            raise CheckpointError(f"{file} cannot be read. Use another folder.") from None
        for name, value in task.items():
            if before.get(name) != value:
                what = f"{name}={before.get(name)}; got {value}" if name == "steps" else f"other {name} data"
                raise CheckpointError(f"{folder} holds a run with {what}. Use another folder.")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(task))


def loaders(
    x: Tensor, y: Tensor, x_trusted: Tensor, y_trusted: Tensor, size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Shuffled batches of trusted examples, and of others with their rows; partial batches are left out."""
    upper = TensorDataset(x_trusted, y_trusted)
    lower = TensorDataset(x, y, torch.arange(len(y)))
    return (
        DataLoader(upper, min(size, len(upper)), shuffle=True, drop_last=True),
        DataLoader(lower, size, shuffle=True, drop_last=True),
    )
