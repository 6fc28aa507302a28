"""The tables of the denoising studies, made from results."""

import json
from pathlib import Path

import numpy as np
import pytest
from bilevel_studies.denoising import speed, tables
from bilevel_studies.denoising import study as denoising
from bilevel_studies.denoising import wide as denoising_wide
from bilevel_studies.denoising.speed import METHODS
from bilevel_studies.statistics import Numbers
from denoised import curve, table_row

ROOT = Path(__file__).parents[2]


def test_numbers_show_mean_deviation_and_an_unusual_count():
    assert Numbers(()).show() == "not run"
    assert Numbers((1.0,)).show() == "1.00 (1 seed)"
    assert Numbers((1.0, 3.0)).show(1, 2) == "2.0 ± 1.4"


def mnist(column, accuracy, seed=0, noise=0.25, kind="symmetric"):
    settings = denoising.cells(["mnist"], [(noise, kind)], [column], 1)[0].settings | {"seed": seed}
    found = {"accuracy": accuracy, "auc": 0.9, "f1": 0.8, "noise_rate": 0.3, "seconds": 3.0, "device": "CPU"}
    return settings, found


def test_the_table_has_ours_the_papers_and_what_was_not_run(tmp_path):
    kept = [mnist("ours", 0.991, seed) for seed in range(5)] + [mnist("oracle", 0.995), mnist("plain", 0.9)]
    report = tables.report(kept, tmp_path)
    text = report.tables["Table 2: accuracy, percent"]
    assert table_row(text).endswith("| not run | 99.10 ± 0.00 |")
    assert "| the paper | 99.3 | 94.6 | 83.9 |  | 98.11 | 98.89 |  |" in text
    assert {"dataset": "mnist", "noise": 0.5, "kind": "symmetric", "columns": list(denoising.SHOWN)} in (
        report.summary["not_run"]
    )
    assert report.summary["aims_reached"] == {"MNIST, 25% symmetric": True}, "99.05"
    gaps = table_row(report.tables["Ours minus the other columns, on common seeds"])
    assert gaps == "| MNIST, 25% symmetric | -0.40 (below, 1) |  | +9.10 (above, 1) |  |  |  |"


def compared(ours, others, column="plain"):
    """Return whether our method is better, and by how much, from accuracies by seed."""
    cells = [
        [mnist(name, value, seed) for seed, value in some.items()] for name, some in (("ours", ours), (column, others))
    ]
    found = tables.compared(*cells, tests=10_000)
    return None if found is None else (found[0], round(found[1].mean, 2), len(found[1].values))


def test_ours_is_compared_on_the_seeds_that_both_columns_have():
    ours = {0: 0.90, 1: 0.99, 2: 0.99, 3: 0.99, 4: 0.99}
    assert compared(ours, {0: 0.94}) == ("below", -4.0, 1)
    assert compared(ours, {1: 0.98, 2: 0.97}) == ("above", 1.5, 2)
    assert compared(ours, {7: 0.5}) is None


@pytest.mark.parametrize(
    ("gaps", "where"),
    [
        ((0.03, 0.01, 0.02), "above"),  # mean 2, deviation 1
        ((-0.03, -0.01, -0.02), "below"),
        ((0.02, -0.01, 0.01), "level"),  # mean 0.67, deviation 1.5
        ((0.0, 0.0, 0.0), "level"),
    ],
)
def test_a_gap_over_several_seeds_counts_if_it_exceeds_the_deviation_of_the_differences(gaps, where):
    ours = {0: 0.90, 1: 0.95, 2: 0.85}  # of a larger deviation than the differences have
    others = {seed: ours[seed] - gap for seed, gap in enumerate(gaps)}
    assert compared(ours, others) == (where, round(100 * sum(gaps) / 3, 2), 3)


@pytest.mark.parametrize(("gap", "where"), [(0.012, "above"), (-0.012, "below"), (0.010, "level")])
def test_a_gap_of_one_seed_counts_if_it_exceeds_its_binomial_error(gap, where):
    # 1.96 sqrt(2 * 0.8 * 0.2 / 10,000) = 0.0111
    assert compared({0: 0.8 + gap}, {0: 0.8}) == (where, 100 * gap, 1)


def former(accuracy, **found):
    """A cell of ApproxGrad before its linear solver was among the settings."""
    settings, usual = mnist("approx-grad", accuracy)
    return {key: value for key, value in settings.items() if key != "solver"}, usual | found


def test_runs_of_the_former_solver_that_diverged_are_marked_and_gone_if_there_are_new_ones():
    old, new = former(0.5, status="diverged", steps=75), mnist("approx-grad", 0.6)
    kept = [mnist("ours", 0.99), mnist("plain", 0.9), old]
    assert "| 50.00 (1 seed) (diverged) |" in table_row(tables.accuracy_table(kept))
    assert table_row(tables.gap_table(kept)) == "| MNIST, 25% symmetric |  |  | +9.00 (above, 1) |  |  |  |"
    assert "| +39.00 (above, 1) |" in table_row(tables.gap_table([*kept, new]))
    text = tables.accuracy_table([*kept, new])
    assert "| 60.00 (1 seed) |" in table_row(text)
    assert "50.00" not in text
    begun = (new[0], {"partial": True, "steps": 3, "of": 9})
    assert "50.00 (1 seed) (diverged)" in table_row(tables.accuracy_table([*kept, begun]))


def test_a_former_run_is_replaced_by_one_with_other_passes():
    settings, found = mnist("approx-grad", 0.6)
    new = (settings | {"passes": [9, settings["passes"][1]]}, found)
    text = tables.accuracy_table([former(0.5, status="diverged", steps=75), new])
    assert "| 60.00 (1 seed) |" in table_row(text)
    assert "50.00" not in text


def test_some_of_several_runs_that_diverged_are_counted():
    kept = [mnist("approx-grad", 0.5, seed) for seed in range(3)]
    kept[1][1].update(status="diverged", steps=75)
    assert "| 50.00 ± 0.00 (3 seeds) (1 of 3 diverged) |" in table_row(tables.accuracy_table(kept))


def test_noises_that_are_not_of_the_study_have_rows_of_their_own():
    kept = [mnist("ours", 0.98, noise=0.3), mnist("ours", 0.97, kind="asymmetric"), mnist("clean", 0.99)]
    text = tables.accuracy_table(kept)
    assert table_row(text, "MNIST, 30% symmetric").endswith("| 98.00 (1 seed) |")
    assert table_row(text, "MNIST, 25% asymmetric").endswith("| 97.00 (1 seed) |")
    assert [line for line in text.splitlines() if line.startswith("| MNIST, 0%")] == []
    assert "| MNIST | 99.00 (1 seed) | 99.5 |" in tables.clean_table(kept)


def test_what_is_the_papers_alone_has_no_cell_of_ours():
    rows = tables.rule_table([]).splitlines()
    assert [row.split("|")[4].strip() for row in rows] == ["RMD", "---", "", "90.09"]


def test_without_cells_every_place_is_not_run(tmp_path):
    report = tables.report([], tmp_path)
    assert len(report.summary["not_run"]) == len(denoising.STUDIES) * len(denoising.NOISES)
    assert not list(tmp_path.iterdir())


def test_cells_that_are_not_finished_are_begun_and_in_no_other_table(tmp_path):
    settings, found = mnist("algorithm-2", 0.95)
    _, whole = mnist("ours", 0.99)
    ours = [(mnist("ours", 0.99, seed)[0], whole | {"seconds": 30.0 + seed}) for seed in range(4)]
    cut = (mnist("ours", 0.99, 4)[0], {"partial": True, "steps": 40, "of": 100, "seconds": 1.0, "device": "other"})
    kept = [(settings, found | {"partial": True, "steps": 1200, "of": 29_500}), *ours, cut]
    report = tables.report(kept, tmp_path)
    text = report.text()
    assert table_row(text).endswith("| not run | not run | 99.00 ± 0.00 (4 seeds) |")
    assert text.count("95.00") == 1
    assert "| MNIST | 32 | 33 |" in report.tables["Seconds of a run of ours"]
    begun = report.tables["Begun"]
    assert "| MNIST, 25% symmetric | Penalty, the paper's | 0 | 1,200 of 29,500 | 95.00 |" in begun
    assert "| MNIST, 25% symmetric | Penalty, ours | 4 | 40 of 100 |  |" in begun


def few(trusted, accuracy, alone):
    settings = {
        "part": "how-few",
        "dataset": "mnist",
        "network": "mlp",
        "rows": 5000,
        "trusted": trusted,
        "noise": 0.4,
        "seed": 0,
    }
    return settings, {"accuracy": accuracy, "trusted": alone, "plain": 0.8, "auc": 0.9, "auc_quality": 0.95}


def test_how_few_trusted_examples_are_shown(tmp_path):
    report = tables.report([few(50, 0.85, 0.6), few(5000, 0.94, 0.94)], tmp_path)
    text = report.tables["How few trusted examples"]
    assert "| 50 | 85.00 (1 seed) | 60.00 (1 seed) | 80.00 (1 seed) | 0.900 (1 seed) | 0.950 (1 seed) |" in text
    assert "| 5,000 | 94.00 (1 seed) | 94.00 (1 seed) |" in text
    assert (tmp_path / "denoising-how-few.png").stat().st_size > 1000


def test_the_wide_networks_part_is_shown_as_far_as_it_got():
    settings = denoising_wide.cells(("ours",), 1)[0].settings
    found = {
        "accuracy": 0.7,
        "auc": 0.8,
        "steps": 1200,
        "of": 1760,
        "partial": True,
        "ms_per_step": 250.0,
        "memory": 2**33,
        "device": "GPU",
    }
    text = tables.wide_table([(settings, found)])
    assert "| Penalty, ours | 0 | 3 | 1,200 of 1,760 | 70.00 | 0.800 | 250 | 8.0 | GPU |" in text


def test_the_table_of_speed_has_the_seconds_until_each_accuracy(tmp_path):
    kept = [
        curve("speed", "Penalty, ours", 0, [0.0, 1.0, 2.0], [0.1, 0.93, 0.95], 1.0),
        curve("speed", "Penalty, the paper's", 20, [0.0, 3.0], [0.9, 0.91], 5.0),
        curve("speed", "ApproxGrad", 20, [0.0, 7.0], [0.85, 0.92], 9.0),
    ]
    report = speed.report("speed", kept, tmp_path)
    text = report.tables["mlp: seconds until a test accuracy"]
    assert "| method | 90% | 92% | 94% | 96% | 98% |" in text
    assert "| Penalty, ours | 1.0 | 1.0 | 2.0 |  |  |" in text
    assert "| Penalty, the paper's | 0.0 |  |  |  |  |" in text
    assert "| ApproxGrad | 7.0 | 7.0 |  |  |  |" in text
    assert "| ApproxGrad | 0 | 9 | 9.0 | 7.0 | 92.00 | 92.00 | 92.00 |" in report.tables["mlp: at the end"]
    assert report.summary["most_load"] == 0.5
    assert (tmp_path / "denoising-speed-mlp.png").stat().st_size > 1000


def test_the_tables_show_no_runs_of_the_former_solver_next_to_new_ones(tmp_path):
    new = curve("steps", "ApproxGrad", 1, [0.0, 1.0], [0.5, 0.81], 3.0)
    old = [curve("steps", "ApproxGrad", T, [0.0, 1.0], [0.5, 0.72], 3.0) for T in (1, 10)]
    old = [({key: value for key, value in settings.items() if key != "solver"}, found) for settings, found in old]
    old[1][1]["status"] = "diverged"
    text = speed.report("steps", old, tmp_path).text()
    assert "| ApproxGrad | 10 | 72.00 (diverged) |" in text
    text = speed.report("steps", [*old, new], tmp_path).text()
    assert "| ApproxGrad | 1 | 81.00 |" in text
    assert "72.00" not in text


def test_the_table_of_steps_has_accuracy_and_time_for_each_t(tmp_path):
    kept = [
        curve("steps", name, T, [0.0, 1.0], [0.5, 0.8 + T / 200], base * T)
        for name, base in zip(METHODS, (1.0, 1.0, 2.0), strict=True)
        for T in (1, 20)
    ]
    text = speed.report("steps", kept, tmp_path).text()
    assert "| Penalty, ours | 1 | 80.50 | 1.0 |" in text
    assert "| ApproxGrad | 20 | 90.00 | 40.0 |" in text
    assert (tmp_path / "denoising-steps-mlp.png").stat().st_size > 1000


def test_what_the_page_beside_cleanlab_says_by_hand_is_in_its_numbers():
    page = ROOT / "docs" / "results" / "denoising-vs-cleanlab.md"
    runs = json.loads((ROOT / "studies" / "results" / "denoising-vs-cleanlab.json").read_text(encoding="utf-8"))
    text = " ".join(page.read_text(encoding="utf-8").split())

    def fewer(data):
        found = [run for name, run in runs.items() if name.startswith(f"{data}/symmetric")]
        less = sum(0 < run["cleanlab, chosen"]["source"] < run["bilevel"]["settings"]["final_steps"] for run in found)
        return f"{less} of {len(found)}"

    def mean(column):
        return np.mean([run[column]["accuracy"] for name, run in runs.items() if name.startswith("cifar10/symmetric")])

    assert (
        "the folds of *cleanlab, chosen* have fewer steps than a round of ours in "
        f"{fewer('digits')} runs on digits, {fewer('mnist')} on MNIST and {fewer('cifar10')} on CIFAR-10."
    ) in text
    assert mean("cleanlab") < mean("bilevel") < mean("cleanlab, chosen")
    assert "the means of ours are behind *cleanlab, chosen* in AUC and accuracy, and ahead of *cleanlab*." in text
