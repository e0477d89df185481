"""The engine that computes clients together, beside the loop, and who it says was together."""

from collections.abc import Sequence
from typing import Any

import pytest

from hyperfed.engines.calls import Answer, Call
from hyperfed.engines.local.vmap import Kind, VmappedEngine
from toys import Federation, make_task, short

SEED = 3
"""Not 0, as which a seed that is not passed on would pass unseen."""

EVEN, RAGGED = (12,) * 6, (12, 7, 20, 12, 9, 9)
"""Training examples of four known and two novel clients."""


class Recorded(VmappedEngine):
    """Notes who was computed together."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.together: list[tuple[str, list[int]]] = []

    def _together(self, kind: Kind, calls: Sequence[Call]) -> list[Answer]:
        answers = super()._together(kind, calls)
        self.together.append((kind.step, [call.client for call in calls]))
        return answers


def left(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The steps that the log says, once each, are left to the loop, and why."""
    said = [r.args for r in caplog.records if "computed client by client" in r.msg]
    assert len({step for step, _ in said}) == len(said)  # type: ignore[misc]
    return {str(step): str(why) for step, why in said}  # type: ignore[misc]


def both(method: str, *, task: dict[str, Any] | None = None, **settings: Any) -> list[Federation]:
    """The same federation on the loop engine and on this one."""
    chosen = short(method, **{"batch_size": 8} | settings)
    loop, ours = (
        Federation(method, make_task(**(task or {})), {"seed": SEED}, **chosen) for _ in range(2)
    )
    ours.engine = Recorded(ours.task, ours.method.Client, ours.config, seed=SEED)
    return [loop, ours]
