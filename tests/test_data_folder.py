"""Images in class folders: parts, sizes, colours, and files that do not decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bilevel.data import load
from bilevel.errors import DataError, OptionError

RANDOM = np.random.default_rng(0)


def write(path: Path, size: tuple[int, int] = (9, 7), mode: str = "RGB", **options: object) -> np.ndarray:
    """A random image of this width and height; returns its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    pixels = RANDOM.integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels, mode=None).save(path, **options)  # type: ignore[arg-type]
    return pixels


def classes(root: Path, n: int = 5, **options: object) -> Path:
    """A folder of two classes with n images each."""
    for name in ("dog", "cat"):
        for i in range(n):
            write(root / name / f"{i}.png", **options)  # type: ignore[arg-type]
    return root


def test_images_of_one_small_size_are_kept_as_they_are(tmp_path: Path) -> None:
    root = classes(tmp_path / "pets")
    pixels = write(root / "cat" / "10.PNG")
    data = load(root)
    assert (data.name, data.kind, data.classes) == ("pets", "images", ("cat", "dog"))
    assert data.x.shape == (11, 3, 7, 9)
    assert list(data.keys[:4]) == ["cat/0.png", "cat/1.png", "cat/10.PNG", "cat/2.png"]
    assert data.y.tolist() == [0] * 6 + [1] * 5
    assert torch.equal(data.x[2], torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    assert data.notes == ()
    assert data.trusted is None
    assert data.test is None


def test_other_sizes_are_cut_to_64_from_the_middle(tmp_path: Path) -> None:
    root = classes(tmp_path / "pets")
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, 100:200] = 255
    Image.fromarray(wide).save(root / "cat" / "a.png")
    data = load(root)
    assert data.x.shape == (11, 3, 64, 64)
    middle = data.x[data.keys.index("cat/a.png")]
    assert float(middle[:, :, 2:-2].min()) == 1
    assert data.notes == (
        "11 of 11 images were resized, and cut at the middle if needed, to 64x64 pixels. They have 2 sizes, such "
        "as 9x7 and 300x100 (cat/a.png).",
    )
    assert load(classes(tmp_path / "large", size=(80, 80))).x.shape == (10, 3, 64, 64)


def test_grey_images_have_one_channel_unless_one_has_colour(tmp_path: Path) -> None:
    root = classes(tmp_path / "pets", mode="L")
    deep = (np.arange(63).reshape(7, 9) * 1000).astype(np.uint16)
    Image.fromarray(deep).save(root / "cat" / "deep.png")
    data = load(root)
    assert data.x.shape == (11, 1, 7, 9)
    row = data.x[data.keys.index("cat/deep.png")][0]
    assert row.numpy() == pytest.approx(deep / 65535, abs=1 / 255)
    write(root / "dog" / "colour.png")
    mixed = load(root)
    assert mixed.x.shape == (12, 3, 7, 9)
    assert torch.equal(mixed.x[0, 0], data.x[0, 0])


def test_transparent_pixels_are_white_and_photos_stand_upright(tmp_path: Path) -> None:
    root = classes(tmp_path / "pets")
    Image.new("RGBA", (9, 7), (10, 20, 30, 0)).save(root / "cat" / "clear.png")
    Image.new("P", (9, 7)).save(root / "cat" / "palette.gif")
    turned = Image.fromarray(np.repeat([[[0] * 3], [[255] * 3]], [4, 5], axis=0).repeat(7, axis=1).astype(np.uint8))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(root / "cat" / "turned.jpg", exif=exif)
    data = load(root)
    assert data.x.shape == (13, 3, 7, 9)
    assert float(data.x[data.keys.index("cat/clear.png")].min()) == 1
    assert float(data.x[data.keys.index("cat/palette.gif")].max()) == 0
    upright = data.x[data.keys.index("cat/turned.jpg")]  # what was above is at the right
    assert float(upright[:, :, :4].min()) > 0.9
    assert float(upright[:, :, 6:].max()) < 0.1


@pytest.mark.parametrize("train", ["", "train"])
def test_parts_are_found_beside_or_below_the_classes(tmp_path: Path, train: str) -> None:
    root = tmp_path / "pets"
    classes(root / train)
    for part, n in (("test", 2), ("trusted", 1)):
        classes(root / part, n, size=(20, 14))
    data = load(root)
    assert data.classes == ("cat", "dog")
    assert data.keys[0] == (f"{train}/cat/0.png" if train else "cat/0.png")
    assert data.test is not None
    assert data.trusted is not None
    assert data.test[0].shape == (4, 3, 7, 9)
    assert data.test[1].tolist() == [0, 0, 1, 1]
    assert data.trusted[1].tolist() == [0, 1]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    root = classes(tmp_path / "things")
    write(root / "train" / "express.png")
    (root / "train" / "more").mkdir()
    assert load(root).classes == ("cat", "dog", "train")


def test_parts_may_be_further_folders(tmp_path: Path) -> None:
    root, more = classes(tmp_path / "pets"), classes(tmp_path / "more", 1)
    data = load(root, trusted=more, test=str(more))
    assert data.trusted is not None
    assert data.trusted[1].tolist() == [0, 1]
    classes(root / "test", 1)
    with pytest.raises(OptionError, match="test is given twice"):
        load(root, test=more)
    write(more / "fish" / "0.png")
    with pytest.raises(DataError, match="labels 'fish' do not occur"):
        load(root, trusted=more)


def test_images_that_do_not_decode_are_left_out_and_named(tmp_path: Path) -> None:
    root = classes(tmp_path / "pets", 6)
    whole = (root / "cat" / "1.png").read_bytes()
    (root / "cat" / "1.png").write_bytes(whole[: len(whole) // 2])
    (root / "dog" / "3.png").write_bytes(b"")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    (root / ".git").mkdir()
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "empty").mkdir()
    data = load(root)
    assert data.count == 10
    assert "cat/1.png" not in data.keys
    assert data.notes == (
        "Left out 2 of 12 images that do not decode: cat/1.png, dog/3.png.",
        "Folders without images were skipped: empty.",
    )
    for file in (root / "dog").iterdir():
        file.write_bytes(b"x")
    with pytest.raises(DataError, match="no image of the class 'dog' can be decoded"):
        load(root)


def test_any_cut_of_an_image_is_read_or_left_out(tmp_path: Path) -> None:
    root = classes(tmp_path / "pets", 6, size=(64, 64))
    for suffix in ("jpg", "gif", "webp", "bmp", "png"):
        write(root / "cat" / f"whole.{suffix}", (64, 64))
        content = (root / "cat" / f"whole.{suffix}").read_bytes()
        for share in (0.01, 0.1, 0.3, 0.6, 0.9, 0.99):
            (root / "cat" / f"{share}.{suffix}").write_bytes(content[: int(share * len(content))])
    data = load(root)
    assert {f"cat/whole.{suffix}" for suffix in ("jpg", "gif", "webp", "bmp", "png")} <= set(data.keys)
    assert 17 <= data.count < 47


def test_folders_without_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must hold class folders with images"):
        load(tmp_path)
    write(tmp_path / "0.png")
    with pytest.raises(DataError, match="must hold class folders with images"):
        load(tmp_path)
    for i in range(12):
        write(tmp_path / "cat" / f"{i}.png")
    with pytest.raises(DataError, match="at least 2 classes are needed; the only class folder with images is 'cat'"):
        load(tmp_path)
    few = classes(tmp_path / "few", 4)
    with pytest.raises(DataError, match="at least 10 images are needed; there are 8"):
        load(few)
