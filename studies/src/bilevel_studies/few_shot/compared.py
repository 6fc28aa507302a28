"""The settings of the few-shot study that were compared, as its page tells them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from bilevel.running.run_many import Found, Settings
from bilevel_studies.denoising.numbers import Numbers, chosen, percent, values
from bilevel_studies.few_shot.findings import NETWORKS
from bilevel_studies.few_shot.shown import apart
from bilevel_studies.few_shot.study import (
    ALSO_RUN,
    ALSO_SEEDS,
    APART,
    BACKBONES,
    BETTER_APART,
    CHOICE_SEEDS,
    CHOSEN,
    CIFAR,
    CIFAR_VARIED,
    METHODS,
    OMNIGLOT,
    VARIED,
    chosen_for,
    study_choices,
    table_settings,
)
from bilevel_studies.filed import Kept
from bilevel_studies.markdown import table

OF_OMNIGLOT = (
    "Our setting was there before these rows, and none of them was taken after; the rate 5e-3 is better at this length."
)
TRIED = (
    "On CIFAR-FS cosines are multiplied by the `scale`, squared distances as the row says; where nothing is named, the "
    "scale is 10, the proximity 5, gamma 4, the lower rate 0.006, and the rate of Adam on the representation 0.002, "
    "with the residual network 0.001. `40 ways` has two tasks of 40 classes in a meta-batch, not four of 20; `turned`: "
    "images turned by 90, 180 and 270 degrees are further classes to learn from. Most rows came up after tables of "
    "test classes had been seen: 5 shots in training for tests with 1, proximity 1, prices below 1, scales above 10, "
    "distances but for those of 1, / 16 and / 128, more ways, turned classes, decays other than 0.5. Trained with 1 "
    "shot, not all of them were tried, and by one seed."
)
AT_LENGTH = (
    "Choices have half the steps of the table (with the residual network, and with ProtoNet on four convolutions), and "
    "what leads there need not lead in the end. Some of it, what led and what the table had before among it, was run "
    "at the table's length, over {seeds} seeds; of more, the mean stands behind. With the residual network the best on "
    "meta-validation tasks of 5 shots is taken: the accuracy at the step that is kept, the highest of the five that "
    "chose it. With four convolutions the table has no such tasks: there ProtoNet has what is better for it at the "
    "test with 5 shots."
)
BEFORE = (
    "The table of the residual network first had decay 0.5 for all, and with 5 shots Penalty (`scale 20`) was behind "
    "ProtoNet in each of three seeds. After that was seen, decays of 1 and 2 were tried for both, and 2 was taken for "
    "the bilevel methods; after that table was seen, 4. Decay acts on the last normalisation, too, and makes distances "
    "shorter, of which cosines know nothing: ProtoNet's distances were compared anew with decays of 1, 2 and 4. It "
    "keeps decay 0.5. With 1 shot at the test, for which nothing was chosen at this length, distances / 8 with decay 2 "
    "and / 2 with decay 4 are better for it. Decay 2 of the bilevel methods has more seeds than the commands below "
    "run, for it was the table's before."
)
OF_RESNET = (
    "Rows have AdamW with a decay of 0.5 where no other is named and, in each image, an erased square of half its side "
    "(Cutout, DeVries and Taylor 2017). `plain` is the network without batch normalisation in its last two layers, on "
    "which ProtoNet's distances are shorter. Decay and squares come from an earlier comparison on the plain network "
    "with 5 shots, in which they were the best for Penalty and for ProtoNet. There Penalty was behind ProtoNet: the "
    "normalised network, and the price and the proximity that Penalty has now, came after that. In a comparison before "
    "this one, of each number of shots by itself and one seed, the rate 5e-4 was mostly behind, and Penalty's best "
    "scale with 1 shot was 5. After a table of test classes in which the seeds of Penalty and ApproxGrad were far "
    "apart, the shift of the last batch normalisation starts at 1 (distances do not change by that); with it, the "
    "step is kept that is the best of 5 on 600 tasks, and not of 15 on 200. `64 ways` has all classes in one task, "
    "with 11 queries. No decay above 4 was tried."
)


def choices(cells: Sequence[Kept], run: Sequence[Kept] = ()) -> list[str]:
    """The section on what was compared; `run` are the cells of the table, whatever their settings."""
    if not cells:
        return []
    cells = [pair for pair in cells if not pair[1].get("partial")]
    found = [
        "## What was chosen",
        "Settings were compared on classes of meta-validation. On CIFAR-FS the best in the mean of tests with 5 shots "
        "and with 1 is taken, however small its lead; where several were run at the length of the table, too, the best "
        "there. The numbers of steps in the tables are not chosen so: they were set by hand, and the curves above, of "
        "test classes, were seen before.",
    ]
    if some := _in_order(chosen(cells, dataset=OMNIGLOT), OMNIGLOT):
        found += [
            f"Our setting and what becomes of it with changes, on Omniglot, 20-way 1-shot, {some[0][0]['steps']:,} "
            "steps, learnt on 1,100 of the 1,200 characters and measured on the other 100:",
            table(
                ["", "accuracy", "of class means"],
                [[s["varied"], _with_interval(f), f"{100 * f['accuracy_of_means']:.2f}"] for s, f in some],
            ),
            OF_OMNIGLOT,
            *_missing(VARIED, some),
        ]
    else:
        found.append("Omniglot: not run.")
    if chosen(cells, dataset=CIFAR):
        found.append(TRIED)
    for backbone in BACKBONES[CIFAR]:
        if some := _in_order(chosen(cells, dataset=CIFAR, backbone=backbone), CIFAR):
            found += [
                f"{NETWORKS[backbone].capitalize()} on CIFAR-FS, 5 ways, {some[0][0]['steps']:,} steps, measured on "
                f"the 16 meta-validation classes{' at its best step there' * (backbone == 'resnet')}, over "
                f"{CHOICE_SEEDS} seeds.",
                *([OF_RESNET] if backbone == "resnet" else []),
                _tried(some),
                _taken(backbone),
                *_missing(CIFAR_VARIED[backbone], some),
            ]
    return found + _at_length(run)


def _at_length(run: Sequence[Kept]) -> list[str]:
    """Settings of one place that were run with the steps of the table, the one that is taken first."""
    rows = []
    for (backbone, method), others in ALSO_RUN.items():
        for name in (chosen_for(backbone, method), *others):
            wanted = table_settings(CIFAR, backbone, 5, 5, method, 0, name)
            del wanted["seed"]
            mine = [pair for pair in run if wanted.items() <= pair[0].items() and not pair[1].get("partial")]
            if mine:
                rows.append([NETWORKS[backbone], METHODS[method], name, *_by_seeds(mine)])
    if not rows:
        return []
    heads = ["network", "method", "settings", "meta-validation, 5 shots", "test, 5 shots", "test, 1 shot"]
    return [AT_LENGTH.format(seeds=ALSO_SEEDS), BEFORE, table(heads, rows)]


def _by_seeds(cells: Sequence[Kept]) -> list[str]:
    """Meta-validation and both tests over the seeds that settings are compared by, and the mean of more."""
    found = []
    for key, some in (("chosen_accuracy", cells), *(("accuracy", chosen(apart(cells), shots=n)) for n in (5, 1))):
        by = {s["seed"]: 100 * f[key] for s, f in some if key in f}
        first = Numbers(tuple(value for seed, value in by.items() if seed < ALSO_SEEDS))
        more = f" ({sum(by.values()) / len(by):.2f} over {len(by)})" if len(by) > len(first.values) else ""
        found.append(f"{first.show(usual=ALSO_SEEDS)}{more}" if first else "")
    return found


def _in_order(cells: Sequence[Kept], dataset: str) -> list[Kept]:
    """The cells that the study asks for, by the shots of training, the most first, and then in its order."""
    order = [_key(settings) for settings in study_choices(dataset)]
    listed = [pair for pair in cells if _key(pair[0]) in order]
    return sorted(listed, key=lambda pair: (-int(pair[0]["shots"]), order.index(_key(pair[0]))))


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)


def _with_interval(found: Found) -> str:
    return f"{100 * found['accuracy']:.2f} ± {100 * found['interval']:.2f}"


def _tried(cells: Sequence[Kept]) -> str:
    rows = []
    for varied, shots, method in dict.fromkeys((s["varied"], s["shots"], s["method"]) for s, _ in cells):
        some = chosen(cells, varied=varied, shots=shots, method=method)
        by = {n: chosen(apart(some), shots=n) for n in (5, 1)}
        both = [numbers for n in by if (numbers := percent(by[n]))]
        mean = f"{sum(numbers.mean for numbers in both) / len(both):.2f}" if len(both) == len(by) else ""
        shown = [percent(by[n]).show(usual=CHOICE_SEEDS) if by[n] else "" for n in by]
        rows.append([varied, str(shots), METHODS[method], *shown, mean])
    return table(["", "shots in training", "method", "5 shots", "1 shot", "mean"], rows)


def _taken(backbone: str) -> str:
    """What was the best of each method."""
    said = [f"{METHODS[m]}: {varied}" for (network, m), varied in CHOSEN.items() if network == backbone]
    said += [
        f"{METHODS[m]}, with 1 shot in training for tests with 1, for it was better there: {varied}"
        for (network, m), varied in APART.items()
        if network == backbone
    ]
    said += [
        f"{varied} were better than that by a later comparison, after which no table was run"
        for (network, _), varied in BETTER_APART.items()
        if network == backbone
    ]
    after = " (by runs of the table's length, below, where there are any)"
    return f"Taken{after * any(network == backbone for network, _ in ALSO_RUN)}: {'; '.join(said)}."


def _missing(names: Iterable[str], some: Sequence[Kept]) -> list[str]:
    left = [name for name in names if name not in values(some, "varied")]
    return [f"Not run: {'; '.join(left)}."] if left else []
