"""Run a cell of the few-shot study: a method trains the representation, which is tested on unseen classes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilevel import ApproxGrad, DataError, Penalty, ReverseMode, Run, Status
from bilevel._util.atomic_files import read_json, write_whole
from bilevel._util.random_state import seeded
from bilevel.applications.augmentation import crop_and_flip, crop_flip_and_erase
from bilevel.applications.few_shot.evaluation import Best, Evaluation, Validation, adapt_and_evaluate
from bilevel.applications.few_shot.meta_train import UPPER_RATE, default_method, meta_train, upper_adam
from bilevel.applications.few_shot.tasks import PROXIMITY, SCALE, Start, TaskSampler, backbone
from bilevel.applications.networks import mini_imagenet_resnet
from bilevel.applications.training import SAVES, Augment
from bilevel.data.class_images import ClassSplits, ImageClasses
from bilevel.methods.base import Method
from bilevel_studies.compact import load_classes
from bilevel_studies.few_shot.prototypes import RATE, Similarity, evaluate_prototypes, train_prototypes
from bilevel_studies.few_shot.study import CHOICES, CIFAR, CURVE_TASKS, OMNIGLOT, TABLE, TEST_QUERIES, TEST_TASKS, TIME
from bilevel_studies.image_models import move_slightly
from bilevel_studies.study import Found, RunItem, Settings, device_name

# How many times the accuracy is measured in a run.
POINTS = 6
# Upper steps, at most. Reading a record waits for the GPU, and must cost the same share of a short and a long run.
LOG_EVERY = 25
# Characters, among the 1,200 for training, on which settings are compared.
VALIDATION = 100
# The rate of gradient descent on the classifiers in ApproxGrad, which minimise g only.
APPROX_RATE = 0.05
# The rate of Adam on the classifiers of the paper's setting at the test; the paper gives none.
PAPER_TEST_RATE = 1e-2
# The similarity of the methods that train nothing for a task.
SIMILARITY: dict[str, Similarity] = {"prototypes": "distance", "cosines": "cosine"}
# The damping of the linear system of ApproxGrad.
DAMPING = 0.1


@cache
def loaded(dataset: str, part: str) -> ClassSplits:
    """Return the classes. On Omniglot, the part `choices` has meta-validation classes."""
    splits = load_classes(dataset, validation=VALIDATION if part == CHOICES else 0)
    return splits.rotated() if dataset == OMNIGLOT else splits


def validation(splits: ClassSplits) -> ImageClasses:
    if splits.validation is None:
        raise DataError(f"{splits.name} has no meta-validation classes to choose on.")
    return splits.validation


def method(settings: Settings) -> Method:
    """Return the bilevel method of a cell."""
    lower_steps = int(settings["T"])
    upper_rate, decay = settings.get("upper_rate", UPPER_RATE), settings.get("decay", 0.0)
    adam = upper_adam(upper_rate, decay)
    match settings["method"]:
        case "paper":
            return Penalty.algorithm_2(
                lower_steps=lower_steps, gamma=0.01, epsilon=0.01, lam=0.01, nu=0.0001, upper_rate=1e-3, lower_rate=1e-3
            )
        case "approx-grad":
            return ApproxGrad(
                lower_steps=lower_steps,
                linear_steps=lower_steps,
                damping=DAMPING,
                decay="linear",
                upper_optimizer=adam,
                lower_optimizer=partial(torch.optim.SGD, lr=settings.get("lower_rate", APPROX_RATE)),
            )
        case "rmd":
            return ReverseMode(lower_steps=lower_steps, upper_optimizer=adam, decay="linear", lower_decay="constant")
    options = {key: settings[key] for key in ("gamma", "lam", "lower_rate") if key in settings}
    return default_method(lower_steps=lower_steps, upper_rate=upper_rate, decay=decay, **options)


def representation(settings: Settings, channels: int) -> nn.Module:
    if settings.get("plain"):
        return mini_imagenet_resnet(512, 3, normalised=False)
    return backbone(settings["backbone"], channels)


def augmentation(settings: Settings) -> Augment | None:
    if settings["dataset"] == CIFAR:
        return crop_flip_and_erase if settings.get("erased") else crop_and_flip
    return move_slightly if settings.get("moved") else None


def classifiers(settings: Settings) -> dict[str, Any]:
    """Return the scale, start and regulariser of the classifiers."""
    ours = settings["method"] != "paper"
    start: Start = settings.get("start", "means" if ours else "random")
    found = {"scale": settings.get("scale", SCALE if ours else 1.0), "start": start}
    return found | {"proximity": settings.get("proximity", PROXIMITY if ours else 0.0)}


def tested(settings: Settings) -> dict[str, Any]:
    """Return the options of the classifiers at the test: the paper's start at random and are trained by Adam."""
    adam = {"optimizer": partial(torch.optim.Adam, lr=PAPER_TEST_RATE)} if settings["method"] == "paper" else {}
    return classifiers(settings) | adam


def run(settings: Settings, device: torch.device, folder: Path, deadline: float | None = None) -> Found | None:
    """Run or continue a cell until the deadline. Return None after Ctrl-C."""
    part = CHOICES if settings["part"] == CHOICES else TABLE
    splits, seed = loaded(settings["dataset"], part), int(settings["seed"])
    known, unseen = splits.train, validation(splits) if part == CHOICES else splits.test
    learnt = known.rotated() if settings.get("turned") else known
    with seeded(seed):
        network = representation(settings, known.shape[0]).to(device)
    train = TaskSampler(learnt, settings["train_ways"], settings["shots"], settings["queries"], tasks=settings["tasks"])
    queries = int(settings.get("test_queries", TEST_QUERIES))
    test = TaskSampler(unseen, settings["ways"], settings["shots"], queries)
    selects = settings.get("selected") and settings["part"] != TIME
    chosen_on = TaskSampler(validation(splits), settings["ways"], settings["shots"], queries) if selects else None
    place = folder / RunItem(settings, 0).name
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runner = _prototypes if settings["method"] in SIMILARITY else _bilevel
    found = runner(settings, network, train, (test, chosen_on), device, place, deadline)
    if found is None:
        return None
    if settings["part"] == TIME:
        return found | {"device": device_name(device)}
    tasks = int(settings.get("test_tasks", TEST_TASKS))
    found |= _accuracies(settings, network, test, tasks, seed) | {
        "tasks": tasks,
        "device": device_name(device),
        "queries": queries,
        "weights": sum(p.numel() for p in network.parameters()),
        "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }
    if "also" in settings:
        ways, shots = settings["also"]
        found["also"] = _accuracies(settings, network, TaskSampler(unseen, ways, shots, queries), tasks, seed)
    if settings["part"] == TABLE and settings["method"] == "penalty":
        seen = TaskSampler(known, settings["ways"], settings["shots"], queries)
        found["train_accuracy"] = _evaluate(settings, network, seen, min(tasks, CURVE_TASKS), seed).accuracy
    return found


def _accuracies(settings: Settings, network: nn.Module, sampler: TaskSampler, tasks: int, seed: int) -> Found:
    """Return the accuracy on some tasks. Bilevel methods are also measured with class means, without training."""
    found = _evaluate(settings, network, sampler, tasks, seed)
    right = (found.accuracies * found.predictions.shape[1]).round().int().tolist()
    kept: Found = {"accuracy": found.accuracy, "interval": found.interval, "right": right}
    if settings["method"] not in SIMILARITY:
        kept["accuracy_of_means"] = adapt_and_evaluate(network, sampler, tasks=tasks, steps=0, seed=seed).accuracy
    return kept


def _evaluate(settings: Settings, network: nn.Module, sampler: TaskSampler, tasks: int, seed: int) -> Evaluation:
    if settings["method"] in SIMILARITY:
        return evaluate_prototypes(network, sampler, tasks=tasks, seed=seed, similarity=SIMILARITY[settings["method"]])
    return adapt_and_evaluate(network, sampler, tasks=tasks, seed=seed, **tested(settings))


def _points(settings: Settings) -> tuple[int, int]:
    """Return how many times the accuracy is measured in the run, and on how many tasks."""
    if settings["part"] == TIME:
        return 2, 1
    points = int(settings.get("points", POINTS if settings["part"] == TABLE else 1))
    return points, min(CURVE_TASKS, int(settings.get("test_tasks", CURVE_TASKS)))


def _watches(
    settings: Settings,
    network: nn.Module,
    others: tuple[TaskSampler, TaskSampler | None],
    place: Path,
    deadline: float | None,
) -> tuple[Validation, _Chooser | None]:
    """Return what measures a bilevel run: the accuracy on test tasks and, if a step is selected, on other classes."""
    test, chosen_on = others
    steps, seed = int(settings["steps"]), int(settings["seed"])
    points, tasks = _points(settings)
    watch = Validation(
        network,
        test,
        every=max(1, steps // points),
        tasks=tasks,
        file=place / "accuracy.json",
        deadline=deadline,
        seed=seed + 1,
        **tested(settings),
    )
    if chosen_on is None:
        return watch, None
    chooser = _Chooser(
        network,
        chosen_on,
        every=max(1, steps // int(settings["selected"])),
        tasks=int(settings.get("test_tasks", TEST_TASKS)),
        file=place / "chosen.json",
        keep=True,
        seed=seed + 2,
        **tested(settings),
    )
    chooser.watch = watch
    return watch, chooser


def _bilevel(
    settings: Settings,
    network: nn.Module,
    train: TaskSampler,
    others: tuple[TaskSampler, TaskSampler | None],
    device: torch.device,
    place: Path,
    deadline: float | None,
) -> Found | None:
    steps, seed = int(settings["steps"]), int(settings["seed"])
    watch, chooser = _watches(settings, network, others, place, deadline)
    solution = meta_train(
        network,
        train,
        steps=steps,
        method=method(settings),
        augment=augmentation(settings),
        callbacks=[watch] if chooser is None else [chooser, watch],
        checkpoint=place / "checkpoint",
        resume=True,
        log_every=min(LOG_EVERY, max(1, steps // 8)),
        seed=seed,
        precision="bf16" if device.type == "cuda" else None,
        **classifiers(settings),
    )
    if solution.interrupted:
        return None
    if settings["part"] == TIME:
        return _step_time([(row["step"], row["seconds"]) for row in watch.rows]) | {"engine": solution.engine}
    seconds = watch.trained(solution.history["seconds"][-1])
    return {
        "steps": solution.steps,
        "of": steps,
        "partial": solution.status is Status.STOPPED,
        "engine": solution.engine,
        "status": solution.status.name.lower(),
        "curve": watch.rows,
        "seconds": round(seconds, 2),
        "ms_per_step": round(1000 * seconds / max(1, solution.steps), 3),
        "upper": solution.history["upper"][-1] / train.tasks,
        "lower": solution.history["lower"][-1] / train.tasks,
        "residual": solution.history["residual"][-1],
        **_kept(None if chooser is None else chooser.best),
    }


class _Chooser(Validation):
    """Keeps the best step on meta-validation classes. Its seconds do not count as training, which `watch` times."""

    watch: Validation
    # Seconds of the last measurement. The run counts them from the next step.
    owed = 0.0

    def log(self, run: Run) -> bool:
        self.watch.spent += self.owed
        before = self.spent
        late = super().log(run)
        self.owed = self.spent - before
        return late


def _kept(best: Best | None) -> Found:
    """Restore the best step of the representation, and return its number and accuracy."""
    kept = None if best is None else best.restore()
    return {} if kept is None else {"kept_step": kept[0], "chosen_accuracy": kept[1]}


def _prototypes(
    settings: Settings,
    network: nn.Module,
    train: TaskSampler,
    others: tuple[TaskSampler, TaskSampler | None],
    device: torch.device,
    place: Path,
    deadline: float | None,
) -> Found:
    steps, seed = int(settings["steps"]), int(settings["seed"])
    points, tasks = _points(settings)
    test, chosen_on = others
    similarity = SIMILARITY[settings["method"]]
    best = None if chosen_on is None else Best(network, place / "best")
    clock, every, marked = _Clock(place / "accuracy.json", device), max(1, steps // points), max(1, steps // SAVES)
    chosen = max(1, steps // int(settings.get("selected", 1)))

    def on_progress(step: int) -> bool:
        clock.update(step)
        late = deadline is not None and time.monotonic() >= deadline
        choose = best is not None and (step % chosen == 0 or step == steps)
        if step % every == 0 or step % marked == 0 or step == steps or late or choose:
            clock.stop()
            if step % every == 0:
                accuracy = _evaluate(settings, network, test, tasks, seed + 1).accuracy
                clock.rows.append({"step": step, "seconds": clock.seconds, "accuracy": accuracy})
            if choose and best is not None and chosen_on is not None:
                count = int(settings.get("test_tasks", TEST_TASKS))
                best.update(step, _evaluate(settings, network, chosen_on, count, seed + 2).accuracy)
            clock.resume(step)
        return late

    train_prototypes(
        network,
        train,
        steps=steps,
        rate=settings.get("upper_rate", RATE),
        decay=settings.get("decay", 0.0),
        scale=settings.get("distances", 1.0) if similarity == "distance" else settings.get("scale", SCALE),
        similarity=similarity,
        augment=augmentation(settings),
        seed=seed,
        precision="bf16" if device.type == "cuda" else None,
        on_progress=on_progress,
        checkpoint=place / "checkpoint",
    )
    if settings["part"] == TIME:
        return _step_time(clock.marks)
    done, seconds = clock.marks[-1]
    return {
        "steps": done,
        "of": steps,
        "partial": done < steps,
        "status": "stopped" if done < steps else "max_steps",
        "curve": clock.rows,
        "seconds": round(seconds, 2),
        "ms_per_step": round(1000 * seconds / max(1, done), 3),
        **_kept(best),
    }


def _step_time(marks: Sequence[tuple[float, float]]) -> Found:
    """Return the milliseconds of a step in the second half of a run, from pairs (step, seconds).

    A GPU captures the first steps.
    """
    (first, began), (last, ended) = marks[(len(marks) - 1) // 2], marks[-1]
    return {"steps": int(last), "ms_per_step": round(1000 * (ended - began) / max(1, last - first), 3)}


class _Clock:
    """Times training without measurements and keeps accuracies, both in a file: another process can continue them."""

    def __init__(self, file: Path, device: torch.device) -> None:
        kept = read_json(file)
        self.file, self.device = file, device
        self.rows: list[dict[str, float]] = kept.get("rows", [])
        # Pairs (step, seconds so far).
        self.marks: list[tuple[int, float]] = [(step, seconds) for step, seconds in kept.get("marks", [[0, 0.0]])]
        self.seconds, self.began, self.heard = 0.0, time.perf_counter(), False

    def update(self, step: int) -> None:
        """Record that a step is done. The first call drops what was measured after the saved state."""
        if not self.heard:
            self.rows = [row for row in self.rows if row["step"] < step]
            self.marks = [mark for mark in self.marks if mark[0] < step]
            self.seconds, self.heard = self.marks[-1][1], True

    def stop(self) -> None:
        """Stop the clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a queued step is not done yet
        self.seconds += time.perf_counter() - self.began

    def resume(self, step: int) -> None:
        """Save the measurements up to a step and start the clock again."""
        self.marks.append((step, self.seconds))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, json.dumps({"rows": self.rows, "marks": self.marks}) + "\n")
        self.began = time.perf_counter()
