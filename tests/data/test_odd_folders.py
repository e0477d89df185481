"""Folders of photographs as cameras, systems and people leave them: read whole, or refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from hyperfed.data import datasets, pictures, site
from hyperfed.errors import UserError

SIDES = 4, 6


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYPERFED_DATA", raising=False)


def photos(folder: Path, *people: str) -> Path:
    """Two photographs of a cat and of a dog by each person."""
    rng = np.random.default_rng(len(people))
    for person in people:
        for label in ("cat", "dog"):
            place = folder / person / label
            place.mkdir(parents=True)
            for number in range(2):
                taken = Image.fromarray(rng.integers(0, 256, SIDES, dtype=np.uint8))
                taken.save(place / f"{number}.png")
    return folder


def test_what_systems_and_editors_leave_is_nobodys(tmp_path: Path) -> None:
    folder = photos(tmp_path / "all", "ann", "bob")
    first = folder / "ann" / "cat" / "0.png"
    for name in (".DS_Store", "ann/.DS_Store", "ann/cat/Thumbs.db", "ann/cat/._0.png"):
        (folder / name).write_bytes(b"no image")
    for name in (".ipynb_checkpoints", "ann/cat/.ipynb_checkpoints", "__MACOSX/ann/cat"):
        (folder / name).mkdir(parents=True)
        shutil.copy(first, folder / name / "0-checkpoint.png")
    found = datasets.load(str(folder))
    assert (len(found), found.names, found.labels) == (8, ("ann", "bob"), ("cat", "dog"))


@pytest.mark.parametrize("where", ["elsewhere", "all"])
def test_a_person_whose_folder_is_a_link_is_not_left_out(tmp_path: Path, where: str) -> None:
    folder = photos(tmp_path / "all", "ann", "bob")
    if where == "elsewhere":
        photos(tmp_path / where, "ann")
    (folder / "cy").symlink_to(tmp_path / where / "ann")
    told = "must be no link, as cy is, whose files would be left out; put a copy in its place"
    for read in (datasets.load, site.read):
        with pytest.raises(UserError, match=told):
            read(str(folder))
    shutil.rmtree(folder / "ann")
    shutil.rmtree(folder / "bob")
    with pytest.raises(UserError, match=r"must be no link, as cy is|lead to a file, but cy does"):
        datasets.load(str(folder))


def test_a_photograph_that_is_a_link_is_read_and_a_broken_link_refused(tmp_path: Path) -> None:
    folder = photos(tmp_path / "all", "ann", "bob")
    shutil.move(folder / "ann" / "cat" / "0.png", tmp_path / "blob")
    (folder / "ann" / "cat" / "0.png").symlink_to(tmp_path / "blob")
    (folder / "ann" / ".#lock").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(folder)
    for name in ("all", "link"):
        assert len(datasets.load(str(tmp_path / name))) == 8
    (tmp_path / "blob").unlink()
    with pytest.raises(UserError, match=r"lead to a file, but ann/cat/0\.png does not; remove it"):
        datasets.load(str(folder))


def test_tables_in_a_linked_folder_are_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.csv").write_text("client,label,age\n" + "c,0,1\nd,1,2\n" * 8)
    shutil.copytree(tmp_path / "one", tmp_path / "all" / "one")
    (tmp_path / "all" / "two").symlink_to(tmp_path / "one")
    with pytest.raises(UserError, match="must be no link, as two is"):
        datasets.load(str(tmp_path / "all"))


def test_a_person_whose_name_the_library_passes_over_is_not_left_out(tmp_path: Path) -> None:
    folder = photos(tmp_path / "all", "ann", "bob", "__cy")
    with pytest.raises(UserError, match=r"4 of its files .* as __cy/cat/0\.png, .* begin with __"):
        datasets.load(str(folder))


@pytest.mark.parametrize("ending", ["heic", "AVIF"])
def test_photographs_that_the_library_does_not_read_are_not_left_out(
    tmp_path: Path, ending: str
) -> None:
    folder = photos(tmp_path / "all", "ann", "bob")
    (folder / "ann" / "cat" / "0.png").rename(folder / "ann" / "cat" / f"0.{ending}")
    with pytest.raises(UserError, match=rf"1 of its .* ann/cat/0\.{ending}, .* convert them"):
        datasets.load(str(folder))


def test_a_folder_whose_name_is_a_pattern_is_not_another_one(tmp_path: Path) -> None:
    photos(tmp_path / "photos 1", "cy", "di")
    folder = photos(tmp_path / "photos [12]", "ann", "bob [1]")
    with pytest.raises(UserError, match=r"its path must be without \[, .*; rename it"):
        datasets.load(str(folder))
    folder.rename(tmp_path / "photos")
    assert datasets.load(str(tmp_path / "photos")).names == ("ann", "bob [1]")


def turned(path: Path, upright: Image.Image, orientation: int) -> None:
    """Writes a photograph as a camera does that is held in another way."""
    lying = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    (upright if lying is None else upright.transpose(lying)).save(path, exif=exif)


@pytest.mark.parametrize("ending", ["png", "tiff", "webp"])
def test_photographs_are_upright_however_the_camera_was_held(tmp_path: Path, ending: str) -> None:
    folder = photos(tmp_path / "all", "ann", "bob")
    expected = datasets.load(str(folder)).x
    files = sorted(folder.rglob("*.png"))
    for path, orientation in zip(files, [1, 2, 3, 6, 8, 6, 8, 1], strict=True):
        upright = Image.open(path)
        upright.load()
        path.unlink()
        turned(path.with_suffix(f".{ending}"), upright, orientation)
    found = datasets.load(str(folder))
    assert tuple(found.x.shape[-2:]) == SIDES
    if ending != "webp":  # which loses some
        assert found.x.tolist() == expected.tolist()


def test_an_orientation_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    taken = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(SIDES))
    taken.save(tmp_path / "odd.png", exif=b"Exif\0\0garbage")
    assert pictures.pixels(str(tmp_path / "odd.png")).tolist() == np.asarray(taken).tolist()
