"""Where tensors live: on the CPU, or on an accelerator."""

from contextlib import AbstractContextManager, nullcontext

import torch

from hyperfed.errors import UserError

CPU = torch.device("cpu")


def is_here(name: str) -> bool:
    """Returns whether there is a device of a name that PyTorch can use."""
    try:
        device = torch.device(name)
        accelerator = None if device.type == "cpu" else torch.get_device_module(device)
        return accelerator is None or (device.index or 0) < accelerator.device_count()
    except RuntimeError:
        return False


def is_cpu(name: str) -> bool:
    """Returns whether a device's name is one of the CPU, "cpu" or "cpu:0"."""
    return name.partition(":")[0] == CPU.type


def find_device(name: str) -> torch.device:
    """Returns a device by its name, such as "cpu", "cuda" or "cuda:1".

    Raises:
        UserError: there is none of that name, or PyTorch cannot use it, or it has no float64.
    """
    if not is_here(name):
        raise UserError(
            f"device must be one that PyTorch {torch.__version__} can use here, came {name}; take "
            "device=cpu, or install the PyTorch that is built for the accelerator"
        )
    device = torch.device(name)
    try:
        if device.type not in ("cpu", "cuda"):  # and wakes none of these two
            torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError) as error:  # such as Apple's
        raise UserError(
            "device must have float64, in which weights of clients and sums over examples are, but "
            f"{name} has none ({error}); take device=cpu"
        ) from error
    return device


def describe(device: torch.device) -> str:
    """Returns the name of a device and, of a GPU, its maker's."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def in_full(device: torch.device) -> AbstractContextManager[object]:
    """Returns a block in which products are of their factors' precision, within autocast, too."""
    kind = device.type
    lower = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if lower else nullcontext()


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an accelerator had too little memory, for PyTorch or for cuBLAS and cuDNN."""
    return isinstance(error, torch.OutOfMemoryError) or "_STATUS_ALLOC_FAILED" in str(error)
