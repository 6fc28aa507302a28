"""The pages of the denoising studies, written from results."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bilevel_studies.denoising import page as denoising_page
from bilevel_studies.denoising import small_page as denoising_small_page
from bilevel_studies.denoising import speed_page as denoising_speed_page
from bilevel_studies.denoising import study as denoising
from bilevel_studies.denoising import wide as denoising_wide
from bilevel_studies.denoising.numbers import Numbers
from bilevel_studies.denoising.speed import METHODS
from denoised import curve, table_row

CPU = torch.device("cpu")


def test_numbers_show_mean_deviation_and_an_unusual_count():
    assert Numbers(()).show() == "not run"
    assert Numbers((1.0,)).show() == "1.00 (1 seed)"
    assert Numbers((1.0, 3.0)).show(1, 2) == "2.0 ± 1.4"


def mnist(column, accuracy, seed=0, noise=0.25, kind="symmetric"):
    settings = denoising.cells(["mnist"], [(noise, kind)], [column], 1)[0].settings | {"seed": seed}
    found = {"accuracy": accuracy, "auc": 0.9, "f1": 0.8, "noise_rate": 0.3, "seconds": 3.0, "device": "CPU"}
    return settings, found


@pytest.mark.parametrize(("accuracy", "word"), [(0.991, "met"), (0.99, "missed")])
def test_findings_follow_the_numbers(accuracy, word, tmp_path):
    kept = [mnist("ours", accuracy, seed) for seed in range(5)] + [mnist("oracle", 0.995), mnist("plain", 0.9)]
    summary = denoising_page.write(kept, tmp_path)
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    sentence = summary["findings"][0]
    assert f"the target of 99.05 is {word}" in sentence
    assert f"It is above Train+Val (+{100 * accuracy - 90:.2f}, 1 seed)." in sentence
    assert f"It is below Oracle ({100 * accuracy - 99.5:.2f}, 1 seed)." in sentence
    assert f"- {sentence}\n" in text
    line = next(line for line in text.splitlines() if line.startswith("| MNIST, 25% symmetric |"))
    assert line.endswith(f"| not run | {100 * accuracy:.2f} ± 0.00 |")
    assert "102 of 105 places of the table are not filled" in text
    assert "| the paper | 99.3 | 94.6 | 83.9 |  | 98.11 | 98.89 |  |" in text


def compared(ours, others, column="plain"):
    """The sentence on ours beside another column; accuracies by seed."""
    kept = [mnist("ours", value, seed) for seed, value in ours.items()]
    return denoising_page.findings([*kept, *(mnist(column, value, seed) for seed, value in others.items())])[0]


def test_ours_is_compared_on_the_seeds_that_both_columns_have():
    ours = {0: 0.90, 1: 0.99, 2: 0.99, 3: 0.99, 4: 0.99}
    assert "It is below Train+Val (-4.00, 1 seed)." in compared(ours, {0: 0.94})
    assert "It is above Train+Val (+1.50, 2 seeds)." in compared(ours, {1: 0.98, 2: 0.97})
    assert "Train+Val" not in compared(ours, {7: 0.5})


@pytest.mark.parametrize(
    ("gaps", "where"),
    [
        ((0.03, 0.01, 0.02), "above"),  # mean 2, deviation 1
        ((-0.03, -0.01, -0.02), "below"),
        ((0.02, -0.01, 0.01), "level with"),  # mean 0.67, deviation 1.5
        ((0.0, 0.0, 0.0), "level with"),
    ],
)
def test_a_gap_over_several_seeds_is_claimed_where_it_exceeds_the_deviation_of_the_differences(gaps, where):
    ours = {0: 0.90, 1: 0.95, 2: 0.85}  # of a larger deviation than the differences have
    others = {seed: ours[seed] - gap for seed, gap in enumerate(gaps)}
    assert f"It is {where} Train+Val ({100 * sum(gaps) / 3:+.2f}, 3 seeds)." in compared(ours, others)


@pytest.mark.parametrize(("gap", "where"), [(0.012, "above"), (-0.012, "below"), (0.010, "level with")])
def test_a_gap_of_one_seed_is_claimed_where_it_exceeds_its_binomial_error(gap, where):
    # 1.96 sqrt(2 * 0.8 * 0.2 / 10,000) = 0.0111
    assert f"It is {where} Train+Val ({100 * gap:+.2f}, 1 seed)." in compared({0: 0.8 + gap}, {0: 0.8})


def former(accuracy, **found):
    """A cell of ApproxGrad before its linear solver was among the settings."""
    settings, usual = mnist("approx-grad", accuracy)
    return {key: value for key, value in settings.items() if key != "solver"}, usual | found


def test_runs_of_the_former_solver_are_marked_compared_with_nothing_and_gone_where_there_are_new_ones(tmp_path):
    old, new = former(0.5, status="diverged", steps=75), mnist("approx-grad", 0.6)
    kept = [mnist("ours", 0.99), mnist("plain", 0.9), old]
    sentence = denoising_page.write(kept, tmp_path)["findings"][0]
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    assert "| 50.00 (1 seed) (diverged) |" in table_row(text)
    assert "ApproxGrad" not in sentence
    assert "Train+Val" in sentence
    assert "ApproxGrad with conjugate gradients in place of Adam: MNIST, 25% symmetric." in text
    summary = denoising_page.write([*kept, new], tmp_path)
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    assert "It is above Train+Val (+9.00, 1 seed); ApproxGrad (+39.00, 1 seed)." in summary["findings"][0]
    assert "| 60.00 (1 seed) |" in table_row(text)
    assert "50.00" not in text
    assert "iverged, and" not in text
    assert "conjugate" not in text
    begun = (new[0], {"partial": True, "steps": 3, "of": 9})
    assert "50.00 (1 seed) (diverged)" in table_row(denoising_page.page([*kept, begun], []))


def test_some_of_several_runs_that_diverged_are_counted():
    kept = [mnist("approx-grad", 0.5, seed) for seed in range(3)]
    kept[1][1].update(status="diverged", steps=75)
    assert "| 50.00 ± 0.00 (3 seeds) (1 of 3 diverged) |" in table_row(denoising_page.page(kept, []))


def test_noises_that_are_not_of_the_study_have_rows_of_their_own(tmp_path):
    kept = [mnist("ours", 0.98, noise=0.3), mnist("ours", 0.97, kind="asymmetric"), mnist("clean", 0.99)]
    summary = denoising_page.write(kept, tmp_path)
    text = (tmp_path / "denoising.md").read_text(encoding="utf-8")
    assert table_row(text, "MNIST, 30% symmetric").endswith("| 98.00 (1 seed) |")
    assert table_row(text, "MNIST, 25% asymmetric").endswith("| 97.00 (1 seed) |")
    assert [line for line in text.splitlines() if line.startswith("| MNIST, 0%")] == []
    assert "117 of 119 places of the table are not filled" in text
    assert [sentence for sentence in summary["findings"] if "the paper's" in sentence] == []  # its noise is symmetric


def test_the_page_says_how_columns_are_trained_beside_the_papers_settings():
    text = denoising_page.page([], [])
    assert (
        "| MNIST | 0.001, falling to 0 | 20 | 200 | 12 | 1 | 100 |\n| the paper | 1e-05 | 100 | 200 |  | 100 | 100 |"
        in text
    )
    assert "| CIFAR-10 | 0.001, falling to 0 | 100 | 200 | 12 | 1 | 200 |\n| the paper | 0.001 | 200 |" in text
    assert "| digits (MLP) | 0.003, falling to 0 | 92 | 100 | 92 | 10 | 100 |" in text
    assert "Only the early-stopped column has fewer steps: one in 5 trusted examples is held out" in text


def test_what_is_the_papers_alone_has_no_cell_of_ours():
    rows = denoising_small_page.rule_table([]).splitlines()
    assert [row.split("|")[4].strip() for row in rows] == ["RMD", "---", "", "90.09"]


def test_a_page_without_cells_says_so(tmp_path):
    assert denoising_page.write([], tmp_path)["findings"] == []
    assert "Nothing was run." in (tmp_path / "denoising.md").read_text(encoding="utf-8")


def test_cells_that_are_not_finished_are_named_and_in_no_table(tmp_path):
    settings, found = mnist("algorithm-2", 0.95)
    _, whole = mnist("ours", 0.99)
    ours = [(mnist("ours", 0.99, seed)[0], whole | {"seconds": 30.0 + seed}) for seed in range(4)]
    cut = (mnist("ours", 0.99, 4)[0], {"partial": True, "steps": 40, "of": 100, "seconds": 1.0, "device": "other"})
    kept = [(settings, found | {"partial": True, "steps": 1200, "of": 29_500}), *ours, cut]
    text = denoising_page.page(kept, [])
    line = next(line for line in text.splitlines() if line.startswith("| MNIST, 25% symmetric |"))
    assert line.endswith("| not run | not run | 99.00 ± 0.00 (4 seeds) |")
    assert text.count("95.00") == 1
    assert "MNIST was run on CPU (ours 32 s a run, 33 at most)." in text
    assert (
        "Begun, and in no table: MNIST, 25% symmetric, Penalty, the paper's, seed 0 (1,200 of 29,500 steps, 95.00 so "
        "far); MNIST, 25% symmetric, Penalty, ours, seed 4 (40 of 100 steps).\n"
    ) in text


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


def test_how_few_says_where_denoising_is_worth_it(tmp_path):
    kept = [few(50, 0.85, 0.6), few(500, 0.9, 0.88), few(5000, 0.94, 0.94)]
    alone, labels = denoising_small_page.few_sentences(kept)
    assert "with 50, 500 trusted (most with 50: 25.0 points), and not with 5,000." in alone
    assert labels.endswith("with 50, 500, 5,000 trusted (most with 5,000: 14.0 points).")
    denoising_page.write(kept, tmp_path)
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
    text = denoising_page.page([(settings, found)], [])
    assert "| Penalty, ours | 0 | 3 | 1,200 of 1,760 | 70.00 | 0.800 | 250 | 8.0 | GPU |" in text


def test_the_page_of_speed_says_when_each_method_got_how_far(tmp_path):
    kept = [
        curve("speed", "Penalty, ours", 0, [0.0, 1.0, 2.0], [0.1, 0.93, 0.95], 1.0),
        curve("speed", "Penalty, the paper's", 20, [0.0, 3.0], [0.9, 0.91], 5.0),
        curve("speed", "ApproxGrad", 20, [0.0, 7.0], [0.85, 0.92], 9.0),
    ]
    found = denoising_speed_page.write("speed", kept, tmp_path)["findings"]
    assert found[0] == (
        "94% on the test set: Penalty, ours after 2.0 s; not reached by Penalty, the paper's and ApproxGrad."
    )
    assert found[2] == (
        "90% on the test set: Penalty, ours after 1.0 s, Penalty, the paper's after 0.0 s, ApproxGrad after 7.0 s."
    )
    text = (tmp_path / "denoising-speed.md").read_text(encoding="utf-8")
    assert "| ApproxGrad | 0 | 9 | 9.0 | 7.0 | 92.00 | 92.00 | 92.00 |" in text
    assert (tmp_path / "denoising-speed-mlp.png").stat().st_size > 1000


def test_pages_name_the_runs_that_diverged(tmp_path):
    settings, found = curve("steps", "ApproxGrad", 10, [0.0, 7.0], [0.85, 0.92], 9.0)
    denoising_speed_page.write("steps", [(settings, found | {"status": "diverged"})], tmp_path)
    said = "iverged, and shown as they last were finite:"
    assert f"D{said} ApproxGrad, T = 10, seed 0 (at step 9)." in (tmp_path / "denoising-steps.md").read_text()
    settings, found = mnist("approx-grad", 0.5)
    found |= {"status": "diverged", "steps": 75}
    assert f"MNIST: d{said} approx-grad, seed 0 (at step 75)." in denoising_page.page([(settings, found)], [])
    assert said not in denoising_page.page([(settings, found | {"status": "max_steps"})], [])


def test_a_page_says_that_times_were_taken_on_a_busy_machine(tmp_path):
    settings, found = curve("speed", "ApproxGrad", 20, [0.0, 7.0], [0.85, 0.92], 9.0)
    for share, busy in ((2.0, True), (0.5, False)):
        denoising_speed_page.write("speed", [(settings, found | {"load": share})], tmp_path)
        text = (tmp_path / "denoising-speed.md").read_text()
        assert ("busy with other work: 2.0 to 2.0" in text) == busy
        assert "is not known" not in text


@pytest.mark.parametrize("load", [{}, {"load": None}, {"load": 1.5}])
def test_ratios_of_times_are_not_told_where_the_machine_was_busy_or_nobody_knows(load, tmp_path):
    kept = [curve("steps", name, T, [0.0, 1.0], [0.5, 0.8], float(T)) for name in METHODS for T in (1, 20)]
    kept = [(settings, found | {"load": 0.5}) for settings, found in kept]
    assert "takes" in " ".join(denoising_speed_page.write("steps", kept, tmp_path)["findings"])
    settings, found = kept[0]
    kept[0] = (settings, {key: value for key, value in found.items() if key != "load"} | load)
    said = denoising_speed_page.write("steps", kept, tmp_path)["findings"]
    assert [sentence for sentence in said if "takes" in sentence] == []
    assert said[0] == "Penalty, ours: from T = 1 to 20 the accuracy goes from 80.00 to 80.00 (+0.00)."
    text = (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")
    assert ("How busy the machine was is not known of 1 of 6 runs" in text) == (load.get("load") is None)


def test_the_figures_show_no_runs_of_the_former_solver_beside_new_ones(tmp_path):
    new = curve("steps", "ApproxGrad", 1, [0.0, 1.0], [0.5, 0.81], 3.0)
    old = [curve("steps", "ApproxGrad", T, [0.0, 1.0], [0.5, 0.72], 3.0) for T in (1, 10)]
    old = [({key: value for key, value in settings.items() if key != "solver"}, found) for settings, found in old]
    old[1][1]["status"] = "diverged"
    denoising_speed_page.write("steps", old, tmp_path)
    text = (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")
    assert "| ApproxGrad | 10 | 72.00 (diverged) |" in text
    assert "ApproxGrad was run with conjugate gradients in place of Adam." in text
    denoising_speed_page.write("steps", [*old, new], tmp_path)
    text = (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")
    assert "| ApproxGrad | 1 | 81.00 |" in text
    assert "72.00" not in text
    assert "conjugate" not in text


def test_the_page_of_steps_says_what_a_larger_t_gains_and_costs(tmp_path):
    kept = [
        curve("steps", name, T, [0.0, 1.0], [0.5, 0.8 + T / 200], base * T)
        for name, base in zip(METHODS, (1.0, 1.0, 2.0), strict=True)
        for T in (1, 20)
    ]
    found = denoising_speed_page.write("steps", kept, tmp_path)["findings"]
    assert "from T = 1 to 20 the accuracy goes from 80.50 to 90.00 (+9.50)" in found[0]
    assert found[0].endswith("takes 20.0 times as long.")
    assert found[-1].startswith("At T = 20, an upper iteration of ApproxGrad takes 2.0 times")
    assert "| ApproxGrad | 20 | 90.00 | 40.0 |" in (tmp_path / "denoising-steps.md").read_text(encoding="utf-8")


def test_what_the_page_beside_cleanlab_says_by_hand_is_in_its_numbers():
    page = Path(__file__).parents[2] / "docs" / "results" / "denoising-vs-cleanlab.md"
    runs = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
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
