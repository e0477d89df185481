"""A device that pretends to be another one: tensors on it compute on the CPU.

What an accelerator does not do it does not do either: compute with a tensor that lies elsewhere
(but for single numbers, and for rows to take), hand its memory to NumPy, or draw from a generator
of the CPU. So what forgets to move a tensor fails here as it would there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"

_aten = torch.ops.aten
_TAKES_ROWS = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


class Pretended(Tensor):
    """A tensor on the device; it holds the one of the CPU that computes."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.held!r})"

    def tolist(self) -> Any:
        """Returns the numbers, as any tensor does; PyTorch refuses it to subclasses."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Computes on the CPU what is computed on the device."""
        kwargs = kwargs or {}
        _check_devices(function, args, kwargs)
        output = function(*_each(_held, args), **_each(_held, kwargs))
        if function is _aten.copy_.default and not isinstance(args[0], Pretended):
            return args[0]
        to = kwargs.get("device")
        if to is not None and to.type == "cpu":
            return output
        wrapped = _each(lambda leaf: Pretended(leaf) if type(leaf) is Tensor else leaf, output)
        return return_and_correct_aliasing(function, args, kwargs, wrapped)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Changes what is in the lists of an operation; a tree of PyTorch's takes much longer."""
    if type(value) in (list, tuple):
        return type(value)([_each(change, each) for each in value])
    if type(value) is dict:
        return {key: _each(change, each) for key, each in value.items()}
    return change(value)


def _check_devices(function: Any, *arguments: Any) -> None:
    leaves: list[Any] = []
    _each(leaves.append, arguments)
    elsewhere = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
    copies = function is _aten.copy_.default
    if function not in _TAKES_ROWS and not copies and any(leaf.dim() for leaf in elsewhere):
        raise RuntimeError(f"{function} needs all tensors on {NAME}, but some are on cpu")
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise RuntimeError(f"{function} needs a generator of {NAME}, but has one of cpu")


def _held(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, Pretended) else value


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> Tensor:
    layout = memory_format or torch.contiguous_format
    return Pretended(torch.empty(list(size), dtype=dtype, memory_format=layout))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return Pretended(torch.empty_strided(list(size), list(stride), dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _held(target).copy_(_held(source))
    return target


_setup_privateuseone_for_python_backend(NAME)  # type: ignore[no-untyped-call]
DEVICE = torch.device(NAME, 0)

_kernels = library.Library("aten", "IMPL")
_made_of_nothing: dict[str, Callable[..., Tensor]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
}
for _name, _kernel in _made_of_nothing.items():
    _kernels.impl(_name, _kernel, "PrivateUse1")


# It has to be there before the first gradient of a process, and so while other tests run. They are
# told that there is none: seeds would be queued for it with the stack of each call.
_current_accelerator = torch.accelerator.current_accelerator
torch.accelerator.current_accelerator = lambda *_, **__: None  # type: ignore[assignment]


@contextmanager
def present() -> Iterator[None]:
    """Has PyTorch say that the device is there, and ``Module.to`` keep its parameters.

    Only subclasses of Tensor have to ask for the latter.
    """
    hidden = torch.accelerator.current_accelerator
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.accelerator.current_accelerator = _current_accelerator
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
        torch.accelerator.current_accelerator = hidden
