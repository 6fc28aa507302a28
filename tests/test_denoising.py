"""Denoising: wrong labels are found on real data; bad input is refused with a sentence; a stopped run goes on."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from bilevel import Callback, CheckpointError, DataError, Penalty, ProblemError
from bilevel.applications import networks as models
from bilevel.applications.augmentation import crop, crop_and_flip
from bilevel.applications.default_classifier import classifier
from bilevel.applications.denoising.clean_dataset import Prepared, _advice, as_bytes, clean, prepare, thumbnails
from bilevel.applications.denoising.denoise import denoise, importance_problem
from bilevel.applications.training import probabilities
from bilevel.cli.denoise_run import FIT
from bilevel.data import Labelled, load
from bilevel.errors import OptionError


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return models.mlp(64, (64,), 10)


def digits(noise: float = 0.4, kind: str = "symmetric", trusted: int = 100):
    return prepare(load("digits"), trusted=trusted, noise=noise, kind=kind, seed=0)


class BegunError(Exception):
    """The bilevel run begins."""


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_wrong_labels_of_digits_are_found_and_the_classifier_is_better_for_it(kind):
    prepared = digits(kind=kind)
    data, model = prepared.data, network()
    found = denoise((data.x, data.y), prepared.trusted, model, seed=0)
    wrong = (data.y != prepared.truth).numpy()
    assert roc_auc_score(~wrong, found.quality) > 0.97
    assert roc_auc_score(~wrong, found.importance) > 0.95
    assert f1_score(wrong, found.suspect) > 0.9
    assert abs(found.noise_rate - 0.4) < 0.05
    assert float((found.suggested == prepared.truth)[found.suspect].double().mean()) > 0.85
    right = (probabilities(model, data.test[0]).argmax(1) == data.test[1]).double().mean()
    assert right > 0.91  # 0.89 with the trusted set only, 0.84 (0.75 asymmetric) with the labels as they are
    assert found.model is model


def test_suspects_are_of_low_importance_and_another_class_is_suggested():
    prepared = digits()
    data = prepared.data
    found = denoise((data.x, data.y), prepared.trusted, network(), steps=60, seed=0)
    assert torch.equal(found.suspect, (found.importance < 0.5) & (found.suggested != data.y))
    assert bool(((found.importance >= 0) & (found.importance <= 1)).all())
    assert bool((found.quality <= found.importance).all())


def test_arrays_tensors_and_datasets_give_the_same():
    prepared = digits()
    x, y = prepared.data.x, prepared.data.y
    forms = [
        ((x, y), prepared.trusted),
        ((x.numpy(), y.numpy().astype("int32")), tuple(t.numpy() for t in prepared.trusted)),
        (TensorDataset(x, y), TensorDataset(*prepared.trusted)),
        ((x.double().numpy(), y.double()), tuple(t.double() for t in prepared.trusted)),
    ]
    found = [denoise(train, trusted, network(), steps=20, seed=1).importance for train, trusted in forms]
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_same_seed_same_bits_and_another_seed_others():
    prepared = digits()
    runs = [
        denoise((prepared.data.x, prepared.data.y), prepared.trusted, network(), steps=30, seed=seed)
        for seed in (3, 3, 4)
    ]
    assert torch.equal(runs[0].importance, runs[1].importance)
    assert torch.equal(runs[0].confidence, runs[1].confidence)
    assert not torch.equal(runs[0].importance, runs[2].importance)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def log(self, run) -> bool:
        if run.step >= self.step:
            raise KeyboardInterrupt
        return False


def test_where_examples_are_seen_seldom_importances_start_where_they_do_else_and_move_less(monkeypatch):
    prepared, starts = digits(), {}
    x, y = prepared.data.x, prepared.data.y

    def begun(problem, method, u, v, data, *, max_steps, **options):
        every = torch.arange(len(y))
        slope = torch.autograd.functional.jacobian(lambda u: problem.lower(u, v, (x, y, every)), u.values)
        starts[max_steps] = u.values, problem.lower(u, v, (x, y, every)), slope
        raise BegunError

    monkeypatch.setattr(importlib.import_module("bilevel.applications.denoising.denoise"), "solve", begun)
    often, seldom = (round(visits * len(y) / 100) for visits in (24, 6))
    for steps in (often, seldom):
        with pytest.raises(BegunError):
            denoise((x, y), prepared.trusted, network(), steps=steps, final_steps=50, batch=100)
    (u, loss, slope), (u_seldom, loss_seldom, slope_seldom) = starts[often], starts[seldom]
    assert u.abs().max() <= 2.51
    torch.testing.assert_close(u_seldom, 4 * u, rtol=1e-2, atol=0)  # steps are whole numbers
    torch.testing.assert_close(loss_seldom, loss)
    torch.testing.assert_close(slope_seldom, slope / 4, rtol=1e-2, atol=0)


@pytest.mark.parametrize("stage", ["trusted set", "importance", "round 1", "round 2"])
def test_run_stopped_at_any_stage_goes_on_with_the_same_bits(stage, tmp_path):
    prepared = digits()
    train = prepared.data.x, prepared.data.y
    options = {"steps": 40, "seed": 0}
    straight = denoise(train, prepared.trusted, network(), **options)

    def on_progress(name: str, done: int, total: int) -> None:
        assert total == 40
        if name == stage and done == 17:
            raise KeyboardInterrupt

    callbacks = [StopAt(20)] if stage == "importance" else []
    with pytest.raises(KeyboardInterrupt):
        denoise(
            train,
            prepared.trusted,
            network(),
            checkpoint=tmp_path,
            callbacks=callbacks,
            on_progress=on_progress,
            **options,
        )
    again = denoise(train, prepared.trusted, network(), checkpoint=tmp_path, resume=True, **options)
    assert torch.equal(straight.importance, again.importance)
    assert torch.equal(straight.confidence, again.confidence)


def test_folder_of_a_run_that_was_stopped_in_its_first_training_is_not_taken_for_another_run(tmp_path):
    prepared = digits()
    x, y = prepared.data.x, prepared.data.y

    def stop(name: str, done: int, total: int) -> None:
        if done == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        denoise((x, y), prepared.trusted, network(), checkpoint=tmp_path, on_progress=stop, steps=40)
    with pytest.raises(CheckpointError, match="already holds a run, and nothing is overwritten"):
        denoise((x[:100], y[:100]), prepared.trusted, network(), checkpoint=tmp_path, steps=40)
    denoise((x, y), prepared.trusted, network(), checkpoint=tmp_path, resume=True, steps=40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_model_of_any_type_of_numbers_has_checkpoints_to_go_on_from(dtype, tmp_path):
    prepared = digits()
    x, y = prepared.data.x, prepared.data.y
    made = partial(denoise, trusted=prepared.trusted, steps=8, checkpoint=tmp_path)

    def stop(name: str, done: int, total: int) -> None:
        if name == "round 1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made((x, y), model=network().to(dtype), on_progress=stop)
    with pytest.raises(CheckpointError, match="its train data differ"):
        made((x + 1, y), model=network().to(dtype), resume=True)
    straight = denoise((x, y), prepared.trusted, network().to(dtype), steps=8)
    assert torch.equal(made((x, y), model=network().to(dtype), resume=True).confidence, straight.confidence)


def test_objective_is_that_of_the_paper():
    torch.manual_seed(0)
    problem, v = importance_problem(), nn.Linear(3, 2)
    x, y, u = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]), torch.randn(7)
    row = torch.tensor([6, 0, 3, 2, 1])
    losses = torch.nn.functional.cross_entropy(v(x), y, reduction="none")
    w = 1 / (1 + torch.exp(-u[row]))
    torch.testing.assert_close(problem.lower(u, v, (x, y, row)), (w * losses).sum() / w.sum())
    torch.testing.assert_close(problem.upper(u, v, (x, y)), losses.mean())


X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


@pytest.mark.parametrize(
    ("train", "trusted", "words"),
    [
        ((X, Y[:5]), (X, Y), "one label for each input; got 12 inputs and 5 labels"),
        ((X, Y.double() + 0.5), (X, Y), "whole numbers; 12 of 12 are not"),
        ((X, torch.where(Y > 1, torch.nan, Y.double())), (X, Y), "whole numbers; 4 of 12"),
        ((X, Y + 1), (X, Y), "labels of train must be 0 to 2, as the model has 3 scores; got 1 to 3"),
        ((X, Y - 1), (X, Y), "got -1 to 1"),
        ((X, Y), (X, Y.clamp(max=1)), "it has none of [2]"),
        ((X, Y), (X[:, :3], Y), "one shape; got (4,) and (3,)"),
        ((X.clone().fill_(torch.nan), Y), (X, Y), "12 of 12 examples hold NaN"),
        ((X, Y[:, None]), (X, Y), "one index for each input; got shape (12, 1)"),
        (X, (X, Y), "must be a pair"),
        ((X[:, 0], Y), (X, Y), "a row for each example; got shape (12,)"),
        ((X.numpy(), np.array(["a", "b", "c"] * 4)), (X, Y), "the labels as class indices"),
        ((X[:0], Y[:0]), (X, Y), "at least one example"),
    ],
)
def test_bad_examples_are_refused_with_a_sentence(train, trusted, words):
    with pytest.raises(DataError) as error:
        denoise(train, trusted, nn.Linear(4, 3), steps=2)
    assert words in str(error.value)


class Pairs(Dataset):
    """What a user's Dataset may be: `shown` of each input, and the label as a number of Python."""

    def __init__(self, x, y, shown=lambda x, i: x):
        self.x, self.y, self.shown = x, y, shown

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.shown(self.x[i], i), int(self.y[i])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (Pairs(X, Y, lambda x, i: x[: 4 - i % 2]), "inputs are tensors or arrays of one shape"),
        (Pairs(X, Y, lambda x, i: Image.new("L", (2, 2))), "found <class 'PIL.Image.Image'>. Add a transform"),
        (Stream(), "must be a Dataset with a length, as every example has an importance; Stream has none"),
        (Pairs(X[:0], Y[:0]), "at least one example"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "must hold numbers, the labels as class indices; got rows of different"),
        ((X.double() * 1e300, Y), "12 of 12 examples hold NaN or infinity"),  # in the model's float32
    ],
)
def test_datasets_that_are_no_tensors_are_refused_with_a_sentence(train, words):
    with pytest.raises(DataError) as error:
        denoise(train, (X, Y), nn.Linear(4, 3), steps=2)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Flatten(), "model must have parameters"),
        (nn.Linear(5, 3), "model must take inputs of shape (4,) and give one score for each class; it fails: mat1 and"),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), "it fails: Dimension out of range"),
    ],
)
def test_models_that_do_not_take_the_inputs_are_refused_with_a_sentence(model, words):
    with pytest.raises(OptionError) as error:
        denoise((X, Y), (X, Y), model, steps=2)
    assert words in str(error.value)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.scores = nn.Linear(64, 10)

    def forward(self, x):
        return self.scores(self.encoder(x.squeeze(1)).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.scores = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.scores(self.rows(x.squeeze(1))[0][:, -1])


class Frozen(nn.Module):
    """Features that are not trained, and a layer on them that is."""

    def __init__(self):
        super().__init__()
        self.features, self.scores = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 10)

    def forward(self, x):
        return self.scores(self.features(x.flatten(1)).relu())


def normalised():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 10)
    )


def words():
    return nn.Sequential(nn.Flatten(), nn.Embedding(17, 4), nn.Flatten(), nn.Linear(256, 10))


@pytest.mark.parametrize("make", [Attention, Recurrent, Frozen, normalised, words])
def test_any_module_is_taken_and_a_dataset_of_any_pairs(make):
    prepared = digits()
    parts = [(prepared.data.x, prepared.data.y), prepared.trusted]
    if make is words:
        parts = [((x * 16).round().int(), y) for x, y in parts]
    torch.manual_seed(0)
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = denoise(*(Pairs(*pair) for pair in parts), model, steps=60, seed=0)
    wrong = (prepared.data.y != prepared.truth).numpy()
    assert roc_auc_score(~wrong, found.quality) > 0.8
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if not name.startswith("features")}


def test_whole_numbers_that_a_model_does_not_take_become_its_own_type_of_numbers():
    numbers = (10 * X).round().int()
    model = nn.Linear(4, 3)
    found = [denoise((x, Y), (x, Y), copy.deepcopy(model), steps=3) for x in (numbers, numbers.float())]
    assert torch.equal(found[0].importance, found[1].importance)


class Scaled(nn.Sequential):
    """Takes pictures of whole numbers, as many do."""

    def forward(self, x):
        return super().forward(x.float() / 16)


def test_whole_numbers_become_others_where_the_model_takes_those():
    """What shifts or blurs pictures draws numbers like them, which whole ones refuse."""
    x, y = (16 * X).round().to(torch.uint8), Y
    found = denoise((x, y), (x, y), Scaled(nn.Linear(4, 3)), steps=3, augment=lambda x: x + torch.randn_like(x))
    assert len(found.importance) == 12


def test_what_holds_no_examples_or_no_real_numbers_is_refused_in_a_sentence():
    with pytest.raises(DataError, match="train must have at least one example"):
        denoise(TensorDataset(X[:0], Y[:0]), (X, Y), nn.Linear(4, 3))
    with pytest.raises(DataError, match=r"train must hold real numbers; got torch\.complex64"):
        denoise((X.to(torch.complex64), Y), (X, Y), nn.Linear(4, 3))


@pytest.mark.parametrize(("option", "value"), [("steps", 0), ("batch", 0), ("rate", 0.0), ("final_steps", -1)])
def test_bad_options_are_refused_by_name(option, value):
    with pytest.raises(OptionError, match=option):
        denoise((X, Y), (X, Y), nn.Linear(4, 3), **{option: value})


def test_few_rows_and_a_batch_larger_than_they_are():
    found = denoise((X, Y), (X[:3], Y[:3]), nn.Linear(4, 3), steps=3, batch=500, method=Penalty(lower_steps=1))
    assert len(found.importance) == 12
    assert found.settings["batch"] == 12


@pytest.mark.parametrize("name", FIT)
def test_every_method_leaves_a_classifier_that_can_tell_digits(name):
    prepared = digits()
    model = network()
    denoise((prepared.data.x, prepared.data.y), prepared.trusted, model, method=FIT[name](), steps=60, final_steps=300)
    right = (probabilities(model, prepared.data.test[0]).argmax(1) == prepared.data.test[1]).double().mean()
    assert right > 0.6


def test_run_that_diverges_is_an_error_and_no_result():
    wild = Penalty(lower_optimizer=partial(torch.optim.SGD, lr=1e30))
    prepared = digits()
    with pytest.raises(ProblemError, match="diverged"):
        denoise((prepared.data.x, prepared.data.y), prepared.trusted, network(), method=wild, steps=30)
    with pytest.raises(ProblemError, match="training at the rate 1e\\+30 diverged"):
        denoise((prepared.data.x, prepared.data.y), prepared.trusted, network(), steps=5, rate=1e30)


@pytest.mark.parametrize("changed", ["labels", "inputs", "trusted", "final_steps", "rate"])
def test_checkpoint_of_another_run_is_refused(changed, tmp_path):
    prepared = digits()
    x, y = prepared.data.x.clone(), prepared.data.y.clone()
    x_trusted, y_trusted = prepared.trusted
    options = {"steps": 10, "final_steps": 10, "rate": 0.01}
    denoise((x, y), (x_trusted, y_trusted), network(), checkpoint=tmp_path, **options)
    if changed == "labels":
        y[0] = (y[0] + 1) % 10
    elif changed == "inputs":
        x[3, 0, 4, 4] += 0.5
    elif changed == "trusted":
        y_trusted = y_trusted.roll(1)
    else:
        options[changed] /= 2
        options["final_steps"] = int(options["final_steps"])
    with pytest.raises(CheckpointError):
        denoise((x, y), (x_trusted, y_trusted), network(), checkpoint=tmp_path, resume=True, **options)


# -- prepared data -----------------------------------------------------------------------------------------------------


def small(n: int = 60, classes: int = 3, **more) -> Labelled:
    generator = np.random.default_rng(0)
    x, y = torch.from_numpy(generator.normal(size=(n, 5)).astype("float32")), torch.arange(n) % classes
    return Labelled("small", "arrays", x, y, tuple("abcdefgh"[:classes]), [str(i) for i in range(n)], **more)


def test_trusted_rows_are_drawn_before_labels_are_made_wrong():
    prepared = prepare(load("digits"), trusted=100, noise=0.5, seed=1)
    clean_digits = load("digits")
    known = {row.numpy().tobytes(): int(label) for row, label in zip(clean_digits.x, clean_digits.y, strict=True)}
    assert all(known[row.numpy().tobytes()] == int(label) for row, label in zip(*prepared.trusted, strict=True))
    assert float((prepared.data.y != prepared.truth).double().mean()) == pytest.approx(0.5, abs=1e-3)


def test_without_a_number_ten_rows_of_each_class_are_drawn_and_said_to_be_taken_as_right():
    prepared = prepare(small())
    assert len(prepared.trusted[1]) == 30
    assert any("taken as right" in note for note in prepared.notes)
    assert any("No accuracy is measured" in note for note in prepared.notes)


def test_large_trusted_set_without_a_test_set_has_a_fifth_held_out():
    prepared = prepare(small(900), trusted=300)
    assert prepared.held_out
    assert len(prepared.trusted[1]) == 240
    assert len(prepared.data.test[1]) == 60
    assert any("held out" in note for note in prepared.notes)


def test_rows_that_are_in_the_held_out_part_are_not_trained_on():
    data = small(900)
    prepared = prepare(small(900, trusted=(data.x[:300], data.y[:300])))
    held = {row.numpy().tobytes() for row in prepared.data.test[0]}
    assert len(held) == 60
    assert prepared.data.count == 840
    assert not any(row.numpy().tobytes() in held for row in prepared.data.x)
    assert any("60 rows are also in the test set or the held-out part" in note for note in prepared.notes)


def test_part_of_the_trusted_set_is_not_held_out_where_a_class_is_rare():
    data = small(900)
    labels = data.y[:300].clone()
    labels[labels == 2] = 1
    labels[7] = 2
    prepared = prepare(small(900, trusted=(data.x[:300] + 1, labels)))
    assert not prepared.held_out
    assert any("1 of its rarest class" in note for note in prepared.notes)


@pytest.mark.parametrize(("option", "value"), [("noise", 1.0), ("noise", -0.1), ("trusted", 60)])
def test_bad_options_of_prepared_data_are_refused_by_name(option, value):
    with pytest.raises(OptionError, match=option):
        prepare(small(), **{option: value})


def test_trusted_set_that_misses_a_class_is_refused_by_name():
    data = small(trusted=(torch.zeros(4, 5), torch.tensor([0, 1, 0, 1])))
    with pytest.raises(DataError, match="none of c"):
        prepare(data)


def test_rows_that_are_in_the_trusted_set_too_are_counted():
    data = small()
    labels = data.y[:6].clone()
    labels[0] = (labels[0] + 1) % 3
    prepared = prepare(small(trusted=(data.x[:6], labels)))
    assert any("6 rows are also in the trusted set, 1 of them with another label" in note for note in prepared.notes)


def test_one_class_is_refused():
    data = small(trusted=(torch.zeros(4, 5), torch.tensor([0, 1, 2, 1])))
    with pytest.raises(DataError, match="at least two classes"):
        prepare(Labelled("one", "arrays", data.x, data.y * 0, data.classes, data.keys, trusted=data.trusted))


@pytest.mark.parametrize(
    ("last", "words"),
    [(60, "not in the test set or the held-out part; all its 60 rows are"), (59, "without the 59 rows in the test")],
)
def test_data_of_which_the_test_set_leaves_nothing_to_learn_is_refused(last, words):
    data = small(trusted=(torch.zeros(3, 5), torch.arange(3)))
    with pytest.raises(DataError, match=words):
        prepare(replace(data, test=(data.x[:last], data.y[:last])))


def test_test_rows_that_are_trusted_too_are_left_out_of_the_test_set():
    data, trusted = small(), small(100)
    known = trusted.x[60:72], trusted.y[60:72]
    test = torch.cat([known[0][:5], data.x[:2], known[0][:1] + 1]), torch.cat([known[1][:5], data.y[:2], known[1][:1]])
    prepared = prepare(replace(data, trusted=known, test=test))
    assert len(prepared.trusted[1]) == 12
    assert torch.equal(prepared.data.test[0], test[0][5:])
    assert torch.equal(prepared.data.test[1], test[1][5:])
    assert prepared.data.count == 58
    assert (
        "5 rows of the test set are also in the trusted set, which is trained on; they are left out." in prepared.notes
    )
    with pytest.raises(DataError, match="rows that are not in the trusted set; all its 12 rows are"):
        prepare(replace(data, trusted=known, test=known))


def test_held_out_rows_that_are_in_the_rest_of_the_trusted_set_are_left_out():
    data, more = small(), small(460)
    x, y = more.x[60:].clone(), more.y[60:].clone()
    x[::2], y[::2] = x[1::2], y[1::2]
    x[:60] = more.x[60:120]
    prepared = prepare(replace(data, trusted=(x, y)))
    left = {row.numpy().tobytes() for row in prepared.trusted[0]}
    assert prepared.held_out
    assert 0 < len(prepared.data.test[1]) < 80
    assert len(prepared.trusted[1]) == 320
    assert not any(row.numpy().tobytes() in left for row in prepared.data.test[0])
    assert any("of the held-out part are also in the trusted set" in note for note in prepared.notes)


def test_trusted_set_of_few_different_rows_has_none_held_out():
    data, more = small(), small(90)
    prepared = prepare(replace(data, trusted=(more.x[60:].repeat(20, 1), more.y[60:].repeat(20))))
    assert not prepared.held_out
    assert prepared.data.test is None
    assert len(prepared.trusted[1]) == 600
    assert any("its rows are also in the rest of it" in note for note in prepared.notes)


def test_accuracies_of_what_it_is_compared_with_and_advice_where_the_trusted_set_is_enough():
    prepared = digits(noise=0.6, trusted=600)
    stages: list[str] = []
    found = clean(prepared, network(), steps=250, on_progress=lambda stage, done, total: stages.append(stage))
    assert set(found.accuracies) == {"denoised", "trusted set only", "labels as they are", "right labels"}
    assert found.accuracies["right labels"] > found.accuracies["labels as they are"]
    assert stages[0] == "training: trusted set"
    assert len(set(stages)) == 6
    # 600 right labels are enough for an MLP on digits.
    assert any("only the 600 trusted rows is as good or better" in note for note in found.notes)


@pytest.mark.parametrize(
    ("count", "denoised", "plain", "alone", "named"),
    [
        (10_000, 0.90, 0.92, 0.91, ["the labels as they are", "only the 1,200 trusted rows"]),
        (10_000, 0.90, 0.80, 0.91, ["only the 1,200 trusted rows"]),
        (10_000, 0.90, 0.896, 0.894, ["the labels as they are"]),  # the standard error is 0.0043
        (100, 0.90, 0.86, 0.84, ["the labels as they are"]),  # 0.046, and 0.047
        (400, 0.90, 0.86, 0.84, []),
        (100_000, 0.90, None, None, []),
        (100_000, None, None, None, []),
    ],
)
def test_every_way_of_training_that_is_as_good_as_the_rows_can_tell_is_named(count, denoised, plain, alone, named):
    pair = torch.zeros(1200, 5), torch.zeros(1200, dtype=torch.int64)
    test = torch.zeros(count, 5), torch.zeros(count, dtype=torch.int64)
    prepared = Prepared(small(trusted=pair, test=test), held_out=count == 100)
    given = {"denoised": denoised, "labels as they are": plain, "trusted set only": alone, "right labels": 1.0}
    found = _advice(prepared, {name: share for name, share in given.items() if share is not None})
    assert [note.split("training on ")[1].split(" is as good")[0] for note in found[:-1]] == named
    assert bool(found) == bool(named)
    part = "the 100 rows of the held-out part" if count == 100 else f"the {count:,} rows of the test set"
    assert all(part in note for note in found[:-1])


# -- classifiers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "found"),
    [
        ("auto", (1, 8, 8), "mlp"),
        ("auto", (30,), "mlp"),
        ("auto", (1, 28, 28), "mlp"),
        ("linear", (30,), "linear"),
        ("cnn", (1, 28, 28), "cnn"),
        ("cnn", (3, 32, 32), "cnn"),
        ("cnn", (3, 64, 48), "cnn"),
        ("cnn", (1, 16, 16), "cnn"),
    ],
)
def test_classifier_of_each_kind_gives_one_score_a_class(kind, shape, found):
    made = classifier(kind, shape, 7, device=torch.device("cpu"), seed=0)
    assert made.kind == found
    assert made.network(torch.zeros(2, *shape)).shape == (2, 7)
    assert (made.augment is not None) == (found == "cnn" and shape[0] == 3)
    assert bool(made.why) == (kind == "auto" and shape == (1, 28, 28))


def test_house_numbers_have_their_own_network_and_are_not_mirrored():
    found = {
        source: classifier("cnn", (3, 32, 32), 10, device=torch.device("cpu"), seed=0, source=source)
        for source in ("svhn", "cifar10", "svhn.npz")
    }
    weights = {source: sum(p.numel() for p in made.network.parameters()) for source, made in found.items()}
    assert weights == {"svhn": 1_341_226, "cifar10": 1_172_410, "svhn.npz": 1_172_410}
    assert [made.augment for made in found.values()] == [crop, crop_and_flip, crop_and_flip]


def test_classifier_is_drawn_from_its_seed_alone():
    made = []
    for seed in (1, 1, 2):
        torch.rand(3)
        made.append(next(classifier("mlp", (5,), 2, device=torch.device("cpu"), seed=seed).network.parameters()))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize(("kind", "shape"), [("cnn", (30,)), ("cnn", (1, 8, 8)), ("tree", (30,))])
def test_classifier_that_does_not_fit_is_refused(kind, shape):
    with pytest.raises(OptionError, match="model"):
        classifier(kind, shape, 3, device=torch.device("cpu"), seed=0)


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_as_bytes_keep_every_channel_and_thumbnails_are_grey_or_colour(channels):
    whole = torch.arange(4 * channels * 12 * 10).reshape(4, channels, 12, 10) % 256
    found = as_bytes(whole / 255)
    assert found.shape == ((4, 12, 10) if channels == 1 else (4, 12, 10, channels))
    assert np.array_equal(found.reshape(4, 12, 10, channels), whole.permute(0, 2, 3, 1).numpy())
    shown = thumbnails(whole / 255, torch.tensor([2, 0]), side=6)
    assert shown.shape == ((2, 6, 5) if channels < 3 else (2, 6, 5, 3))
    assert np.array_equal(
        thumbnails(whole / 255, torch.tensor([2]), side=96)[0],
        found[2] if channels in (1, 3) else found[2][..., 0] if channels == 2 else found[2][..., :3],
    )
    assert len(thumbnails(whole / 255, torch.tensor([], dtype=torch.int64), side=6)) == 0


def test_what_is_no_module_or_no_number_of_steps_is_refused():
    pair = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
    with pytest.raises(OptionError, match=r"model must be an nn\.Module; got str"):
        denoise(pair, pair, "mlp")
    with pytest.raises(OptionError, match="steps must be"):
        denoise(pair, pair, torch.nn.Linear(3, 2), steps=1.5)
