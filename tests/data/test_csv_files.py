"""CSV files: ids and labels are as they are written there, alone and in folders."""

import shutil
import zipfile
from functools import partial
from pathlib import Path

import datasets as library
import numpy as np
import pytest
import torch

from hyperfed.data import datasets, hub, site
from hyperfed.data.settings import TaskConfig
from hyperfed.data.tables import Columns
from hyperfed.errors import UserError
from own_data import UNCLOSED, N, saved, table


def written(folder: Path, ids: list[str], labels: list[str]) -> str:
    lines = (
        f"{who},{label},{row}" for row, (who, label) in enumerate(zip(ids, labels, strict=True))
    )
    path = folder / "mine.csv"
    path.write_text("\n".join(["client,label,age", *lines, ""]))
    return str(path)


def test_ids_of_a_csv_file_are_as_they_are_written(tmp_path: Path) -> None:
    path = written(tmp_path, ["01", "1", "001", "7"] * 6, ["0", "1"] * 12)
    assert datasets.load(path).names == ("01", "1", "001", "7")
    assert list(site.read(path).rows) == ["01", "1", "001", "7"]


@pytest.mark.parametrize("name", ["mine.csv", "mine.parquet", "mine.npz"])
def test_a_file_may_be_called_in_capitals(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = table()
    usual, loud = tmp_path / name, tmp_path / name.upper()
    if usual.suffix == ".npz":
        x = frame[["age", "height"]].to_numpy()
        np.savez(usual, x=x, y=frame["label"], client=frame["client"].to_numpy(str))
    else:
        saved(frame, usual)
    shutil.copy(usual, loud)
    one, other = (datasets.load(str(path)) for path in (usual, loud))
    assert (one.names, one.labels) == (other.names, other.labels)
    torch.testing.assert_close(one.x, other.x, rtol=0, atol=0)
    assert site.read(loud).introduce().members == site.read(usual).introduce().members
    monkeypatch.chdir(tmp_path)
    assert TaskConfig(name=loud.name).name == str(loud)  # wherever the run goes on


@pytest.mark.usefixtures("cached")
def test_a_column_of_several_files_is_words_by_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "said").mkdir()
    for place, said in (("a", ["hello", "bye"]), ("b", ["123", "456"])):
        rows = [f"{place},{word},{label}" for label, word in enumerate(said)]
        (tmp_path / "said" / f"{place}.csv").write_text("\n".join(["client,text,label", *rows, ""]))
    assert datasets.load(str(tmp_path / "said")).x.shape == (4, 5)
    shutil.copytree(tmp_path / "said", tmp_path / "asked")
    (tmp_path / "asked" / "a.csv").write_text("client,text,label\na,7,0\na,?,1\n")
    told = "column 'text' must be finite, got NaN or infinity in 1 rows, the first is row 1"
    with pytest.raises(UserError, match=told):
        datasets.load(str(tmp_path / "asked"))


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_marks_between_columns_are_named(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    rows = ["client label age", "ann 0 1,5", "bob 1 2,5", ""]
    path.write_text("\n".join(rows).replace(" ", mark))
    with pytest.raises(UserError, match=r"must have commas between its columns, .*, got '(;|\\t)'"):
        datasets.load(str(path))


def test_what_pandas_reads_part_by_part_is_one_column(tmp_path: Path) -> None:
    names = ["client", "y", "said", *(f"empty{number}" for number in range(2000))]
    nothing = "," * 2000  # the wider a table is, the fewer of its rows are a part
    rows = [f"{row % 2},{row % 2},{'word' if row == 2000 else row}{nothing}" for row in range(2001)]
    path = tmp_path / "wide.csv"
    path.write_text("\n".join([",".join(names), *rows, ""]))
    assert datasets.load(str(path), columns=Columns(features=("said",))).text


@pytest.mark.parametrize(
    ("labels", "names", "first"),
    [
        (["1e1", "10", "010", "2"], ("010", "10", "1e1", "2"), [2, 1, 0, 3]),
        (["01", "02", "1"], ("01", "02", "1"), [0, 1, 2]),
        (["99999999999999999999", "1"], ("1", "99999999999999999999"), [1, 0]),
        (["3", "1", "-2"], ("-2", "1", "3"), [2, 1, 0]),
        (["0", "1", " 2"], (), [0, 1, 2]),
        (["True", "True"], ("False", "True"), [1, 1]),
        (["1.50", "-2e-1", ".5", "3"], (), [1.5, -0.2, 0.5, 3.0]),
    ],
)
def test_labels_of_a_csv_file_are_numbers_where_these_say_all_of_them(
    tmp_path: Path, labels: list[str], names: tuple[str, ...], first: list[float]
) -> None:
    examples = datasets.load(written(tmp_path, ["a"] * 12, labels * (12 // len(labels))))
    assert examples.labels == names
    assert examples.y[: len(first)].tolist() == pytest.approx(first)


@pytest.mark.parametrize("nothing", ["NA", "nan", "None"])
@pytest.mark.parametrize("column", ["age", "label"])
def test_what_stands_for_no_number_among_numbers_is_told(
    tmp_path: Path, column: str, nothing: str
) -> None:
    numbers = [nothing if row == 5 else str(row + 0.5) for row in range(N)]
    path = saved(table(height=None, **{column: numbers}), tmp_path / "mine.csv")
    with pytest.raises(UserError, match=rf"'{column}' must be finite, .* the first is row 5"):
        datasets.load(path)
    words = table(height=None, label=["a", nothing] * (N // 2))
    assert set(datasets.load(saved(words, tmp_path / "b.csv")).labels) == {"a", nothing}


@pytest.mark.parametrize("ending", ["", ","])
def test_cells_belong_to_the_names_above_them(tmp_path: Path, ending: str) -> None:
    rows = [f"c{row % 2},{row % 3},{row}" for row in range(N)]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["client,label,age", *(f"{row}{ending}" for row in rows), ""]))
    found = datasets.load(str(path))
    assert (found.names, found.x.flatten().tolist()) == (("c0", "c1"), [*range(N)])
    path.write_text("\n".join(["label,age", *rows, ""]))  # as R writes it, with names of rows
    with pytest.raises(UserError, match=r"a name for each cell of a row, got 2 above longer rows"):
        datasets.load(str(path))


@pytest.mark.usefixtures("cached")
def test_ids_of_csv_files_in_a_folder_are_as_they_are_written(tmp_path: Path) -> None:
    ids, labels = ["01", "1", "NA"] * 8, ["010", "10"] * 12
    for split, rows in {"train": slice(0, 18), "test": slice(18, N)}.items():
        saved(table(client=ids, label=labels)[rows], tmp_path / f"{split}.csv")
    for _ in range(2):  # the second time from the cache
        found = datasets.load(str(tmp_path))
        assert (found.names, found.labels) == (("01", "1", "NA"), ("010", "10"))
        assert found.held_out.tolist() == [False] * 18 + [True] * 6
    (tmp_path / "more").mkdir()
    saved(table(client=ids, label=[*"12" * 12]), tmp_path / "more" / "a.csv")
    saved(table(client=ids, label=[*"1x" * 12]), tmp_path / "more" / "b.csv")
    assert datasets.load(str(tmp_path / "more")).labels == ("1", "2", "x")
    saved(table()[["client", "label", "age"]], tmp_path / "more" / "b.csv")
    with pytest.raises(UserError, match=r"b\.csv must have the columns of .*a\.csv"):
        datasets.load(str(tmp_path / "more"))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("ending", ["tsv", "csv.gz", "tsv.xz"])
def test_ids_are_as_they_are_written_whatever_a_csv_file_is_called(
    tmp_path: Path, ending: str
) -> None:
    frame = table(client=["01", "1", "NA"] * 8, label=["010", "10"] * 12)
    apart = "\t" if "tsv" in ending else ","
    frame.to_csv(tmp_path / f"mine.{ending}", index=False, sep=apart)
    found = datasets.load(str(tmp_path))
    assert (found.names, found.labels) == (("01", "1", "NA"), ("010", "10"))
    assert found.x.tolist() == torch.tensor(frame[["age", "height"]].to_numpy()).float().tolist()


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_ids_of_csv_files_that_a_readme_names_are_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    saved(table(client=["01", "1"] * 12), tmp_path / "data" / "mine.csv")
    named = "configs:\n- config_name: one\n  data_files: data/*.csv\n"
    (tmp_path / "README.md").write_text(f"---\n{named}---\n")
    assert datasets.load(str(tmp_path)).names == ("01", "1")
    (tmp_path / "README.md").write_text(f"---\n{named}  sep: ;\n---\n")
    assert hub.csv_files(tmp_path, str(tmp_path / "scratch")) == {}  # which is read as it says
    frame = table(client=["01", "1", "NA"] * 8, label=["010", "10"] * 12)
    frame.to_csv(tmp_path / "data" / "mine.csv", index=False, sep=";")
    found = datasets.load(str(tmp_path))
    assert (found.names, found.labels) == (("01", "1", "NA"), ("010", "10"))
    assert found.x.tolist() == torch.tensor(frame[["age", "height"]].to_numpy()).float().tolist()
    frame.assign(label=frame.age).to_csv(tmp_path / "data" / "mine.csv", index=False, sep=";")
    assert datasets.load(str(tmp_path)).y.tolist() == [*range(N)]
    frame.assign(client=["01", ""] * 12).to_csv(
        tmp_path / "data" / "mine.csv", index=False, sep=";"
    )
    with pytest.raises(UserError, match="'client' must have a value in every row, got none in 12"):
        datasets.load(str(tmp_path))


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_ids_of_csv_files_on_the_hub_are_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(table(client=["01", "1"] * 12, label=["010", "10"] * 12), tmp_path / "mine.csv")
    monkeypatch.setattr(hub, "reachable", lambda: False)
    for name in ("load_dataset", "load_dataset_builder"):
        opened = getattr(library, name)
        here = partial(
            lambda opened, _, *where, **how: opened(str(tmp_path), *where, **how), opened
        )
        monkeypatch.setattr(library, name, here)
    found = datasets.load("some/where")
    assert (found.names, found.labels) == (("01", "1"), ("010", "10"))


@pytest.mark.usefixtures("cached")
def test_csv_files_in_archives_are_refused_as_their_ids_would_be_guessed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("mine.csv", table(client=["01", "1"] * 12).to_csv(index=False))
    with pytest.raises(UserError, match=r"must not be in archives, .* got data\.zip; unpack it"):
        datasets.load(str(tmp_path))
