"""What a run leaves on disk: aggregates over clients, folders, metrics that survive a kill."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from hyperfed.errors import UserError
from hyperfed.runs import records
from hyperfed.runs.folder import RunFolder, find_runs, read_run
from hyperfed.runs.measures import worst_decile
from hyperfed.runs.records import Evaluation, Lost

NOW = datetime(2026, 2, 3, 4, 5, 6)


def evaluation(round=1, **changes):
    counts = {
        "round": round,
        "split": "val",
        "clients": [0, 1],
        "count": [2, 3],
        "correct": [1.0, 3.0],
        "loss": [0.5, 0.3],
        "masked_correct": [2.0, 3.0],
        "zeroed_correct": [2.0, 3.0],
        "bytes_down": 10,
        "bytes_up": 20,
        "seconds": 0.1,
    }
    return records.summarise(**counts | changes)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "pfedhn", 3, NOW)


# Aggregates, against NumPy on the examples themselves.


@pytest.fixture
def examples():
    """23 clients' hits and losses, example by example; one client has no examples."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 40, size=23)
    sizes[4] = 0
    return [(draw.random(n) < draw.random(), draw.exponential(size=n)) for n in sizes]


def test_aggregates_are_those_of_the_examples(examples):
    found = evaluation(
        clients=range(23),
        count=[len(hits) for hits, _ in examples],
        correct=[float(hits.sum()) for hits, _ in examples],
        loss=[float(losses.sum()) for _, losses in examples],
        masked_correct=[float(len(hits)) for hits, _ in examples],
        zeroed_correct=[0.0 for _ in examples[:-1]] + [1.0],
    )
    pooled_hits = np.concatenate([hits for hits, _ in examples])
    pooled_losses = np.concatenate([losses for _, losses in examples])
    rates = np.array([hits.mean() for hits, _ in examples if len(hits)])
    assert found.accuracy == pytest.approx(pooled_hits.mean(), rel=1e-14)
    assert found.loss == pytest.approx(pooled_losses.mean(), rel=1e-14)
    assert found.masked_accuracy == 1.0
    assert found.zeroed_accuracy == pytest.approx(1 / len(pooled_hits), rel=1e-14)
    of_last = 1 / len(examples[-1][0])
    assert found.client_zeroed_accuracy == (*[0.0] * 4, None, *[0.0] * 17, of_last)
    assert found.accuracy_client_mean == pytest.approx(rates.mean(), rel=1e-14)
    assert found.accuracy_client_std == pytest.approx(rates.std(), rel=1e-14)
    assert found.worst_decile_accuracy == pytest.approx(np.sort(rates)[:2].mean(), rel=1e-14)
    assert found.client_accuracy[3] == pytest.approx(examples[3][0].mean(), rel=1e-14)
    assert found.client_accuracy[4] is found.client_loss[4] is None
    assert found.client_accuracy[5] == pytest.approx(examples[5][0].mean(), rel=1e-14)


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (19, 1), (20, 2), (100, 10)])
def test_the_worst_decile_is_a_tenth_rounded_down_but_at_least_one(clients, worst):
    values = list(np.random.default_rng(1).permutation(clients) / clients)
    assert worst_decile(values) == pytest.approx((worst - 1) / 2 / clients)


def test_nobody_has_no_aggregates():
    found = evaluation(
        clients=[7],
        count=[0],
        correct=[0.0],
        loss=[0.0],
        masked_correct=[0.0],
        zeroed_correct=[0.0],
    )
    assert found.accuracy is found.loss is found.accuracy_client_mean is None
    assert found.accuracy_client_std is found.worst_decile_accuracy is None


def test_a_diverged_client_is_not_left_out_of_the_mean():
    found = evaluation(loss=[math.nan, 0.3])
    assert found.client_loss[0] is None
    assert found.client_loss[1] == pytest.approx(0.1)
    assert found.loss is None  # a mean of the others would hide it


# Folders.


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    paths = [RunFolder.create(tmp_path, "pfedhn", 3, NOW).path for _ in range(3)]
    first = tmp_path / "pfedhn" / "20260203-040506-seed3"
    assert paths == [first, Path(f"{first}-2"), Path(f"{first}-3")]
    assert all((path / "checkpoint").is_dir() for path in paths)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "pfedhn").write_text("a file, not a folder")
    with pytest.raises(UserError, match="must be writable"):
        RunFolder.create(tmp_path, "pfedhn", 3, NOW)


def test_metrics_come_back_as_they_went(folder):
    lost = (Lost(4, "timed out after 5 s"), Lost(5, "NaN in 'fc.weight'"))
    written = [evaluation(1), evaluation(2, lost=lost, loss=[math.inf, 0.1], seconds=1 / 3)]
    for one in written:
        folder.append(one)
    assert folder.evaluations() == written
    lines = folder.metrics.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    assert json.loads(lines[1])["lost"][0] == {"client": 4, "reason": "timed out after 5 s"}
    assert json.loads(lines[1])["client_loss"][0] is None


@pytest.mark.parametrize("kind", ["accuracy", "loss", "masked_accuracy", "zeroed_accuracy"])
def test_a_line_that_has_no_number_of_a_client_is_told(kind):
    told = records.as_written(evaluation())
    assert records.from_line(json.dumps(told).encode()) == evaluation()
    with pytest.raises(ValueError, match="each client must have one number of each kind"):
        records.from_line(json.dumps(told | {f"client_{kind}": [0.5]}).encode())
    del told["client_zeroed_accuracy"]  # as of before it was told
    assert records.from_line(json.dumps(told).encode()).client_zeroed_accuracy == ()


def test_diagnostics_are_numbers_of_four_digits_and_come_back_as_they_went(folder):
    tree = {"of": {"some": torch.tensor([[0.123456, math.nan], [1.0, -math.inf]])}}
    told = records.plain(tree | {"count": torch.tensor(123456)})
    assert told == {"of": {"some": [[0.1235, None], [1.0, None]]}, "count": 123456}
    written = replace(evaluation(1), diagnostics=told)
    folder.append(written)
    assert folder.evaluations() == [written] != [evaluation(1)]
    assert hash(written) == hash(evaluation(1))


def test_a_line_that_a_kill_cut_short_is_dropped(folder):
    folder.append(evaluation(1))
    folder.append(evaluation(2))
    whole = folder.metrics.read_bytes()
    folder.metrics.write_bytes(whole[:-20])
    assert [e.round for e in folder.evaluations()] == [1]
    folder.truncate_after(2)
    folder.append(evaluation(2))
    assert folder.metrics.read_bytes() == whole


def test_truncating_drops_later_rounds_only(folder):
    folder.truncate_after(0)  # killed before the first evaluation
    assert folder.evaluations() == []
    for rounds in (1, 2, 2, 3):
        folder.append(evaluation(rounds))
    folder.truncate_after(2)
    assert [e.round for e in folder.evaluations()] == [1, 2, 2]


def test_a_damaged_line_is_named(folder):
    folder.append(evaluation(1))
    with folder.metrics.open("a") as file:
        file.write('{"round": "two"}\n')
    folder.append(evaluation(3))
    with pytest.raises(UserError, match=r"line 2 is not: .*two"):
        folder.evaluations()


@pytest.mark.parametrize("name", ["seconds", "loss", "client_loss", "client_zeroed_accuracy"])
def test_a_number_that_is_not_finite_is_damage(name):
    found = records.as_written(evaluation())
    found[name] = ["-", 0.5] if isinstance(found[name], list) else "-"
    for number in ("NaN", "Infinity", "-1e999"):
        with pytest.raises(ValueError, match="finite number"):
            records.from_line(json.dumps(found).replace('"-"', number).encode())


def test_a_run_is_read_back(folder):
    folder.config.write_text('seed = 3\n[method]\nname = "pfedhn"\n')
    folder.append(evaluation(1))
    assert read_run(folder.path).summary is None
    folder.write_summary({"test_accuracy": 0.5, "gap": math.nan, "all": [math.inf, (1, 2)]})
    found = read_run(folder.path)
    assert found.config == {"seed": 3, "method": {"name": "pfedhn"}}
    assert found.evaluations == (evaluation(1),)
    assert found.summary == {"test_accuracy": 0.5, "gap": None, "all": [None, [1, 2]]}
    assert "NaN" not in folder.summary.read_text()
    assert find_runs(folder.path.parents[1]) == [folder.path]


def test_what_is_not_a_run_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"config\.toml must be a readable file"):
        read_run(tmp_path)
    folder.config.write_text("")
    folder.summary.write_text("{half a su")
    with pytest.raises(UserError, match="JSON summary"):
        read_run(folder.path)


FULL_DISK = """
import resource, sys
from pathlib import Path
from hyperfed.errors import UserError
from hyperfed.system.files import atomic_write
from hyperfed.runs.folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
(evaluation,) = folder.evaluations()
limit = folder.metrics.stat().st_size + 10
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for write in (
    lambda: atomic_write(folder.summary, bytes(limit + 1)),
    lambda: folder.append(evaluation),
):
    try:
        write()
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_every_file_as_it_was(folder):
    pytest.importorskip("resource")  # a limit on file sizes stands in for the disk
    folder.append(evaluation(1))
    folder.write_summary({"rounds": 1})
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder.path)],
        capture_output=True,
        text=True,
        check=True,
    )
    summary, metrics = done.stdout.splitlines()
    assert summary.startswith(f"{folder.summary} must be writable, but: File too large")
    assert metrics.startswith(f"{folder.metrics} must be writable, but: ")
    after = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    assert after == before


def test_an_evaluation_is_a_plain_value():
    assert evaluation() == evaluation()
    assert isinstance(evaluation(), Evaluation)
    assert hash(evaluation()) == hash(evaluation())


def test_what_counts_among_few_classes_is_over_examples_too():
    found = records.summarise(
        round=1,
        split="val",
        clients=[0, 1],
        count=[2, 8],
        correct=[1.0, 1.0],
        loss=[0.0, 0.0],
        masked_correct=[2.0, 0.0],
        zeroed_correct=[0.0, 8.0],
        bytes_down=0,
        bytes_up=0,
        seconds=0.0,
    )
    assert (found.masked_accuracy, found.zeroed_accuracy) == (0.2, 0.8)
