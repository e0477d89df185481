"""What goes wrong at a site loses its clients, for this round, and nobody else's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.grid import ERRORS, bytes_of, record_of
from hyperfed.engines.flower.site import Site
from hyperfed.engines.flower.sites import HELLO
from hyperfed.federation import AllLostError
from hyperfed.runs.evaluation import evaluate
from toys import close

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message, RecordDict

from engines.flower.grid_double import answered, both, values

pytestmark = pytest.mark.usefixtures("inside_a_flower_process")


def failing(code: int) -> Any:
    return lambda site, message: [Message(Error(code, "it says"), reply_to=message)]


def spoilt(change: Any) -> Any:
    def behave(site: Site, message: Message) -> Iterator[Message]:
        response = wire.unpack_response(site.handle(bytes_of(message.content)))
        answers = {c: trees.tree_map(change, tree) for c, tree in response.answers.items()}
        changed = wire.Response(**(vars(response) | {"answers": answers}))
        yield Message(record_of(wire.pack_response(changed)), reply_to=message)

    return behave


def garbage(site: Site, message: Message) -> Iterator[Message]:
    yield Message(record_of(b"garbage" * 10), reply_to=message)


def another_record(site: Site, message: Message) -> Iterator[Message]:
    yield Message(RecordDict({"other": ConfigRecord({"a": 1})}), reply_to=message)


def stale(site: Site, message: Message) -> Iterator[Message]:
    """Answers this message with the reply to an earlier one."""
    old = wire.Response(1, 1, {1: {}, 3: {}})
    yield Message(record_of(wire.pack_response(old)), reply_to=message)


def silent(site: Site, message: Message) -> Iterator[Message]:
    yield from ()


FAULTS = {
    "raises": (failing(2), ERRORS[2]),
    "gone": (failing(5), ERRORS[5]),
    "crashed": (failing(8), ERRORS[8]),
    "unknown": (failing(77), "unknown error 77"),
    "silent": (silent, "did not answer within"),
    "garbage": (garbage, "cannot be read"),
    "record": (another_record, "one array of bytes"),
    "stale": (stale, "another message"),
    "nan": (spoilt(lambda leaf: leaf * torch.nan), "not finite"),
    "huge": (spoilt(lambda leaf: torch.full_like(leaf, 1e30)), "too large"),
    "backwards": (spoilt(lambda leaf: leaf * -1e6), "too large"),
    "shape": (spoilt(lambda leaf: leaf.unsqueeze(0)), "names, shapes or dtypes"),
    "dtype": (spoilt(lambda leaf: leaf.half()), "names, shapes or dtypes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_site_that_fails_loses_its_clients_for_the_round(fault: str, tmp_path: Path) -> None:
    behave, reason = FAULTS[fault]
    ours, loop = both("fedper", tmp_path)
    ours.engine = FlowerEngine(ours.task, ours.module.Client, ours.config, seed=0, timeout=0.01)
    for each in (ours, loop):
        each.round([0, 1, 2], 0)
    ours.grid.behave[7] = behave
    cohort = ours.round([0, 1, 2], 1)
    assert list(cohort.state.lost) == [1]
    assert reason in cohort.state.lost[1]
    loop.round([0, 2], 1)
    ours.grid.behave.clear()
    for each in (ours, loop):
        each.round([1, 3], 2)
    expected = loop.server.state()
    close(ours.server.state(), expected)


def test_replies_in_any_order_and_twice_are_known_by_their_message(tmp_path: Path) -> None:
    ours, loop = both("fedper", tmp_path)
    ours.grid.behave[7] = lambda site, message: [answered(site, message)] * 2
    for each in (ours, loop):
        each.round([3, 0, 2, 1], 0)
        each.round([1, 0, 3, 2], 1)
    expected = loop.server.state()
    close(ours.server.state(), expected)


def test_a_message_delivered_twice_is_run_once(tmp_path: Path) -> None:
    """Memory counts: a client that trained twice would have another head."""
    ours, loop = both("fedper", tmp_path)

    def twice(site: Site, message: Message) -> list[Message]:
        answered(site, message)
        return [answered(site, message)]

    ours.grid.behave |= {7: twice, 11: twice}
    for each in (ours, loop):
        each.round([0, 1], 0)
        each.round([0, 1], 1)
    expected = loop.server.state()
    close(ours.server.state(), expected)


def test_a_site_that_has_gone_is_waited_for_only_where_no_other_answers(tmp_path: Path) -> None:
    ours, _ = both("fedper", tmp_path)
    gone = ours.grid.sites.pop(7)
    ours.engine = ours.new_engine()
    cohort = ours.round([0, 1])
    assert cohort.state.lost == {1: "its site is not connected"}
    ours.timeout = 0.01
    ours.engine = ours.new_engine()
    with pytest.raises(AllLostError, match="not connected"):
        ours.round([1, 3])
    ours.grid.sites[99] = gone  # it is back, as another node
    assert not ours.round([0, 1]).state.lost


def test_who_left_a_site_is_lost_alone_and_a_site_without_an_answer_asked_again_who_it_has(
    tmp_path: Path,
) -> None:
    ours, _ = both("fedper", tmp_path)
    ours.timeout = 0.01
    ours.engine = ours.new_engine()
    ours.round([1, 3])
    ours.sites[7].source = replace(ours.sites[7].source, clients=(1,))
    (lost,) = ours.round([1, 3], 1).state.lost.items()
    assert lost[0] == 3
    assert "client 3 (000003) must be one of this site's" in lost[1]
    hellos = ours.grid.delivered.count((7, HELLO))
    assert "must be one of this site's" in ours.round([0, 3], 2).state.lost[3]
    assert ours.round([0, 3], 3).state.lost == {3: "its site is not connected"}
    assert ours.grid.delivered.count((7, HELLO)) == hellos + 1
    assert not ours.round([0, 1], 4).state.lost


def test_an_evaluation_goes_on_without_a_site(tmp_path: Path) -> None:
    ours, loop = both("fedper", tmp_path)
    for each in (ours, loop):
        each.round([0, 1, 2, 3])
    ours.grid.behave[7] = failing(5)
    here = values(evaluate(ours.server, ours.engine, range(4), 1))
    there = values(evaluate(loop.server, loop.engine, range(4), 1))
    present = torch.tensor([True, False, True, False])
    for split in here:
        torch.testing.assert_close(here[split][:, present], there[split][:, present])
        assert not here[split][:, ~present].any()
    ours.grid.behave[11] = failing(5)
    nobody = evaluate(ours.server, ours.engine, range(4), 1)
    assert not values(nobody)["test"].any()
    assert all(ERRORS[5] in nobody["val"].missed[client] for client in range(4))
