"""Random crops and flips."""

from __future__ import annotations

import torch

from bilevel.applications.augmentation import MARGIN, crop, crop_and_flip, crop_flip_and_erase


def image() -> torch.Tensor:
    return torch.arange(1.0, 1 + 3 * 12 * 10).reshape(1, 3, 12, 10)


def test_every_image_is_a_crop_of_its_padded_self_mirrored_or_not():
    x = image().expand(200, -1, -1, -1)
    torch.manual_seed(0)
    found = crop_and_flip(x)
    padded = torch.nn.functional.pad(x[:1], (MARGIN,) * 4)[0]
    crops = {
        (top, left, flip): padded[:, top : top + 12, left : left + 10].flip(2)
        if flip
        else padded[:, top : top + 12, left : left + 10]
        for top in range(2 * MARGIN + 1)
        for left in range(2 * MARGIN + 1)
        for flip in (False, True)
    }
    drawn = [next(key for key, crop in crops.items() if torch.equal(one, crop)) for one in found]
    assert {top for top, _, _ in drawn} == set(range(2 * MARGIN + 1))
    assert {left for _, left, _ in drawn} == set(range(2 * MARGIN + 1))
    assert 60 < sum(flip for *_, flip in drawn) < 140


def test_images_of_a_batch_are_drawn_one_by_one_and_stay_in_place():
    x = torch.arange(1.0, 6)[:, None, None, None].expand(5, 1, 16, 16).contiguous()
    torch.manual_seed(1)
    found = crop_and_flip(x)
    for i, one in enumerate(found):
        assert set(one.unique().tolist()) <= {0.0, float(i + 1)}
        assert float(one[0, 8, 8]) == i + 1
    assert len({one.ne(0).sum().item() for one in found}) > 1


def test_crops_alone_are_those_of_the_same_draw_and_never_mirrored():
    x = image().expand(50, -1, -1, -1)
    torch.manual_seed(3)
    found = crop(x)
    torch.manual_seed(3)
    flipped = crop_and_flip(x)
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(found, flipped, strict=True)]
    assert all(flip or torch.equal(a, b) for flip, a, b in zip(mirrored, found, flipped, strict=True))
    assert 10 < sum(mirrored) < 40
    inside = found[:, 0, MARGIN:-MARGIN, MARGIN:-MARGIN]
    assert bool((inside.diff(dim=2) == 1).all())


def test_a_square_of_half_the_side_is_erased_anywhere_in_each_image():
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 8, 8)
    found = crop_flip_and_erase(x)
    torch.manual_seed(0)
    moved = crop_and_flip(x)
    gone = (found == 0) & (moved == 1)
    assert torch.equal(found[~gone], moved[~gone]), "the rest stays"
    assert torch.equal(gone[:, 0], gone[:, 1]), "all channels"
    hole = gone[:, 0][moved[:, 0].flatten(1).all(1)]  # of images that were not shifted over the border
    rows, columns = hole.any(2), hole.any(1)
    assert torch.equal(hole, rows[:, :, None] & columns[:, None, :]), "a rectangle"
    assert rows.sum(1).max() == 4
    assert columns.sum(1).max() == 4
    assert len({tuple(row.tolist()) for row in rows}) == 8, "as many places as the centre has"
    assert gone[:, 0].any(0).all(), "anywhere"
