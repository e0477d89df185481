"""Networks of ``transformers`` and ``peft`` as targets: tensors in, tensors out."""

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.system.files import atomic_folder

HALF = {torch.float16, torch.bfloat16}


def with_plain_output(net: nn.Module) -> nn.Module:
    """Makes a model of ``transformers``, also inside one of ``peft``, return its logits alone.

    Its padding, where its configuration says which token that is, is masked. Any other network
    stays as it is.

    Args:
        net: changed in place: it gets hooks, which copies of it have too.
    """
    whole: Any = net
    core = whole.get_base_model() if is_peft(net) else whole
    if not _is_a(core, "transformers", "PreTrainedModel"):
        return net
    net.register_forward_hook(_logits)
    padding = core.config.pad_token_id
    if padding is not None and "attention_mask" in inspect.signature(core.forward).parameters:
        masked = partial(_with_mask, padding=padding)
        net.register_forward_pre_hook(masked, with_kwargs=True)
    return net


def compute_in_own_precision(net: nn.Module) -> nn.Module:
    """Lets parts that are frozen in half precision stand beside others of a higher one.

    Each layer takes its inputs in the precision of its weights, and the network gives its output in
    that of what is trained. Where nothing frozen is of half precision, nothing changes.

    Args:
        net: changed in place: it gets hooks, which copies of it have too.
    """
    trained = [value.dtype for value in trees.parameters_of(net).values()]
    half = {value.dtype for value in trees.frozen_of(net).values()} & HALF - {*trained}
    if not half or not trained:
        return net
    for part in net.modules():
        if any(value.is_floating_point() for value in part.parameters(recurse=False)):
            part.register_forward_pre_hook(_in_own_precision)
    net.register_forward_hook(partial(_raised, dtype=trained[0]))
    return net


def is_peft(net: nn.Module) -> bool:
    """Returns whether a network is a model of ``peft``."""
    return _is_a(net, "peft", "PeftModel")


def save_adapter(net: nn.Module, folder: Path) -> None:
    """Writes the adapter of a model of ``peft`` as its own folder, for ``from_pretrained``.

    Args:
        net: the model, which stays as it is.
        folder: to be made; all of it is written, or nothing.

    Raises:
        UserError: no model of ``peft``, something beside its adapter is trained, or the folder is
            there already.
    """
    if not is_peft(net):
        raise UserError(
            "a model to save as an adapter must be one of peft, got a "
            f"{type(net).__name__}; make the target with peft.get_peft_model"
        )
    if folder.exists():
        raise UserError(f"an adapter's folder must be new, but {folder} is there; choose another")
    from peft import get_peft_model_state_dict

    model: Any = net
    kept = {tensor.data_ptr() for tensor in get_peft_model_state_dict(model).values()}
    moving = trees.entries_of(net).items()
    if beside := [name for name, tensor in moving if tensor.data_ptr() not in kept]:
        raise UserError(
            f"an adapter must hold all that is trained, but {beside[0]} is not in it; freeze it, "
            "or name it in the adapter's modules_to_save"
        )
    atomic_folder(folder, lambda written: model.save_pretrained(str(written)))


def _logits(net: nn.Module, inputs: Any, output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output.logits
    return tensor


def _with_mask(
    net: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], *, padding: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Adds which tokens are none, where only tokens came."""
    if len(inputs) != 1 or named or inputs[0].is_floating_point():
        return None
    return inputs, {"attention_mask": (inputs[0] != padding).long()}


def _in_own_precision(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    floats = (value.dtype for value in part.parameters(recurse=False) if value.is_floating_point())
    dtype = next(floats)
    return tuple(value.to(dtype) if _is_float(value) else value for value in inputs)


def _raised(net: nn.Module, inputs: Any, output: Any, *, dtype: torch.dtype) -> Any:
    return output.to(dtype) if _is_float(output) else output


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_a(net: nn.Module, package: str, name: str) -> bool:
    """Whether a network is of a class of a package, which is imported wherever one exists."""
    kind = getattr(sys.modules.get(package), name, None)
    return isinstance(kind, type) and isinstance(net, kind)
