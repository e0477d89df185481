"""Networks in files of your own."""

import sys
from pathlib import Path

import pytest
import torch

from hyperfed.data import model_files
from hyperfed.data.own import from_frame
from hyperfed.data.roster import Frame
from hyperfed.data.tasks import TaskConfig, build, targets_of
from hyperfed.errors import UserError
from own_data import SENSORS, config, saved, table
from sensors import NETS

# A network in a file.


def test_a_network_of_a_file_is_made_from_the_seed_with_the_options_that_are_given(
    sensors: str,
) -> None:
    settings = {"name": sensors, "model": f"{NETS}:SensorNet", **SENSORS}
    first, again, other = (build(TaskConfig(**settings), seed).models["base"] for seed in (0, 0, 1))
    weights = [net.get_parameter("classify.weight") for net in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    wide = build(TaskConfig(**settings, widths=(2, 5)), 0).models
    assert [net.get_parameter("classify.weight").shape[1] for net in wide.values()] == [2, 5]


@pytest.mark.parametrize(
    ("code", "name", "told"),
    [
        ("from torch import nn\nnet = nn.Linear(2, 3)", "net", None),
        ("from torch import nn\ndef net(): return nn.Linear(2, 3)", "net", None),
        ("net = 3", "net", "must name a network, or what makes one, in .*net.py, got 'net'; give"),
        ("", "net", "must name a network, or what makes one"),
        ("def net(): return 3", "net", "must make an nn.Module, but .*net.py:net makes 3; mend it"),
        (
            "def net(a): return a",
            "net",
            "called with nothing, but .* fails .TypeError: .*; mend it",
        ),
        ("import nothing_of_that_name", "net", "must run as Python, but fails .ModuleNotFound"),
        (
            "from torch import nn\nnet = nn.Linear(2, 2)",
            "net",
            "net does not suit .*\n.* 3 outputs",
        ),
        ("from torch import nn\nnet = nn.Linear(5, 3)", "net", "but fails on it .RuntimeError"),
    ],
)
def test_networks_of_files(tmp_path: Path, code: str, name: str, told: str | None) -> None:
    (tmp_path / "net.py").write_text(code)
    settings = config(saved(table(), tmp_path / "mine.csv"), model=f"{tmp_path / 'net.py'}:{name}")
    if told is None:
        assert build(settings, 0).models["base"](torch.ones(1, 2)).shape == (1, 3)
        # Where it stayed, its classes would be sent to another process as what is installed there.
        assert "hyperfed_model_net" not in sys.modules
    else:
        with pytest.raises(UserError, match=told):
            build(settings, 0)


@pytest.mark.parametrize(
    "net",
    [
        "nn.Sequential(nn.Linear(2, 4).bfloat16().requires_grad_(False), nn.Linear(4, 3))",
        "nn.Linear(2, 3).double()",
    ],
    ids=["frozen in half precision", "double"],
)
def test_a_network_of_a_file_has_its_own_precision_as_from_python(tmp_path: Path, net: str) -> None:
    (tmp_path / "net.py").write_text(f"from torch import nn\ndef make(): return {net}")
    path = saved(table(), tmp_path / "mine.csv")
    name = f"{tmp_path / 'net.py'}:make"
    ours = build(config(path, model=name), 0)
    theirs = from_frame(table(), model=lambda: model_files.make(name, {}))
    assert ours.x.dtype == theirs.x.dtype
    here, there = (task.models["base"].eval()(task.x) for task in (ours, theirs))
    torch.testing.assert_close(here, there)


def test_what_is_frozen_in_a_network_of_a_file_belongs_to_the_task(tmp_path: Path) -> None:
    """A run must not be resumed on another backbone."""
    path, net = saved(table(), tmp_path / "mine.csv"), tmp_path / "net.py"
    layers = "nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))"
    code = f"from torch import nn\ndef make():\n    net = {layers}"
    seen = []
    for frozen, scale in ((True, 1), (True, 1), (True, 2), (False, 1), (False, 2)):
        net.write_text(
            f"{code}\n    net[0].weight.data *= {scale}\n"
            f"    net[0].requires_grad_({not frozen})\n    return net"
        )
        seen.append(build(config(path, model=f"{net}:make"), 0).fingerprint)
    first, again, other, trained, others = seen
    assert first == again
    assert trained == others
    assert len({first, other, trained}) == 3


def test_a_file_that_is_not_there_and_a_servers_file_at_a_site_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"FILE.py:NAME, but there is no .*none.py"):
        model_files.make(f"{tmp_path / 'none.py'}:net", {})
    frame = Frame(known=2, novel=0, shape=(9, 128), dtype="torch.float32", classes=6)
    with pytest.raises(UserError, match="the name of a target where clients are at sites, got"):
        targets_of(TaskConfig(model=f"{NETS}:SensorNet"), frame, 0)
