"""Data that somebody made to harm, of every kind that is read: refused by our own error, in one."""

import http.server
import io
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from huggingface_hub import constants
from PIL import Image
from pyarrow import parquet

from hyperfed.data import pictures, site, tables
from hyperfed.data.datasets import load
from hyperfed.errors import UserError

ROWS = 12
GOOD: dict[str, Any] = {
    "x": [[1.0, 2.0]] * ROWS,
    "y": [0, 1] * (ROWS // 2),
    "client": ["ann", "bob"] * (ROWS // 2),
}


def png(width: int = 2, height: int = 2, mode: str = "L") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "png")
    return file.getvalue()


def flood(side: int) -> bytes:
    """A picture that says it is large, and holds four pixels."""
    made = bytearray(png())
    made[16:24] = side.to_bytes(4, "big") * 2
    made[29:33] = zlib.crc32(made[12:29]).to_bytes(4, "big")
    return bytes(made)


def written(path: Path, columns: dict[str, Any], features: Any = None) -> None:
    table = pyarrow.table(columns)
    if features is not None:
        said = {"info": {"features": datasets.Features(features).to_dict()}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(said)})
    parquet.write_table(table, path)


def column(**changes: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        columns = GOOD | changes
        written(path, {name: v for name, v in columns.items() if v is not None})

    return write


def features_with(image: str, names: Iterable[str]) -> dict[str, Any]:
    """Says that one of some columns is an image, and of the others what they are."""
    kinds = {
        "x": datasets.List(datasets.Value("float64")),
        "y": datasets.Value("int64"),
        "client": datasets.Value("string"),
    }
    return {name: datasets.Image() if name == image else kinds[name] for name in names}


IMAGE = {
    "image": datasets.Image(),
    "label": datasets.ClassLabel(names=["no", "yes"]),
    "client": datasets.Value("string"),
}


def picture(content: bytes | None = None, path: str | None = None, **changes: Any) -> Any:
    """Twelve images of two clients, the last of which is another one."""

    def write(file: Path) -> None:
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        cells = [{"bytes": png(), "path": None}] * (ROWS - 1) + [{"bytes": content, "path": path}]
        columns = {
            "image": pyarrow.array(cells, kind),
            "label": GOOD["y"],
            "client": GOOD["client"],
        }
        written(file, columns | changes, IMAGE)

    return write


def cut(path: Path) -> None:
    column()(path)
    path.write_bytes(path.read_bytes()[:-20])


def flipped(path: Path) -> None:
    """The length of what describes the file is another one."""
    column()(path)
    content = bytearray(path.read_bytes())
    content[-8:-4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(content)


def noise(path: Path) -> None:
    column()(path)
    content = bytearray(path.read_bytes())
    content[4:-8] = np.random.default_rng(0).bytes(len(content) - 12)
    path.write_bytes(content)


nested = pyarrow.array([[[1.0], [2.0, 3.0]]] * ROWS)
FILES: dict[str, Callable[[Path], None]] = {
    "no parquet": lambda path: path.write_bytes(b"garbage"),
    "nothing": lambda path: path.write_bytes(b""),
    "the first and the last letters alone": lambda path: path.write_bytes(b"PAR1PAR1"),
    "a file cut short": cut,
    "a header longer than the file": flipped,
    "a header of noise": noise,
    "rows of several lengths": column(x=[[1.0]] * (ROWS - 1) + [[1.0, 2.0]]),
    "lists of several lengths in lists": column(x=nested),
    "a row without a list": column(x=[[1.0, 2.0]] * (ROWS - 1) + [None]),
    "a list without a number": column(x=[[1.0, 2.0]] * (ROWS - 1) + [[1.0, None]]),
    "empty lists": column(x=[[]] * ROWS),
    "words for numbers": column(x=[["a", "b"]] * ROWS),
    "numbers beyond a float32": column(x=[[1e300, 0.0]] * ROWS),
    "targets beyond a float32": column(y=[1e300] * ROWS),
    "infinity": column(x=[[float("inf"), 0.0]] * ROWS),
    "NaN": column(x=[[float("nan"), 0.0]] * ROWS),
    "times": column(x=pyarrow.array([0] * ROWS, pyarrow.timestamp("s"))),
    "truth values": column(x=[[True, False]] * ROWS),
    "structures": column(x=[{"a": 1}] * ROWS),
    "bytes": column(x=[b"12"] * ROWS),
    "decimals": column(x=pyarrow.array([1] * ROWS).cast(pyarrow.decimal128(38))),
    "numbers without an axis": column(x=[1.0] * ROWS),
    "labels below zero": column(y=[-1, 0] * (ROWS // 2)),
    "no label in a row": column(y=[0] * (ROWS - 1) + [None]),
    "labels of 64 bits without a sign": column(
        y=pyarrow.array([2**64 - 1] * ROWS, pyarrow.uint64())
    ),
    "10^16 classes": column(y=[10**16] * ROWS),
    "labels in lists of several lengths": column(y=[[0]] * (ROWS - 1) + [[0, 1]]),
    "times for labels": column(y=pyarrow.array([0] * ROWS, pyarrow.timestamp("s"))),
    "a row of nobody": column(client=["ann"] * (ROWS - 1) + [None]),
    "a client of no number": column(client=[0.0] * (ROWS - 1) + [float("nan")]),
    "clients in lists": column(client=[["ann"]] * ROWS),
    "clients in structures": column(client=[{"name": "ann"}] * ROWS),
    "no column of clients": column(client=None),
    "no column to learn from": column(x=None),
    "no rows": column(x=[], y=[], client=[]),
    "parts of other names": column(split=["learn"] * ROWS),
    "no part in a row": column(split=["train"] * (ROWS - 1) + [None]),
    "bytes that are no image": picture(b"garbage"),
    "no image in a row": picture(None),
    "an empty image": picture(b""),
    "an image cut short": picture(png()[:-30]),
    "an image of other checks": picture(png()[:20] + b"\0\0\0\0" + png()[24:]),
    "an image of 4 billion pixels": picture(flood(2**16)),
    "an image of 256 million pixels": picture(flood(2**14)),
    "an image of 16 bits": picture(png(mode="I;16")),
    "an image of another size": picture(png(3, 2)),
    "an image at an address": picture(None, "http://127.0.0.1:9/x.png"),
    "an image that is a device": picture(None, "/dev/zero"),
    "an image that is another file": picture(None, "/etc/passwd"),
    "labels that are not named": picture(png(), label=[7] * ROWS),
    "no label of an image": picture(png(), label=[0] * (ROWS - 1) + [None]),
    "labels of images in words": picture(png(), label=["no"] * ROWS),
}

LEARNABLE = {
    "numbers without an axis",
    "labels below zero",
    "labels of 64 bits without a sign",
    "10^16 classes",
    "no column of clients",
    "labels of images in words",
}
"""What a table may hold that a user learns from: labels are numbered in their order, and clients
are made."""


@pytest.mark.parametrize("what", FILES)
def test_a_hostile_table_is_refused_at_a_site(what: str, tmp_path: Path) -> None:
    FILES[what](path := tmp_path / "site.parquet")
    with pytest.raises(UserError):
        site.read(path)


@pytest.mark.parametrize("what", FILES)
def test_a_hostile_table_of_ones_own_is_refused_or_learned_from(what: str, tmp_path: Path) -> None:
    FILES[what](path := tmp_path / "own.parquet")
    if what in LEARNABLE:
        examples = load(str(path))
        assert set(examples.y.tolist()) <= set(range(ROWS))
        return
    with pytest.raises(UserError):
        load(str(path))


def test_a_table_of_more_numbers_than_memory_holds_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column(x=[[0.0] * 1000] * ROWS)(path := tmp_path / "site.parquet")
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(tables, "total_memory", lambda: 12_000 * 8)
    for read in (site.read, tables.read):
        with pytest.raises(UserError, match=r"its 120\d\d values are larger than this machine's"):
            read(path)
    monkeypatch.setattr(tables, "total_memory", lambda: 12_100 * 8)
    site.read(path)


def test_images_of_more_pixels_than_memory_holds_are_not_stacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(png())(path := tmp_path / "site.parquet")
    monkeypatch.setattr(pictures, "total_memory", lambda: 2 * 4 * ROWS - 1)
    for read in (lambda: site.read(path), lambda: load(str(path))):
        with pytest.raises(UserError, match="memory twice"):
            read()
    monkeypatch.setattr(pictures, "total_memory", lambda: 2 * 4 * ROWS)
    assert site.read(path).x.shape == (ROWS, 1, 2, 2)
    assert len(load(str(path))) == ROWS


def test_labels_beyond_those_that_a_folder_names_are_refused(tmp_path: Path) -> None:
    picture(png(), label=[7] * ROWS)(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="must be below 2, as many as it names, got 7"):
        load(str(tmp_path))


def test_what_is_no_file_is_not_opened_as_an_image() -> None:
    with pytest.raises(UserError, match="no file /dev/zero"):
        pictures.pixels("/dev/zero")


def test_what_a_table_says_of_its_index_is_not_believed(tmp_path: Path) -> None:
    said = {"pandas": json.dumps({"index_columns": [3], "columns": 7, "column_indexes": [None]})}
    table = pyarrow.table(GOOD).replace_schema_metadata(said)
    parquet.write_table(table, path := tmp_path / "own.parquet")
    with pytest.raises(UserError, match="must be a readable table"):
        load(str(path))


@pytest.mark.filterwarnings("ignore")
def test_an_image_of_which_pillow_only_warns_is_not_decoded_either() -> None:
    with pytest.raises(UserError, match="pixels at most, got 10000 x 10000"):
        pictures.pixels(flood(10_000))


# A folder, and what came with it.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server on the loopback that stands for the network: what it was asked for."""
    hits: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def note(self) -> None:
            hits.append(self.path)
            self.send_error(404)

        do_GET = do_HEAD = do_POST = note  # noqa: N815, as the library calls them

        def log_message(self, *told: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setenv("ADDRESS", address)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hits
        server.shutdown()
        thread.join()


def named(path: str) -> str:
    said = f"data_files:\n  - split: train\n    path: {path}"
    return f"configs:\n- config_name: default\n  {said}\n"


ELSEWHERE = {
    "an address": "ADDRESS/x.parquet",
    "the hub": "hf://datasets/some/where/x.parquet",
    "an archive at an address": "zip://x.parquet::ADDRESS/x.zip",
    "a file by its path": "/etc/passwd",
    "a file above": "../x.parquet",
    "somebody's home": "~/x.parquet",
}


@pytest.mark.parametrize("place", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_folder_that_names_data_elsewhere_is_refused_and_nobody_asked(
    what: str, place: str, asked: list[str], tmp_path: Path
) -> None:
    (folder := tmp_path / "folder").mkdir()
    column()(folder / "train.parquet")
    column()(tmp_path / "x.parquet")
    text = named(ELSEWHERE[what].replace("ADDRESS", os.environ["ADDRESS"]))
    (folder / place).write_text(f"---\n{text}---\n" if place == "README.md" else text)
    for read in (lambda: site.read(folder), lambda: load(str(folder))):
        with pytest.raises(UserError, match="must name data within it"):
            read()
    (folder / place).write_text("---\nconfigs: 3\n- [\n---\n")
    with pytest.raises(UserError, match="but is not"):
        site.read(folder)
    assert asked == []


def test_an_honest_readme_is_followed(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    column()(tmp_path / "part" / "a.parquet")
    column(client=["cem"] * ROWS)(tmp_path / "other.parquet")
    text = "homepage: https://example.org\n" + named("part/*")
    (tmp_path / "README.md").write_text(f"---\n{text}---\n# https://example.org\n")
    assert list(site.read(tmp_path).rows) == ["ann", "bob"]
    assert len(load(str(tmp_path))) == ROWS
    assert asked == []


def test_a_column_that_says_it_is_an_image_at_an_address_is_not_fetched(
    asked: list[str], tmp_path: Path
) -> None:
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    cells = pyarrow.array([{"bytes": None, "path": f"{os.environ['ADDRESS']}/x.png"}] * ROWS, kind)
    for name in ("client", "x", "y", "split"):
        (folder := tmp_path / name).mkdir()
        columns = GOOD | {name: cells}
        written(folder / "a.parquet", columns, features_with(name, columns))
        for read in (lambda: site.read(folder), lambda: site.read(folder / "a.parquet")):
            with pytest.raises(UserError):
                read()
        with pytest.raises(UserError):
            load(str(folder))
    assert asked == []


def test_no_copy_of_ones_own_data_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor at a site: neither in the library's cache nor in ours, unless that is asked for."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.delenv("HYPERFED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(home / "huggingface"))
    (folder := tmp_path / "folder").mkdir()
    column()(folder / "a.parquet")
    (pictures := tmp_path / "pictures").mkdir()
    picture(png())(pictures / "a.parquet")
    for place in (folder, folder / "a.parquet", pictures, pictures / "a.parquet"):
        site.read(place)
        load(str(place))
    # Locks have no content, but names of folders.
    assert [path for path in home.rglob("*") if path.is_file()] == []
    monkeypatch.setenv("HYPERFED_CACHE", str(home / "ours"))
    load(str(folder))
    assert len(list(home.rglob("*.safetensors"))) == 1
