"""One cell of the denoising study: the data as the paper splits it, one way of training and its scores.

A cell without time left saves its state and continues from there, with the same bits on a CPU.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from bilevel import Rows, Status, solve
from bilevel._util.atomic_files import write_whole
from bilevel._util.random_state import seeded
from bilevel.applications.denoising.denoise import denoise, importance_problem, loaders
from bilevel.applications.training import OnProgress, accuracy, fit, probabilities
from bilevel.data import corrupt, split_trusted
from bilevel.derivatives.mixed_precision import Precision
from bilevel.methods.base import Method
from bilevel_studies.compact import load
from bilevel_studies.denoising import study as denoising_study
from bilevel_studies.denoising.study import PAPER_T, STUDIES, Study
from bilevel_studies.study import Deadline, Found, Leave, OutOfTimeError, Settings, Sitting, device_name

# Reads each data set once.
loaded = cache(load)
# Columns that always save their state.
LONG = ("approx-grad", "algorithm-2")
# One in this many trusted examples is held out for early stopping.
HELD_OUT = 5


class Task:
    """The data of a cell and its network, untrained and on the device."""

    def __init__(self, settings: Settings, device: torch.device, sitting: Sitting | None = None) -> None:
        self.study: Study = STUDIES[settings["dataset"]]
        self.sitting = sitting or Sitting()
        self.seed = int(settings["seed"])
        self.passes, self.final_passes = settings["passes"]
        self.device = device
        data = split_trusted(loaded(settings["dataset"]), self.study.trusted, self.seed)
        self.truth = data.y
        self.x = data.x
        self.y = corrupt(data.y, settings["noise"], len(data.classes), self.seed, settings["kind"])
        self.trusted, self.test = data.part("trusted"), data.part("test")
        with seeded(self.seed):
            self.model = self.study.network().to(self.device)

    @property
    def precision(self) -> Precision | None:
        return "bf16" if self.device.type == "cuda" else None

    def steps(self, passes: float, rows: int) -> int:
        return max(1, round(passes * rows / self.study.batch))

    def accuracy(self, model: nn.Module) -> float:
        return accuracy(model, self.test)

    def fit(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        steps: int,
        on_progress: OnProgress | None = None,
        before: int | None = None,
    ) -> None:
        """Train the model. If the training comes `before` a run with this many steps, its own steps do not count."""

        def count(done: int) -> None:
            if on_progress is not None:
                on_progress(done)
            self.sitting.reached(*((done, steps) if before is None else (0, before)))

        fit(
            model,
            x,
            y,
            steps=steps,
            batch=self.study.batch,
            rate=self.study.rate,
            seed=self.seed,
            augment=self.study.augment,
            precision=self.precision,
            on_progress=count,
            checkpoint=self.sitting.folder("training"),
        )

    def found(self, importance: Tensor, suspect: Tensor) -> Found:
        """Return how well the wrong labels were found."""
        wrong = (self.y != self.truth).numpy()
        return {
            "auc": float(roc_auc_score(~wrong, importance.numpy())),
            "f1": float(f1_score(wrong, suspect.numpy())),
            "noise_rate": float(np.mean(suspect.numpy())),
        }


def run(
    settings: Settings, device: torch.device | None = None, place: Path | None = None, deadline: float | None = None
) -> Found | None:
    """Run or continue a cell until the deadline, by default on a GPU if there is one. Return None after Ctrl-C.

    `place` is the folder of its state. A cell that takes seconds and has no deadline saves no state: saving would count
    in its time.
    """
    long = settings["column"] in LONG or deadline is not None or (place is not None and place.exists())
    sitting = Sitting(place if long else None, deadline)
    task = Task(settings, device or torch.device("cuda" if torch.cuda.is_available() else "cpu"), sitting)
    sitting.began = time.perf_counter()  # the data and the network do not count
    try:
        result = COLUMN_RUNS[settings["column"]](task)
    except OutOfTimeError:
        result = {"partial": True, "steps": sitting.done, "of": sitting.of}
    seconds = round(sitting.seconds(), 4)
    if result is None or result.get("partial"):
        sitting.pause(seconds)
    return None if result is None else result | {"seconds": seconds, "device": device_name(task.device)}


def ours(task: Task) -> Found | None:
    study, rows, sitting = task.study, len(task.y), task.sitting
    steps, rounds = task.steps(task.passes, rows), task.steps(task.final_passes, rows + study.trusted)
    begins = {"trusted set": 0, "round 1": rounds + steps, "round 2": 2 * rounds + steps}
    of = 3 * rounds + steps
    try:
        found = denoise(
            (task.x, task.y),
            task.trusted,
            task.model,
            steps=steps,
            batch=study.batch,
            final_steps=rounds,
            rate=study.rate,
            augment=study.augment,
            seed=task.seed,
            precision=task.precision,
            checkpoint=sitting.place,
            resume=sitting.place is not None,
            callbacks=[Leave(sitting, rounds, of)],
            on_progress=lambda stage, done, total: sitting.reached(begins[stage] + done, of),
        )
    except KeyboardInterrupt:
        return None
    return {
        "accuracy": task.accuracy(found.model),
        **task.found(found.importance, found.suspect),
        "auc_quality": float(roc_auc_score((task.y == task.truth).numpy(), found.quality.numpy())),
        "bilevel_seconds": round(found.solution.history["seconds"][-1], 2),
        "engine": found.solution.engine,
    }


def plainly(column: str, task: Task) -> Found:
    """Train on the examples of a column, with as many steps as one round of ours.

    `oracle` has the examples with right labels, `plain` all with their labels, `clean` all with the right labels, each
    with the trusted examples; `trusted` has only these.
    """
    x, y = task.trusted
    if column != "trusted":
        rows = task.y == task.truth if column == "oracle" else slice(None)
        labels = task.truth if column == "clean" else task.y
        x, y = torch.cat([task.x[rows], x]), torch.cat([labels[rows], y])
    task.fit(task.model, x, y, steps=task.steps(task.final_passes, len(task.y) + task.study.trusted))
    return {"accuracy": task.accuracy(task.model)}


def stopped(task: Task) -> Found:
    """Train+Val at its best pass, chosen by the accuracy on a held-out fifth of the trusted set."""
    x, y = task.trusted
    held = torch.arange(len(y)) % HELD_OUT == 0
    inputs, labels = torch.cat([task.x, x[~held]]), torch.cat([task.y, y[~held]])
    each = task.steps(1, len(labels))
    file = task.sitting.folder("best.json")
    best: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else []

    def on_progress(done: int) -> None:
        while best and best[-1]["epoch"] * each >= done:  # measured after the saved state
            best.pop()
        if done % each == 0:
            score = float((probabilities(task.model, x[held]).argmax(1) == y[held]).double().mean())
            if not best or score > best[-1]["held"]:
                best.append({"held": score, "accuracy": task.accuracy(task.model), "epoch": done // each})
                if file is not None:
                    write_whole(file, json.dumps(best))

    task.fit(task.model, inputs, labels, steps=task.steps(task.final_passes, len(labels)), on_progress=on_progress)
    return {"accuracy": best[-1]["accuracy"], "epoch": best[-1]["epoch"]}


def approx_grad(task: Task) -> Found | None:
    method = denoising_study.approx_grad(PAPER_T, task.study.rate)
    return _bilevel(task, method, "graph" if task.device.type == "cuda" else "auto")


def algorithm_2(task: Task) -> Found | None:
    return _bilevel(task, denoising_study.algorithm_2(PAPER_T, task.study.paper_nu))


def _bilevel(task: Task, method: Method, engine: str = "auto") -> Found | None:
    """Run a method as the paper does: v is pretrained on the trusted set, which gives the first importances.

    ApproxGrad is not compiled: an upper step takes 41 Hessian products, and compiling them would take longer than the
    run.
    """
    model, steps = copy.deepcopy(task.model), task.steps(task.passes, len(task.y))
    task.fit(model, *task.trusted, steps=max(1, task.steps(task.final_passes, len(task.y)) // 5), before=steps)
    p = probabilities(model, task.x)[torch.arange(len(task.y)), task.y]
    u = Rows(len(task.y), init=denoising_study.start(p), device=task.device)
    data = loaders(task.x, task.y, *task.trusted, task.study.batch)
    model.train()
    solution = solve(
        importance_problem(task.study.augment, denoising_study.importance),
        method,
        u,
        model,
        data,
        max_steps=steps,
        seed=task.seed,
        hypergradient=False,
        engine=engine,
        precision=task.precision,
        callbacks=[Deadline(task.sitting)],
        checkpoint=task.sitting.folder("importance"),
        resume=task.sitting.place is not None,
    )
    if solution.interrupted:
        return None
    importance = denoising_study.importance(u.values.cpu())
    so_far = {"partial": True, "of": steps} if solution.status is Status.STOPPED else {}
    return {
        "accuracy": task.accuracy(model),
        **task.found(importance, importance < 0.5),
        "engine": solution.engine,
        "steps": solution.steps,
        "status": solution.status.name.lower(),
        **so_far,
    }


COLUMN_RUNS: dict[str, Callable[[Task], Found | None]] = {
    "ours": ours,
    "stopped": stopped,
    **{column: partial(plainly, column) for column in ("oracle", "trusted", "plain", "clean")},
    "approx-grad": approx_grad,
    "algorithm-2": algorithm_2,
}
