"""Which class is labelled as which: the table is found, and the posterior is that of Bayes."""

from __future__ import annotations

import pytest
import torch

from bilevel.applications.denoising.label_mistakes import Mistakes, mistakes

CLASSES = 4
TABLE = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.0, 0.6, 0.4, 0.0], [0.1, 0.1, 0.7, 0.1], [0.0, 0.0, 0.0, 1.0]])


def task(rows: int = 40_000, sharpness: float = 1.0, table: torch.Tensor = TABLE):
    """Probabilities, classes drawn from them, and labels drawn by the table; the classifier states others."""
    draws = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(rows, CLASSES, generator=draws, dtype=torch.float64)).softmax(1)
    truth = torch.multinomial(p, 1, generator=draws).squeeze(1)
    labels = torch.multinomial(table.double()[truth], 1, generator=draws).squeeze(1)
    return (p.log() * sharpness).softmax(1), truth, labels


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_table_and_temperature_are_found_whether_the_classifier_is_too_sure_or_not_enough(sharpness):
    said, _, labels = task(sharpness=sharpness)
    found = mistakes(said, labels)
    # 10,000 examples of a class give a standard error of 0.005; the temperatures tried are 28% apart
    torch.testing.assert_close(found.table, TABLE.double(), atol=0.03, rtol=0)
    assert found.temperature == pytest.approx(sharpness, rel=0.15)


def test_rows_of_the_table_are_distributions_even_of_a_class_that_nobody_has():
    said, _, labels = task(500)
    said[:, 2] = 0
    found = mistakes(said, labels.clamp(max=1))
    torch.testing.assert_close(found.table.sum(1), torch.ones(CLASSES, dtype=torch.float64))
    assert bool((found.table > 0).all())
    assert float(found.table[2, 2]) > 0.9


def test_posterior_is_that_of_bayes():
    p, label = torch.tensor([[0.2, 0.5, 0.2, 0.1]]), torch.tensor([2])
    joint = p[0] * TABLE[:, 2]
    torch.testing.assert_close(Mistakes(TABLE, 1.0).posterior(p, label)[0], joint / joint.sum())
    joint = p[0].sqrt() * TABLE[:, 2]
    torch.testing.assert_close(Mistakes(TABLE, 1.0).posterior(p, label, 2.0)[0], joint / joint.sum())


def test_labels_are_told_right_from_wrong_as_well_as_they_can_be():
    said, truth, labels = task(sharpness=3.0)
    found = mistakes(said, labels)
    right = found.posterior(said, labels, found.temperature)[torch.arange(len(labels)), labels]
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        part = (right >= low) & (right < low + 0.2)
        share = (truth == labels)[part].double().mean()
        assert abs(share - right[part].mean()) < 0.08  # the nearest temperature of the grid is 10% off
