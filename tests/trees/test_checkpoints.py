"""Checkpoints come back bit for bit, or not at all."""

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch

from hyperfed.errors import UserError
from hyperfed.trees.checkpoints import load_latest, load_state, previous, save_latest, save_state


@pytest.fixture
def tree():
    torch.manual_seed(0)
    shared = torch.randn(2, 3)
    return {
        "server": {"fc.weight": torch.randn(4, 3, dtype=torch.float64), "fc.bias": torch.randn(4)},
        "memory": {"10": {"a/b": shared[0], "a%2Fb": shared[1]}, "9": {}, "": {"": shared}},
        "nothing": {},
        "last": {
            "step": torch.tensor(7),
            "none": torch.empty(0, 3),
            "half": torch.randn(3).bfloat16(),
            "mask": torch.tensor([True, False]),
            "nan": torch.tensor([math.nan, -0.0, math.inf]),
            "turned": torch.randn(3, 2).T,
            "volumes": torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
            "images": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "none of them": torch.randn(0, 3).T,
            "row of a table": torch.randn(4, 100)[:1, :5],
            "one of several": torch.tensor([1.0]).expand(1, 1).as_strided((1, 1), (0, 1)),
            "grey": torch.randn(2, 1, 3, 3).as_strided((2, 1, 3, 3), (9, 1, 3, 1)),
        },
    }


def same(a, b):
    """Tells whether trees agree in order, nesting, types, memory formats and every bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    told = [(t.dtype, t.shape, t.clone().stride()) for t in (a, b)]
    return told[0] == told[1] and bits[0].equal(bits[1])


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, tree):
    meta = {"round": 7, "best": None, "lr": 0.1, "lost": [[3, "late / größer"]], "bytes": {"up": 1}}
    save_state(tmp_path / "state", tree, meta)
    found, said = load_state(tmp_path / "state")
    assert same(found, tree)
    assert said == meta


def test_an_empty_tree_is_a_tree(tmp_path):
    save_state(tmp_path / "state", {}, {})
    assert load_state(tmp_path / "state") == ({}, {})


def test_what_is_saved_is_cut_off_from_the_autograd_graph(tmp_path):
    weight = torch.ones(2, requires_grad=True)
    save_state(tmp_path / "state", {"w": weight * 2}, {})
    found, _ = load_state(tmp_path / "state")
    assert not found["w"].requires_grad
    assert found["w"].equal(torch.tensor([2.0, 2.0]))


def test_a_loaded_checkpoint_outlives_its_file(tmp_path):
    save_state(tmp_path / "state", {"w": torch.ones(1000)}, {})
    found, _ = load_state(tmp_path / "state")
    (tmp_path / "state").write_bytes(b"")
    assert found["w"].sum() == 1000


def test_other_programs_read_the_tensors_by_their_path(tmp_path, tree):
    save_state(tmp_path / "state", tree, {})
    found = safetensors.torch.load_file(tmp_path / "state")
    assert found["server/fc.weight"].equal(tree["server"]["fc.weight"])
    assert found["memory/10/a%2Fb"].equal(tree["memory"]["10"]["a/b"])


def test_a_number_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_state(tmp_path / "state", {}, {"loss": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_the_latest_two_are_kept_and_neither_is_poisoned(tmp_path):
    path = tmp_path / "state.safetensors"
    for value in (1.0, 2.0, 3.0):
        save_latest(path, {"w": torch.tensor([value])}, {"value": value})
    assert sorted(tmp_path.iterdir()) == sorted([path, previous(path)])
    assert [load_state(each)[1]["value"] for each in (previous(path), path)] == [2.0, 3.0]
    with pytest.raises(ValueError, match="finite numbers alone"):
        save_latest(path, {"a": {"w": torch.tensor([1.0, torch.inf])}}, {"value": 4.0})
    assert load_latest(path)[1]["value"] == 3.0


def test_a_disk_that_refuses_the_new_one_leaves_the_one_that_was_gone_on_from(
    tmp_path, monkeypatch
):
    path = tmp_path / "state.safetensors"
    for value in (1.0, 2.0):
        save_latest(path, {"w": torch.tensor([value])}, {"value": value})
    path.write_bytes(b"torn")
    _, meta, newest = load_latest(path)
    assert (meta["value"], newest) == (1.0, False)

    def refuse(self, target):
        if self.name == "state-next.safetensors":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UserError, match="No space left"):
        save_latest(path, {}, {"value": 3.0}, keep_newest=newest)
    assert load_latest(path)[1]["value"] == 1.0
    monkeypatch.undo()
    save_latest(path, {}, {"value": 3.0}, keep_newest=newest)
    assert [load_state(each)[1]["value"] for each in (previous(path), path)] == [1.0, 3.0]


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UserError, match="there must be a checkpoint"):
        load_state(tmp_path / "state")


def test_a_foreign_checkpoint(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "state", {"format": "pt"})
    with pytest.raises(UserError, match="another program wrote it"):
        load_state(tmp_path / "state")


@pytest.mark.parametrize("header", ["{not json", "[]", "{}", "3"])
def test_a_damaged_header(tmp_path, header):
    safetensors.torch.save_file({}, tmp_path / "state", {"hyperfed": header})
    with pytest.raises(UserError, match="damaged header"):
        load_state(tmp_path / "state")


def test_a_checkpoint_of_another_version(tmp_path):
    header = json.dumps({"format": "hyperfed-checkpoint-9", "digest": ""})
    safetensors.torch.save_file({}, tmp_path / "state", {"hyperfed": header})
    with pytest.raises(UserError, match="must have the format hyperfed-checkpoint-1, but has"):
        load_state(tmp_path / "state")


@pytest.mark.parametrize("size", [0, 4, 100, 1000, -1])
def test_a_truncated_checkpoint(tmp_path, tree, size):
    path = tmp_path / "state"
    save_state(path, tree, {})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="is damaged or not a checkpoint"):
        load_state(path)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "state"
    save_state(path, {"w": torch.zeros(100)}, {"round": 5})
    whole = path.read_bytes()
    path.write_bytes(whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:])
    with pytest.raises(UserError, match="not what was written"):
        load_state(path)
    path.write_bytes(whole.replace(b'\\"round\\": 5', b'\\"round\\": 6'))
    assert path.read_bytes() != whole
    with pytest.raises(UserError, match="not what was written"):
        load_state(path)
