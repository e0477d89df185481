"""What is packed comes out as it was, down to how it lies in memory."""

import pickle

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.system.devices import CPU
from hyperfed.trees.packing import laid_out, moved, pack, unpack
from pretended import DEVICE, NAME

IMAGES = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
LEAVES = {
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4, dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "half": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "complex": torch.tensor([1 + 2j]),
    "not finite": torch.tensor([torch.nan, -torch.inf]),
    "channels last": IMAGES.contiguous(memory_format=torch.channels_last),
    "transposed": IMAGES[0, 0].T,
    "part of another": IMAGES[:, 1, ::2],
    "one for all": torch.tensor([1.0, 2.0]).expand(3, 2),
    "one by one": torch.ones(4, 3, 1, 1).contiguous(memory_format=torch.channels_last),
    "one channel last": torch.randn(2, 1, 3, 3).as_strided((2, 1, 3, 3), (9, 1, 3, 1)),
    "part of a graph": torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_tensor_comes_out_with_its_bits_and_its_layout(name: str) -> None:
    leaf = LEAVES[name]
    (came,) = unpack(pickle.loads(pickle.dumps(pack({"leaf": leaf}), protocol=5))).values()
    assert isinstance(came, Tensor)
    assert came.dtype == leaf.dtype
    assert not came.requires_grad
    torch.testing.assert_close(came, leaf.detach(), rtol=0, atol=0, equal_nan=True)
    assert came.stride() == leaf.clone().stride()


@pytest.mark.parametrize(
    "strides", [(1, 1), (3, 1), (2, 2), (0, 1), (-1, 1), (1, 10**12), (1,), (1, 2, 1)]
)
def test_no_tensor_has_strides_that_overlap_or_leave_gaps(strides: tuple[int, ...]) -> None:
    """As a damaged file may say."""
    with pytest.raises(ValueError, match=r"are no strides of|zip\(\)"):
        laid_out(torch.ones(2, 2), strides)
    assert laid_out(torch.ones(2, 2), (1, 2)).stride() == (1, 2)


def test_a_tree_keeps_its_names_and_empty_branches() -> None:
    tree = {"b": {"x": torch.ones(2), "none": {}}, "a": torch.zeros(1)}
    came = unpack(pack(tree))
    assert trees.structure(came) == trees.structure(tree)
    assert came["b"]["none"] == {}


def test_what_is_packed_is_not_copied() -> None:
    """Processes of one machine share what one of them has put into the object store."""
    leaf = torch.zeros(3)
    came = unpack(pack({"leaf": leaf}))["leaf"]
    assert came.data_ptr() == leaf.data_ptr()


def test_what_moves_to_a_device_and_back_has_its_bits_and_its_layout() -> None:
    there = moved(LEAVES, DEVICE)
    assert {leaf.device for leaf in there.values()} == {DEVICE}
    back = moved(there, CPU)
    assert list(back) == list(LEAVES)
    for name, leaf in LEAVES.items():
        came = back[name]
        assert came.dtype == leaf.dtype
        torch.testing.assert_close(came, leaf.detach(), rtol=0, atol=0, equal_nan=True)
        assert came.stride() == leaf.clone().stride()


def test_what_moves_is_one_tensor_for_each_dtype_and_begins_at_whole_lines() -> None:
    tree = {"a": torch.ones(3), "b": {"c": torch.ones(70), "count": torch.tensor(2), "none": {}}}
    back = moved(moved(tree, DEVICE), CPU)
    assert trees.structure(back) == trees.structure(tree)
    first, other, count = (leaf for _, leaf in trees.leaves(back))
    assert first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != count.untyped_storage().data_ptr()
    assert (first.storage_offset(), other.storage_offset()) == (0, 64)


def test_what_is_there_already_is_the_same() -> None:
    leaf = torch.ones(2)
    assert moved({"leaf": leaf}, CPU)["leaf"] is leaf
    there = moved({"leaf": leaf}, DEVICE)
    assert moved(there, torch.device(NAME))["leaf"] is there["leaf"]  # the same, without its number
