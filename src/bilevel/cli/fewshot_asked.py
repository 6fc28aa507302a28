"""What `bilevel fewshot` is asked for, as classes, tasks and a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilevel._util.checks import did_you_mean
from bilevel._util.random_state import seeded
from bilevel.applications.few_shot.classifier import BACKBONES
from bilevel.applications.few_shot.meta_train import TaskSampler, backbone
from bilevel.cli import python_file
from bilevel.data.class_images import NAMES, ClassSplits, load_classes
from bilevel.data.image_folders import Reader
from bilevel.errors import OptionError

LEAST_SIDE = 16
"""Pixels of images that both networks of the paper leave one of, at least."""


def lasting(data: str) -> str:
    """What names the data from any folder."""
    return str(Path(data).resolve()) if data not in NAMES and Path(data).is_dir() else data


def load(asked: Mapping[str, Any], read: Reader | None = None) -> ClassSplits:
    splits = load_classes(asked["data"], lists=asked["lists"], seed=asked["seed"], read=read)
    turned = asked["rotations"] if asked["rotations"] is not None else asked["data"] == "omniglot"
    return splits.rotated() if turned else splits


def samplers_of(splits: ClassSplits, asked: Mapping[str, Any]) -> tuple[TaskSampler, TaskSampler | None, TaskSampler]:
    """Those of training, validation (None where it has too few classes) and test."""
    shots, queries, valid = asked["shots"], asked["queries"], splits.validation
    if asked["train_ways"] is not None and asked["train_ways"] > len(splits.train.names):
        raise OptionError(
            f"--train-ways must be at most the number of classes to learn from, {len(splits.train.names)}; got "
            f"{asked['train_ways']}."
        )
    learnt, tried = len(splits.train.names), len(splits.test.names)
    if asked["ways"] > (tried if asked["train_ways"] else min(learnt, tried)):
        raise OptionError(
            f"--ways must be at most the number of classes of each part: there are {learnt} to learn from and {tried} "
            f"for the test; got {asked['ways']}. Give more classes (of a folder, six times the ways), or ask "
            "for fewer ways."
        )
    most = min(splits.train.counts) - queries
    if asked["train_shots"] is not None and not asked["train_shots"] <= most:
        raise OptionError(
            f"--train-shots and --queries must be at most the number of images of every class to learn from, "
            f"{most + queries}; got {asked['train_shots']} and {queries}."
        )
    train = TaskSampler(
        splits.train,
        asked["train_ways"] or asked["ways"],
        asked["train_shots"] or shots,
        queries,
        tasks=asked["meta_batch"],
    )
    watched = None
    if valid is not None and len(valid.names) >= asked["ways"]:
        watched = TaskSampler(valid, asked["ways"], shots, queries)
    return train, watched, TaskSampler(splits.test, asked["ways"], shots, queries)


def network_of(name: str, shape: Sequence[int], where: torch.device, seed: int) -> nn.Module:
    if not python_file.is_file(name):
        if name not in BACKBONES:
            raise OptionError(
                f"--backbone has no {name!r}.{did_you_mean(name, BACKBONES)} It is one of {', '.join(BACKBONES)}, or "
                "path.py:make."
            )
        if min(shape[1:]) < LEAST_SIDE:
            raise OptionError(
                f"--backbone {name} halves images four times: they need {LEAST_SIDE}x{LEAST_SIDE} pixels at least; "
                f"these have {shape[1]}x{shape[2]}. Enlarge them, or give a network of your own (path.py:make)."
            )
        with seeded(seed):
            return backbone(name, shape[0]).to(where)
    return python_file.network(name, "--backbone", "make(shape)", (tuple(shape),), seed)[1].to(where)
