"""Draws of clients that are computed together: each client's come from its own generator.

To ``torch.func.vmap`` a draw is one for all clients, or an error. Here a step is given a stand-in
for the generator; a function of PyTorch that is called with it is called once for each client,
outside of ``vmap``, with the generator that the loop would have given that client. So a client
draws what it would have drawn alone.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OwnError(Exception):
    """A step asks for what each client of a group has of its own."""


class _StandIn(torch.Generator):
    """Says nothing of itself: it stands for as many generators as there are clients."""

    def _refuse(self, *_: object) -> NoReturn:
        raise OwnError("it asks a generator for more than draws")

    initial_seed = seed = get_state = clone_state = _refuse
    manual_seed = set_state = _refuse  # type: ignore[assignment]


class Draws(TorchFunctionMode):
    """Inside this block, and in ``vmap``, each of C clients draws from its own generator.

    Args:
        generators: those of the C clients.
        place: scalar under ``vmap``: which of them a client is.
    """

    def __init__(self, generators: Sequence[torch.Generator], place: Tensor) -> None:
        super().__init__()
        self.generator = _StandIn()
        self._generators, self._place = generators, place
        # Each thread has a vmap of its own, and this one has none.
        self._aside = ThreadPoolExecutor(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the block."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._aside.shutdown()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls a function of PyTorch, or draws with it."""
        options = kwargs or {}
        if options.get("generator") is not self.generator:
            return function(*args, **options)
        filled = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        if filled and not (len(filled) == 1 and function.__name__.endswith("_")):
            raise OwnError(f"what it draws with torch.{function.__name__} depends on a tensor")
        drawn = self._aside.submit(self._draw, function, args, options).result()[self._place]
        if not filled:
            return drawn
        try:
            return filled[0].copy_(drawn)
        except RuntimeError as error:  # one tensor cannot hold the draws of all
            name = function.__name__
            raise OwnError(f"it fills a tensor that it made ({name}) and not a new one") from error

    def _draw(self, function: Any, args: Sequence[Any], options: dict[str, Any]) -> Tensor:
        """Returns (C, ...), what each client draws."""
        return torch.stack(
            [
                function(*map(_blank, args), **{k: _blank(v) for k, v in own.items()})
                for own in (options | {"generator": generator} for generator in self._generators)
            ]
        )


def _blank(value: Any) -> Any:
    """Returns a tensor of one client to be filled; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
