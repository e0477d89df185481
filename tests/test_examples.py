"""The example and the benchmarks run from end to end, with few rounds and tiny sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

import bench_robust
import hyperfed

ROOT = Path(__file__).parents[1]

EXAMPLE_METHODS = ("local", "fedavg", "fedper", "pfedhn", "pefll")
EXAMPLE = """
import runpy
import sys

runpy.run_path(sys.argv[1])["main"](rounds=2)
"""


def run(folder: Path, *arguments: str) -> str:
    """Runs Python in ``folder`` and returns what it printed."""
    # What pytest-xdist tells its workers would disable the benchmarks of a pytest below one.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    environment = {**inherited, "PYTHONPATH": str(Path(hyperfed.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_trains_compares_serves_a_newcomer_and_says_where_everything_is(
    tmp_path: Path,
) -> None:
    said = run(tmp_path, "-c", EXAMPLE, str(ROOT / "examples" / "digits.py"))
    last = dict(line.split() for line in said.rpartition("on disk:")[2].split("\n") if line)
    methods = (*EXAMPLE_METHODS, "headstart")
    assert list(last) == [*methods, "figure", "model"]
    assert all((tmp_path / path).exists() for path in last.values())
    for method in methods:
        summary = json.loads((tmp_path / last[method] / "summary.json").read_text())
        assert summary["rounds"] == 2
        row = next(line for line in said.splitlines() if line.startswith(f"{method} "))
        assert f"{100 * summary['test_accuracy']:.1f}" in row
    assert (tmp_path / last["figure"]).read_bytes().startswith(b"\x89PNG")
    model = safetensors.torch.load_file(tmp_path / last["model"])
    assert {name: tuple(value.shape) for name, value in model.items()} == {
        "layers.0.weight": (50, 64),
        "layers.0.bias": (50,),
        "layers.1.weight": (10, 50),
        "layers.1.bias": (10,),
    }
    assert re.search(r"by headstart in +\d+ ms +\d+\.\d%", said)


ADAPTERS = """
import runpy
import sys

runpy.run_path(sys.argv[1])["main"](rounds=1, epochs=1)
"""


@pytest.mark.slow
def test_the_adapters_are_trained_by_every_method_and_one_is_handed_out(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install -e '.[peft]'")
    said = run(tmp_path, "-c", ADAPTERS, str(ROOT / "examples" / "adapters.py"))
    whole, own = map(int, re.findall(r"Of (\d+) numbers of the network (\d+)", said)[0])
    assert own < whole / 5
    for method in EXAMPLE_METHODS:
        (file,) = tmp_path.glob(f"runs/adapters/{method}/*/summary.json")
        summary = json.loads(file.read_text())
        row = next(line for line in said.splitlines() if line.startswith(f"{method} "))
        assert f"{100 * summary['test_accuracy']:.1f}" in row
        if method == "fedavg":
            assert summary["bytes_down"] == summary["bytes_up"] == 10 * 4 * own
    folder = tmp_path / said.split()[-1]
    assert "adapter of client 0 " in said
    assert peft.LoraConfig.from_pretrained(str(folder)).r == 4
    written = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in written.values()) == own


@pytest.mark.slow
def test_the_benchmarks_run_and_record_what_they_measured(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ("-q", "-p", "no:cacheprovider", "--tiny", f"--benchmark-json={record}")
    names = ("round", "profile", "scale", "device", "methods", "robust")
    files = [f"benchmarks/bench_{name}.py" for name in names]
    # One case of each, as each takes seconds, and of rounds also that of one client.
    only = "pefll and not test_what_trust_costs or bench_round or ditto or digits-fedavg"
    said = run(ROOT, "-m", "pytest", *files, *options, "-k", only)
    assert "round / textbook loop" in said
    found = {b["name"]: b["extra_info"] for b in json.loads(record.read_text())["benchmarks"]}
    for method in ("pfedhn", "pefll"):
        assert set(found[f"test_round[{method}]"]["median_of_ratios"]) == {
            "round / local steps",
            "round / textbook",
            "round / textbook here",
            "round / same network",
            "round / products",
        }
    shares = found["test_shares[pefll]"]
    assert sum(shares["share"].values()) == pytest.approx(1)
    assert 0 < shares["around networks"] < 1
    assert found["test_clients[pefll]"]["40"]["mebibytes"] > 0
    assert "loop / vmap" in found["test_device[pefll]"]["median_of_ratios"]
    for method in ("ditto", "pefll"):
        assert found[f"test_method[{method}]"]["median_of_ratios"].keys() == {
            "bare loop / loop",
            "bare loop / vmap",
        }
    assert found["test_method[ditto]"]["bytes"]["up"] > 0
    costs = found["test_what_trust_costs[digits-fedavg]"]["share_of_a_round"]
    assert costs.keys() == bench_robust.PARTS.keys()
    assert "evaluation / textbook" in found["test_evaluation"]["median_of_ratios"]
    assert all(len(s) == 2 for s in found["test_round[pfedhn]"]["seconds"].values())
