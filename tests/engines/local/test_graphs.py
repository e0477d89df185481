"""Recorded steps: what goes in and comes out, which are recorded, and what they must not know.

A recording is played here without a GPU: it computes from the memory it was recorded with, and
into it, as a CUDA graph does.
"""

import logging
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hyperfed import federation, trees
from hyperfed.engines import EngineConfig, build
from hyperfed.engines.calls import Call
from hyperfed.engines.local.graphs import Graphs, Replay, no_waiting
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import Kind, VmappedEngine
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.methods import METHODS
from hyperfed.trees import Tree
from toys import Federation, Normed, close, make_task, short, snapshot


class Tape:
    """Records and plays; counts both."""

    def __init__(self) -> None:
        self.recorded, self.played = 0, 0

    def record(self, compute: Callable[[], Tree]) -> tuple[Tree, Replay]:
        outputs = trees.clone(compute())
        self.recorded += 1

        def play() -> None:
            self.played += 1
            trees.tree_map(Tensor.copy_, outputs, compute())

        return outputs, play


def doubled(inputs: Tree) -> Tree:
    return {"x": 2 * inputs["x"]}


def test_a_recording_computes_from_new_inputs_and_its_outputs_stay() -> None:
    tape = Tape()
    graphs = Graphs(tape.record)
    first, second, third = (
        graphs.run("key", {"x": torch.full((2,), float(n))}, doubled, doubled) for n in (1, 2, 3)
    )
    assert [made["x"].tolist() for made in (first, second, third)] == [[2, 2], [4, 4], [6, 6]]
    assert (tape.recorded, tape.played) == (1, 2)


def test_functions_are_recorded_when_they_come_up_again_the_first_so_many() -> None:
    tape = Tape()
    graphs = Graphs(tape.record, most=2)
    for key, recorded, played in zip(
        "aababccbca",
        (0, 1, 1, 1, 2, 2, 2, 2, 2, 2),
        (0, 1, 1, 2, 3, 3, 3, 4, 4, 5),
        strict=True,
    ):
        assert graphs.run(key, {"x": torch.ones(1)}, doubled, doubled)["x"].item() == 2
        assert (key, tape.recorded, tape.played) == (key, recorded, played)


def test_recordings_that_were_given_back_are_not_made_again() -> None:
    tape = Tape()
    graphs = Graphs(tape.record)
    assert not graphs.clear()
    for _ in range(3):
        graphs.run("key", {"x": torch.ones(1)}, doubled, doubled)
    assert graphs.clear()
    assert not graphs.clear()
    assert graphs.run("key", {"x": torch.ones(1)}, doubled, doubled)["x"].item() == 2
    assert (tape.recorded, tape.played) == (1, 2)


def test_what_cannot_be_recorded_is_computed_as_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def unable(inputs: Tree) -> Tree:
        raise ValueError("it looks at the clock")

    tape = Tape()
    graphs = Graphs(tape.record)
    for _ in range(4):
        assert graphs.run("key", {"x": torch.ones(1)}, doubled, unable)["x"].item() == 2
    assert (tape.recorded, tape.played) == (0, 0)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["not recorded as a CUDA graph: ValueError: it looks at the clock"]
    assert graphs.counts() == {"recorded": 0, "refused": 1}


def both(method: str, tape: Tape) -> list[Federation]:
    """The same federation on the loop engine and recorded."""
    chosen = short(method, batch_size=8)
    task = {"net": Normed, "examples": (12, 12, 12, 9, 12), "novel": 1}
    loop, ours = (Federation(method, make_task(**task), **chosen) for _ in range(2))
    ours.engine = VmappedEngine(
        ours.task, ours.method.Client, ours.config, seed=0, graphs=Graphs(tape.record)
    )
    return [loop, ours]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_recorded_rounds_equal_the_loop_engine(method: str) -> None:
    tape = Tape()
    pair = both(method, tape)
    loop, ours = pair
    for number, clients in enumerate(([0, 1, 3], [1, 2, 3], [0, 2, 3], [3], [0, 2])):
        for each in pair:
            each.round(clients, number)
        close(snapshot(ours), snapshot(loop))
    evaluate = loop.method.Client.evaluate
    for clients in ([0, 1], [1, 2], [2, 0], [4]):
        counts = []
        for each in pair:
            cohort = each.engine.cohort(clients, 9, training=False)
            counts.append(cohort.ask(evaluate, each.server.personalize(cohort)))
        close(*counts)
    assert tape.played > 0
    assert ours.engine.resources(3)["graphs"] == ours.engine.graphs.counts()
    assert ours.engine.graphs.counts()["recorded"] == tape.recorded


def test_groups_of_each_size_have_a_recording_of_their_own() -> None:
    tape = Tape()
    loop, ours = both("fedavg", tape)
    for number, clients in enumerate(([0, 1, 2], [1, 2], [0, 1, 2], [0, 1], [0, 1, 2])):
        for each in (loop, ours):
            each.round(clients, number)
    close(snapshot(ours), snapshot(loop))
    assert (tape.recorded, tape.played) == (2, 3)


def test_recordings_make_room_before_fewer_clients_go_together() -> None:
    tape, short_of = Tape(), [False]

    class Full(VmappedEngine):
        def _stacked(self, kind: Kind, calls: Sequence[Call]) -> Tree:
            if short_of[0] and self.graphs is not None and self.graphs._recorded:
                raise torch.OutOfMemoryError("out of memory")
            return super()._stacked(kind, calls)

    _, ours = both("fedavg", tape)
    ours.engine = Full(
        ours.task, ours.method.Client, ours.config, seed=0, graphs=Graphs(tape.record)
    )
    for number in range(2):
        ours.round([0, 1, 2], number)
    assert tape.played == 1
    short_of[0] = True
    ours.round([0, 1, 2], 2)
    assert ours.engine._fits == {}
    assert tape.played == 1


class Timed(federation.Client):
    """Trains with a rate that falls from round to round."""

    @step
    def rate(self) -> Tree:
        return {"rate": self.train.batch().x.sum() * 0 + 1 / (1 + self.round)}


def test_a_step_that_asks_for_the_round_is_not_recorded() -> None:
    tape = Tape()
    ours = VmappedEngine(make_task(), Timed, None, seed=0, graphs=Graphs(tape.record))
    loop = LoopEngine(make_task(), Timed, None, seed=0)
    for number in range(4):
        replies = [
            engine.cohort([0, 1], number, training=True).ask(Timed.rate) for engine in (ours, loop)
        ]
        torch.testing.assert_close(*replies, rtol=0, atol=0)
    assert tape.recorded == 0


def test_waiting_is_refused_and_allowed_again_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's warning would be an error in these tests: nothing would be recorded in them."""
    modes: list[int | str] = []

    def told(mode: int | str) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", told)
    with pytest.raises(RuntimeError, match="waits"), no_waiting():
        raise RuntimeError("waits")
    assert modes == ["error", 0]


@pytest.mark.parametrize("name", ["vmap", "auto"])
def test_graphs_need_a_gpu(name: str) -> None:
    settings = EngineConfig(name, graphs=True)
    with pytest.raises(UserError, match=r"engine\.graphs must have a GPU .* came device=cpu"):
        build(settings, make_task(), Timed, None, seed=0)
