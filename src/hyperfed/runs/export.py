"""A client's model for programs that know nothing of hyperfed, with normalisation inside.

A network of a run takes what the task's ``transform`` makes of raw examples, of which its weights
say nothing. What is written here takes raw examples: pixels from 0 to 255, or the floats or tokens
that the task was given. No example is in a file, and what it takes and gives is in its metadata,
under ``hyperfed``, as JSON.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hyperfed.data.examples import Normalize
from hyperfed.data.features import Prefix
from hyperfed.errors import UserError
from hyperfed.system.extras import how_to_install
from hyperfed.system.files import at_home, atomic_write
from hyperfed.task import Task

SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}
)
"""Format -> how its files end."""

INPUT, OUTPUT, BATCH = "x", "output", "batch"
"""Names of what a program takes and gives, and of the dimension that may have any size."""


class Pixels(nn.Module):
    """Maps raw images (B, C, H, W), from 0 to 255, to what a network was trained on.

    The same as :class:`hyperfed.data.examples.Normalize`, with its constants as buffers.

    Args:
        normalize: that of the task.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        std = torch.tensor(normalize.std, dtype=torch.float64).reshape(-1, 1, 1)
        mean = torch.tensor(normalize.mean, dtype=torch.float64).reshape(-1, 1, 1)
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32 images."""
        return torch.addcmul(self.shift, x.float(), self.scale)


class Applied(nn.Module):
    """A function as a module, which only a traced program can hold."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the function makes of a batch."""
        return self._function(x)


class Portable(nn.Module):
    """A network that takes raw examples.

    Args:
        model: what a run hands out.
        task: what the run was trained on.

    Attributes:
        normalize: makes the network's input of raw examples.
        model: the network.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.normalize = _module(task.transform, task.x.dtype)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Returns the network's output for a batch of raw examples."""
        output: Tensor = self.model(self.normalize(x))
        return output


def _module(transform: Callable[[Tensor], Tensor], raw: torch.dtype) -> nn.Module:
    """Returns what a task's transform does with examples of a dtype, as a module."""
    if isinstance(transform, Normalize):
        return Pixels(transform) if raw == torch.uint8 else nn.Identity()
    if isinstance(transform, Prefix) and isinstance(transform.net, nn.Module):
        return nn.Sequential(_module(transform.normalize, raw), deepcopy(transform.net))
    return nn.Identity() if transform is Task.transform else Applied(transform)


def export_model(model: nn.Module, task: Task, path: str | Path, format: str | None = None) -> None:
    """Writes a model of a run, with the task's normalisation, to a file.

    Args:
        model: what ``run.model(client)`` or ``run.personalize(x, y)`` returned.
        task: ``run.task``.
        path: the file.
        format: ``safetensors``, weights under ``model.`` and the constants of the normalisation
            under ``normalize.``; ``onnx``; or ``torch-export``, which ``torch.export.load`` reads.
            Both programs take batches of any size. Where None, the file's ending says it.

    Raises:
        UserError: no such format, a model that it cannot hold, what it needs is not installed, or
            the disk refuses.
    """
    given: tuple[Any, Any] = (model, task)
    if not all(map(isinstance, given, (nn.Module, Task))):
        told = " and ".join(type(each).__name__ for each in given)
        raise UserError(
            f"a model must be exported with its task, got {told}; call "
            "export_model(run.model(client), run.task, path)"
        )
    path = Path(at_home(str(Path(path))))  # what is no path stays an error
    chosen = format_of(path, format)
    portable = Portable(deepcopy(model).cpu(), task).eval()
    # Zeros: a program keeps the batch that it was traced on, and no client's data may leave.
    example = torch.zeros(2, *task.x.shape[1:], dtype=task.x.dtype)
    write = {"safetensors": _weights, "onnx": _onnx, "torch-export": _program}[chosen]
    atomic_write(path, write(portable, example, json.dumps(_about(task))))


def format_of(path: Path, format: str | None = None) -> str:
    """Returns the format of a file: what was asked for, or what its ending says.

    Raises:
        UserError: neither says it, or they say two.
    """
    by_suffix = {suffix: name for name, suffix in SUFFIXES.items()}
    chosen = format or by_suffix.get(path.suffix)
    if chosen is None or chosen not in SUFFIXES:
        raise UserError(
            f"the format must be one of {', '.join(SUFFIXES)}, or the file end in one of "
            f"{', '.join(SUFFIXES.values())}; came {format or path.name!r}"
        )
    if by_suffix.get(path.suffix, chosen) != chosen:
        raise UserError(
            f"the format and the file's ending must agree, came {chosen} and {path.name!r}; call "
            f"the file {path.stem}{SUFFIXES[chosen]}, or choose {by_suffix[path.suffix]}"
        )
    return chosen


def _about(task: Task) -> dict[str, Any]:
    """Returns what a reader must know of the input and the output, as plain data."""
    dtype = str(task.x.dtype).removeprefix("torch.")
    pixels = "pixels from 0 to 255, which the model normalises itself"
    logits = "logits of the classes, from 0; of fewer outputs, what the task's own loss takes"
    return {
        "input": {
            "name": INPUT,
            "shape": [BATCH, *task.x.shape[1:]],
            "dtype": dtype,
            "meaning": pixels if dtype == "uint8" else "as the task was given them",
        },
        "output": {
            "name": OUTPUT,
            "meaning": logits if task.classes else "predictions",
        },
        "classes": task.classes,
        "labels": list(task.labels),
    }


def _weights(portable: Portable, example: Tensor, about: str) -> bytes:
    if isinstance(portable.normalize, Applied):
        raise UserError(
            "a task whose transform is a function must be exported as a program, as weights cannot "
            "hold it, got format=safetensors; choose torch-export or onnx"
        )
    # Copies, because safetensors refuses tensors that share memory.
    entries = {name: entry.clone().contiguous() for name, entry in portable.state_dict().items()}
    return safetensors.torch.save(entries, {"hyperfed": about})


def _program(portable: Portable, example: Tensor, about: str) -> bytes:
    file = io.BytesIO()
    with _quietly(), _traced("torch-export"):
        program = torch.export.export(portable, (example,), dynamic_shapes=_any_batch())
        torch.export.save(program, file, extra_files={"hyperfed": about})
    return file.getvalue()


def _onnx(portable: Portable, example: Tensor, about: str) -> bytes:
    try:
        import onnx  # noqa: F401 (torch says where its own exporter lacks the other)
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            "format=onnx must have onnx and onnxscript, which are not installed "
            f"({error.name}); {how_to_install('onnx')}"
        ) from error
    with _quietly(), _traced("onnx"):
        program = torch.onnx.export(
            portable,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=_any_batch(),
        )
        assert program is not None, "dynamo=True returns one"
        (given,) = program.model.graph.inputs
        if isinstance(given.shape[0], int):  # as by a loop over examples
            raise ValueError(f"it takes {given.shape[0]} examples alone, and no other number")
        program.model.metadata_props["hyperfed"] = about
        written: bytes = program.model_proto.SerializeToString()
    return written


def _any_batch() -> tuple[dict[int, Any], ...]:
    return ({0: torch.export.Dim(BATCH)},)


@contextmanager
def _traced(format: str) -> Iterator[None]:
    """Tells a user whose network cannot be made a program of why."""
    try:
        yield
    except Exception as error:  # whatever a user's network has PyTorch raise is to be told
        first = error
        while first.__cause__ is not None and isinstance(first.__cause__, Exception):
            first = first.__cause__  # of the exporter for ONNX, which says only that it failed
        reason = str(first).strip().splitlines() or [type(first).__name__]
        raise UserError(
            f"a model must be traceable for format={format}, but PyTorch says: {reason[0]}; change "
            "the network, or choose format=safetensors"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps to itself what PyTorch warns itself of while it traces."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)
