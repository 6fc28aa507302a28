"""The settings of the few-shot study that were compared on meta-validation classes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bilevel.running.run_many import Settings
from bilevel_studies.few_shot.selection import apart
from bilevel_studies.few_shot.study import (
    ALSO_RUN,
    ALSO_SEEDS,
    BACKBONES,
    CHOICE_SEEDS,
    CIFAR,
    METHODS,
    NETWORKS,
    OMNIGLOT,
    chosen_for,
    study_choices,
    table_settings,
)
from bilevel_studies.statistics import Numbers, chosen, percent
from bilevel_studies.study import Kept, table


def choice_tables(cells: Sequence[Kept], run: Sequence[Kept]) -> dict[str, str]:
    """Return the tables of what was compared; `run` are the cells of the accuracy table, with any settings."""
    found = {}
    if some := in_order(chosen(cells, dataset=OMNIGLOT), OMNIGLOT):
        rows = [
            [
                s["varied"],
                f"{100 * f['accuracy']:.2f} ± {100 * f['interval']:.2f}",
                f"{100 * f['accuracy_of_means']:.2f}",
            ]
            for s, f in some
        ]
        found["Choices on Omniglot"] = table(["", "accuracy", "of class means"], rows)
    for backbone in BACKBONES[CIFAR]:
        if some := in_order(chosen(cells, dataset=CIFAR, backbone=backbone), CIFAR):
            found[f"Choices on CIFAR-FS, {NETWORKS[backbone]}"] = tried_table(some)
    if body := length_table(run):
        found["Settings at the length of the table"] = body
    return found


def in_order(cells: Sequence[Kept], dataset: str) -> list[Kept]:
    """Return the cells that the study asks for, those with the most shots in training first."""
    order = [_key(settings) for settings in study_choices(dataset)]
    listed = [pair for pair in cells if _key(pair[0]) in order]
    return sorted(listed, key=lambda pair: (-int(pair[0]["shots"]), order.index(_key(pair[0]))))


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def tried_table(cells: Sequence[Kept]) -> str:
    rows = []
    for varied, shots, method in dict.fromkeys((s["varied"], s["shots"], s["method"]) for s, _ in cells):
        some = chosen(cells, varied=varied, shots=shots, method=method)
        by = [percent(chosen(apart(some), shots=n)) for n in (5, 1)]
        mean = f"{sum(one.mean for one in by) / len(by):.2f}" if all(by) else ""
        shown = [one.show(usual=CHOICE_SEEDS) if one else "" for one in by]
        rows.append([varied, str(shots), METHODS[method], *shown, mean])
    return table(["", "shots in training", "method", "5 shots", "1 shot", "mean"], rows)


def length_table(run: Sequence[Kept]) -> str:
    """Settings of one place that were run with the steps of the table; the one that is taken comes first."""
    rows = []
    for (backbone, method), others in ALSO_RUN.items():
        for name in (chosen_for(backbone, method), *others):
            wanted = table_settings(CIFAR, backbone, 5, 5, method, 0, name)
            del wanted["seed"]
            mine = [pair for pair in run if wanted.items() <= pair[0].items() and not pair[1].get("partial")]
            if mine:
                rows.append([NETWORKS[backbone], METHODS[method], name, *_by_seeds(mine)])
    heads = ["network", "method", "settings", "meta-validation, 5 shots", "test, 5 shots", "test, 1 shot"]
    return table(heads, rows) if rows else ""


def _by_seeds(cells: Sequence[Kept]) -> list[str]:
    """Meta-validation and both tests over the seeds of the comparison; in brackets the mean of more seeds."""
    found = []
    for key, some in (("chosen_accuracy", cells), *(("accuracy", chosen(apart(cells), shots=n)) for n in (5, 1))):
        by = {s["seed"]: 100 * f[key] for s, f in some if key in f}
        first = Numbers(tuple(value for seed, value in by.items() if seed < ALSO_SEEDS))
        more = f" ({sum(by.values()) / len(by):.2f} over {len(by)})" if len(by) > len(first.values) else ""
        found.append(f"{first.show(usual=ALSO_SEEDS)}{more}" if first else "")
    return found
