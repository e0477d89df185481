"""No reply can end a run or ruin what it goes on from: lies, void rounds, torn checkpoints."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hyperfed
from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Server
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.rollback import Snapshot
from hyperfed.runs.run import Run
from hyperfed.system.randomness import generator
from hyperfed.trees import Tree, aggregation
from hyperfed.trees.aggregation import Rule
from hyperfed.trees.checkpoints import load_state, previous, save_state
from toys import Federation, Normed, make_task, short

HOSTILE = 1
SETTINGS: dict[str, Any] = {
    "rounds": 5,
    "cohort": 1.0,
    "evaluate_every": 1,
    "method": {"local_steps": 1},
    "faults": {"hostile": [HOSTILE]},
}

GREATEST = torch.finfo(torch.float64).max
MOST = torch.iinfo(torch.int64).max

Lie = Callable[[Tree, Tree | None, Call], Tree]


def fill(value: float) -> Lie:
    return lambda reply, like, call: trees.tree_map(lambda leaf: _filled(leaf, value), reply)


def scaled(factor: float) -> Lie:
    def lie(reply: Tree, like: Tree | None, call: Call) -> Tree:
        """Sends a multiple of the change, whether the step returns a model or a change."""
        start = like if like is not None and _is_near(reply, like) else trees.subtract(reply, reply)
        return trees.tree_map(lambda r, s: _scaled(r, s, factor), reply, start)

    return lie


def in_one_entry(value: float) -> Lie:
    def lie(reply: Tree, like: Tree | None, call: Call) -> Tree:
        lied = trees.clone(reply)
        next(leaf for _, leaf in trees.leaves(lied) if leaf.is_floating_point()).view(-1)[0] = value
        return lied

    return lie


def in_one_tensor(value: float) -> Lie:
    def lie(reply: Tree, like: Tree | None, call: Call) -> Tree:
        name = next(iter(reply))
        return reply | {name: torch.full_like(reply[name], value)}

    return lie


def echo(reply: Tree, like: Tree | None, call: Call) -> Tree:
    return reply if like is None else trees.clone(like)


def brought_to(value: int, statistic: str) -> Lie:
    def lie(reply: Tree, like: Tree | None, call: Call) -> Tree:
        """Moves a statistic of batch-norm, whether the step returns a model or a change."""
        if like is None:
            return reply
        model = _is_near(reply, like)
        return {
            name: leaf
            if not name.endswith(statistic)
            else torch.full_like(leaf, value)
            if model
            else like[name] - value
            for name, leaf in reply.items()
        }

    return lie


def sparing_variances(lie: Lie) -> Lie:
    """Returns a lie that leaves batch-norm's variances, which below zero would have it lost."""

    def spared(reply: Tree, like: Tree | None, call: Call) -> Tree:
        start = like if like is not None and _is_near(reply, like) else None
        kept = {
            name: torch.zeros_like(leaf) if start is None else start[name]
            for name, leaf in reply.items()
            if name.endswith("running_var")
        }
        return lie(reply, like, call) | kept

    return spared


@sparing_variances
def growing(reply: Tree, like: Tree | None, call: Call) -> Tree:
    return scaled(3.0**call.round)(reply, like, call)


def late(reply: Tree, like: Tree | None, call: Call) -> Tree:
    """Poisons nothing but the last message of a round, and that from the third on."""
    last = call.step in ("descriptor_net_gradient", "train_model") and call.round >= 2
    return fill(1e30)(reply, like, call) if last else reply


def _filled(leaf: Tensor, value: float) -> Tensor:
    return torch.full_like(leaf, value) if leaf.is_floating_point() else leaf


def _scaled(reply: Tensor, start: Tensor, factor: float) -> Tensor:
    return start + factor * (reply - start) if reply.is_floating_point() else reply


def _is_near(reply: Tree, like: Tree) -> bool:
    moved = sum(float((reply[name] - like[name]).square().sum()) for name in reply)
    return moved < sum(float(leaf.square().sum()) for leaf in reply.values())


ATTACKS: dict[str, tuple[Lie, str | None]] = {
    "1e30": (fill(1e30), "too large"),
    "-1e30": (fill(-1e30), "too large"),
    "the greatest float64": (fill(GREATEST), "too large"),
    "infinity": (fill(torch.inf), "not finite"),
    "NaN": (fill(torch.nan), "not finite"),
    "one NaN": (in_one_entry(torch.nan), "not finite"),
    "one infinity": (in_one_entry(-torch.inf), "not finite"),
    "one entry of 1e30": (in_one_entry(1e30), "too large"),
    "one tensor of 1e9": (in_one_tensor(1e9), "too large"),
    "1e6 times its change": (scaled(1e6), "too large"),
    "variances below zero": (brought_to(-2, "running_var"), "below zero"),
    "counts of batches below zero": (brought_to(-2, "num_batches_tracked"), "below zero"),
    "more batches than there are": (brought_to(MOST, "num_batches_tracked"), "more batches"),
    "1e30 late in a late round": (late, "too large"),
    "-10 times its change": (scaled(-10.0), None),
    "growth below the bound": (growing, None),
    "nothing but zeros": (fill(0.0), None),
    "almost nothing": (fill(1e-300), None),
    "what it was sent": (echo, None),
}
"""What a client sends, and why it is lost for it; None where no bound can tell it is a lie."""


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lie], None]:
    def have(lie: Lie) -> None:
        def lied(self: Faults, reply: Tree, like: Tree | None, seed: int, call: Call) -> Tree:
            return lie(reply, like, call)

        monkeypatch.setattr(Faults, "lie", lied)

    return have


@pytest.mark.parametrize("hostile", [0, HOSTILE])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_lie_ends_a_run_or_leaves_it_a_state_that_is_not_finite(
    attack: str, hostile: int, lies: Callable[[Lie], None], tmp_path: Path
) -> None:
    """The first client, to whose descriptor PeFLL's standardisation may be fitted, is no other."""
    lie, reason = ATTACKS[attack]
    lies(lie)
    faults = {"faults": {"hostile": [hostile]}}
    for method in ("fedavg", "pefll"):
        run = hyperfed.train(method, make_task(Normed), out=tmp_path, **SETTINGS | faults)
        assert run.summary["rounds"] == 5
        assert run.folder is not None
        tree, _ = load_state(run.folder.state)
        assert trees.finite([tree]) == [True]
        lost = {(one.client, one.reason) for e in run.evaluations for one in e.lost}
        assert {client for client, _ in lost} <= {hostile}
        if reason is not None:
            assert lost
            assert all(reason in said for _, said in lost)
        elif method == "fedavg":
            assert lost == set()
        assert run.summary["test_accuracy"] is not None


@pytest.mark.parametrize("method", ["fedavg", "fedas", "fedfomo", "fedpac", "hypcluster", "pfedla"])
def test_no_count_of_batches_grows_until_it_is_below_zero(
    method: str, lies: Callable[[Lie], None]
) -> None:
    """A client that is alone in its rounds has the whole of a mean."""

    def counting(reply: Tree, like: Tree | None, call: Call) -> Tree:
        return {
            name: counting(leaf, None, call)
            if isinstance(leaf, dict)
            else torch.full_like(leaf, MOST)
            if name.endswith("num_batches_tracked")
            else leaf
            for name, leaf in reply.items()
        }

    lies(counting)
    keys = SETTINGS | {"rounds": 12, "cohort": 1, "method": short(method)}
    run = hyperfed.train(method, make_task(Normed), **keys)
    assert {one.client for e in run.evaluations for one in e.lost} == {HOSTILE}
    counts = [v for n, v in trees.leaves(run._state()) if n.endswith("num_batches_tracked")]
    assert all(0 <= count.min() <= count.max() < 1000 for count in counts)


@pytest.mark.parametrize("method", ["fedavg", "pefll"])
def test_nobody_is_lost_by_a_count_of_batches_that_was_large_already(method: str) -> None:
    class Counted(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.norm.num_batches_tracked += 2**45

    run = hyperfed.train(method, make_task(Counted), **SETTINGS | {"rounds": 2, "faults": {}})
    assert [one for e in run.evaluations for one in e.lost] == []
    counts = [v for n, v in trees.leaves(run._state()) if n.endswith("num_batches_tracked")]
    assert all(count.min() > 2**45 for count in counts)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "itpfl", "pefll", "pfedhn"])
def test_who_sends_1e30_is_as_if_it_had_not_answered(method: str) -> None:
    """Those that one such reply ended, on a task in which nobody else is odd."""
    own = short(method, local_steps=1, phase_one_rounds=2)
    keys = SETTINGS | {"rounds": 3, "method": own}

    def drops(self: Faults, seed: int, call: Call) -> bool:
        return call.client == HOSTILE

    attacked = hyperfed.train(
        method, make_task(Normed), **keys | {"faults": {"hostile": [HOSTILE], "attack": "huge"}}
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Faults, "drops", drops)
        absent = hyperfed.train(method, make_task(Normed), **keys | {"faults": {}})
    assert [e.client_loss for e in attacked.evaluations] == [
        e.client_loss for e in absent.evaluations
    ]
    assert {one.client for e in attacked.evaluations for one in e.lost} == {HOSTILE}


# Where no bound holds a lie off.

UNBOUNDED = {"robust": {"reply_bound": None}}
FRAIL = {"clip": None, "lr": 100.0}
"""What makes more of a reply of pFedHN than a float64 can hold."""


def lie_in_round_two(value: float) -> Lie:
    lie = sparing_variances(fill(value))
    return lambda reply, like, call: lie(reply, like, call) if call.round == 2 else reply


@pytest.mark.parametrize(
    ("method", "own"),
    [("pfedhn", FRAIL), ("pefll", {"delayed_gradient": True}), ("itpfl", {"phase_one_rounds": 4})],
)
def test_a_round_after_which_the_server_is_not_finite_is_taken_back_and_told(
    method: str,
    own: dict[str, Any],
    lies: Callable[[Lie], None],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    lies(lie_in_round_two(GREATEST))
    keys = SETTINGS | UNBOUNDED | {"cohort": 3, "evaluate_every": 5, "method": own}
    keys |= {"faults": {"hostile": [0, 1, 2, 3]}}
    with caplog.at_level(logging.WARNING):
        void = hyperfed.train(method, make_task(Normed), out=tmp_path, **keys)
    order = torch.randperm(4, generator=generator(0, "cohort", 2))
    in_it = sorted(order[:3].tolist())
    assert void.summary["void_rounds"] == 1
    told = [[(each.round, each.clients) for each in e.void] for e in void.evaluations]
    assert told == [[(2, tuple(in_it))]] * (3 if method == "itpfl" else 2)  # val, test, a rehearsal
    ids = ", ".join(map(str, in_it))
    assert "round 2 is void" in caplog.text
    assert f"replies of clients {ids} were" in caplog.text
    assert void.folder is not None
    lines = [json.loads(line) for line in void.folder.metrics.read_text().splitlines()]
    assert lines[0]["void"] == [{"round": 2, "clients": in_it}]
    # So it is as if nobody had been there in that round.
    server = METHODS[method].Server
    train = server.round

    def nobody_in_round_two(self: Any, clients: Any) -> None:
        if clients.round == 2:
            raise AllLostError
        train(self, clients)

    lies(lambda reply, like, call: reply)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "round", nobody_in_round_two)
        empty = hyperfed.train(method, make_task(Normed), **keys)
    assert [e.client_loss for e in void.evaluations] == [e.client_loss for e in empty.evaluations]
    assert empty.summary["void_rounds"] == 0


def test_a_server_that_moves_its_tensors_in_place_can_be_taken_back_twice() -> None:
    engine = Federation("fedavg", make_task()).engine
    cohort = engine.cohort([0], 0, training=True)
    server, before = Server(engine.task.outline(), None), Snapshot()
    server.rows = {"of": torch.arange(3.0)}
    for start in (0.0, 5.0):
        server.rows["of"] += start
        before.take(server)
        server.rows["of"] *= torch.nan
        server.seen = 1
        before.restore(server, engine, cohort)
        assert server.rows["of"].tolist() == [start, start + 1, start + 2]
        assert not hasattr(server, "seen")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (torch.zeros(3), torch.ones(1)),
        (torch.zeros(3), torch.ones(3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.ones(3, 2).t()),
    ],
    ids=["another shape", "another precision", "another layout"],
)
def test_a_server_whose_tensors_are_others_is_copied_as_it_is_now(
    first: Tensor, then: Tensor
) -> None:
    """Into the copy of the round before they would fit by being repeated, rounded or turned."""
    engine = Federation("fedavg", make_task()).engine
    cohort = engine.cohort([0], 0, training=True)
    server, before = Server(engine.task.outline(), None), Snapshot()
    for rows in (first, then):
        server.rows = {"of": rows.clone()}
        before.take(server)
    server.rows["of"] *= torch.nan
    before.restore(server, engine, cohort)
    found = server.rows["of"]
    assert found.stride() == then.stride()
    torch.testing.assert_close(found, then, rtol=0, atol=0)


def test_gradients_of_a_round_that_was_taken_back_are_in_no_later_one() -> None:
    """``descend`` adds to the gradients that there are, and a round can break off before it."""
    engine = Federation("fedavg", make_task()).engine
    cohort = engine.cohort([0], 0, training=True)
    server, before, apart = Server(engine.task.outline(), None), Snapshot(), torch.ones(2)
    server.net, apart.requires_grad = nn.Linear(2, 1), True
    server.optimizer = torch.optim.SGD([*server.net.parameters(), apart])
    before.take(server)
    server.net(apart).sum().backward()
    before.restore(server, engine, cohort)
    moved = [*server.net.parameters(), apart]
    assert [each.grad for each in moved] == [None] * 3


def test_the_rule_of_the_settings_stands_in_rounds_and_where_models_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[str, Rule]] = []
    server = METHODS["fedavg"].Server

    def note(name: str) -> None:
        usual = getattr(server, name)

        def noted(self: Server, *asked: Any) -> Any:
            found.append((name, aggregation._RULE.get()))
            return usual(self, *asked)

        monkeypatch.setattr(server, name, noted)

    note("round")
    note("personalize")
    rule = Rule("trimmed_mean", 0.4)
    robust = {"aggregation": rule.name, "hostile": rule.hostile}
    keys = SETTINGS | {"robust": robust, "faults": {}}
    run = hyperfed.train("fedavg", make_task(novel=1), **keys)
    assert {*found} == {("round", rule), ("personalize", rule)}
    for serve in (run.evaluate_novel, lambda: run.model(3)):
        found.clear()
        serve()
        assert {*found} == {("personalize", rule)}


def test_what_is_read_for_a_checkpoint_is_aggregated_by_the_rule() -> None:
    """A gradient of PeFLL that waits is read where the state is, however often that is."""
    robust = {"robust": {"aggregation": "median"}, "cohort": 3, "faults": {}}
    keys = SETTINGS | robust | {"method": {"delayed_gradient": True, "local_steps": 1}}
    often, once = (
        hyperfed.train("pefll", make_task(), **keys | {"evaluate_every": every}) for every in (1, 5)
    )
    assert often.evaluations[-1].client_loss == once.evaluations[-1].client_loss


def test_what_a_void_round_posted_does_not_travel(lies: Callable[[Lie], None]) -> None:
    lies(lie_in_round_two(GREATEST))
    keys = SETTINGS | UNBOUNDED | {"evaluate_every": 5, "method": {"delayed_gradient": True}}
    run = Run(config.from_keys("pefll", keys), make_task(Normed))
    waiting = [len(run.engine.waiting) for _ in run.train()]
    assert waiting == [1, 1, 0, 1, 0]  # after the last it was read


def test_a_void_round_is_remembered_over_a_resume(
    lies: Callable[[Lie], None], tmp_path: Path
) -> None:
    lies(lie_in_round_two(GREATEST))
    keys = SETTINGS | UNBOUNDED | {"evaluate_every": 5, "checkpoint_every": 1}
    keys |= {"method": FRAIL | {"cohort_reduction": "mean"}}
    run = Run.start(config.from_keys("pfedhn", keys), tmp_path, make_task(Normed))
    for progress in run.train():
        if progress.round == 4:
            break
    assert run.folder is not None
    resumed = hyperfed.resume(run.folder.path, make_task(Normed))
    assert resumed.summary["void_rounds"] == 1
    assert [[void.round for void in e.void] for e in resumed.evaluations] == [[2], [2]]


def test_clients_of_a_void_round_remember_what_they_did_before(
    lies: Callable[[Lie], None],
) -> None:
    keys = SETTINGS | UNBOUNDED | {"rounds": 3, "method": {"local_steps": 1} | FRAIL}
    lies(lie_in_round_two(GREATEST))
    void = hyperfed.train("pfedhn_pc", make_task(Normed), **keys)
    two = hyperfed.train("pfedhn_pc", make_task(Normed), **keys | {"rounds": 2})
    assert void.summary["void_rounds"] == 1
    assert list(trees.leaves({str(k): v for k, v in two.engine.memory.items()}))
    torch.testing.assert_close(void.engine.memory, two.engine.memory, rtol=0, atol=0)


def test_models_of_no_use_end_no_run_and_are_not_the_best(lies: Callable[[Lie], None]) -> None:
    """A finite lie that no bound holds off: every client's model is useless from then on."""
    lies(lie_in_round_two(GREATEST))
    keys = SETTINGS | UNBOUNDED | {"faults": {"hostile": [0, 1, 2]}}
    run = hyperfed.train("fedavg", make_task(), **keys)
    val = [e for e in run.evaluations if e.split == "val"]
    assert [e.accuracy is None for e in val] == [False, False, True, True, True]
    assert run.summary["best_round"] <= 2
    assert run.summary["test_accuracy"] is not None


# Checkpoints.


def flipped(path: Path) -> None:
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def poisoned(path: Path) -> None:
    """As an older version would have written it."""
    tree, meta = load_state(path)
    next(leaf for _, leaf in trees.leaves(tree) if leaf.is_floating_point()).fill_(torch.nan)
    save_state(path, tree, meta)


SIX_ROUNDS: dict[str, Any] = {
    "rounds": 6,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "method": {"local_steps": 1, "novel_steps": 1},
}


def stopped(folder: Path, rounds: int) -> RunFolder:
    run = Run.start(config.from_keys("fedper", SIX_ROUNDS), folder, make_task(novel=1))
    for progress in run.train():
        if progress.round == rounds:
            break
    assert run.folder is not None
    return run.folder


@pytest.mark.parametrize("damage", [flipped, torn, empty, poisoned, Path.unlink])
def test_a_run_goes_on_from_the_checkpoint_before_where_the_newest_is_of_no_use(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = hyperfed.train("fedper", make_task(novel=1), **SIX_ROUNDS)
    folder = stopped(tmp_path, rounds=5)
    damage(folder.state)
    assert Run.open(folder.path, make_task(novel=1)).round == 2
    with caplog.at_level(logging.WARNING):
        resumed = hyperfed.resume(folder.path, make_task(novel=1))
    assert f"going on from the checkpoint before, {previous(folder.state)}" in caplog.text
    assert [e.client_loss for e in resumed.evaluations] == [
        e.client_loss for e in whole.evaluations
    ]
    assert resumed.summary["test_accuracy"] == whole.summary["test_accuracy"]


@pytest.mark.parametrize("damage", [torn, poisoned])
def test_a_newest_of_no_use_never_takes_the_place_of_the_one_gone_on_from(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = stopped(tmp_path, rounds=5)
    damage(folder.state)
    run = Run.resume(folder.path, make_task(novel=1))
    rounds: list[list[int]] = []
    for _ in run.train():
        if run.round in (4, 6):
            both = (previous(folder.state), folder.state)
            rounds.append([load_state(path)[1]["round"] for path in both])
    assert rounds == [[2, 4], [4, 6]]


def test_where_neither_checkpoint_is_of_use_both_are_named(tmp_path: Path) -> None:
    folder = stopped(tmp_path, rounds=4)
    poisoned(folder.state)
    torn(previous(folder.state))
    with pytest.raises(UserError) as caught:
        hyperfed.resume(folder.path, make_task(novel=1))
    assert str(folder.state) in str(caught.value)
    assert str(previous(folder.state)) in str(caught.value)


def test_a_run_that_is_done_is_read_as_of_its_end_and_not_before(tmp_path: Path) -> None:
    run = hyperfed.train("fedper", make_task(novel=1), out=tmp_path, **SIX_ROUNDS)
    assert run.folder is not None
    torn(run.folder.state)
    with pytest.raises(UserError, match="is damaged"):
        hyperfed.open_run(run.folder.path, make_task(novel=1))


# What a run is told.


def test_hostile_clients_and_rules_that_cannot_be() -> None:
    with pytest.raises(UserError, match="at least 3 clients where robust"):
        Run(config.from_keys("fedavg", {"cohort": 2, "robust.aggregation": "krum"}), make_task())
    for stranger in (3, 99):  # the first of which is novel
        lies = {"faults.hostile": [1, stranger]}
        with pytest.raises(UserError, match=f"numbers from 0 to 2, came {stranger}; name"):
            Run(config.from_keys("fedavg", lies), make_task(novel=1))
    with pytest.raises(UserError, match="must be mean for fedfomo, whose"):
        config.from_keys("fedfomo", {"robust.aggregation": "median"})
    for key, value in (("hostile", 0.5), ("reply_bound", 1.0), ("aggregation", "mode")):
        with pytest.raises(UserError, match=f"robust.{key}"):
            config.from_keys("fedavg", {f"robust.{key}": value})


def test_what_an_earlier_round_posted_still_waits_after_one_is_taken_back() -> None:
    engine = Federation("fedavg", make_task()).engine
    earlier, void = (engine.cohort([0], number, training=True) for number in (0, 1))
    server, before = Server(engine.task.outline(), None), Snapshot()
    engine.waiting[:] = [cast(Any, SimpleNamespace(cohort=each)) for each in (earlier, void)]
    before.take(server)
    before.restore(server, engine, void)
    assert [question.cohort for question in engine.waiting] == [earlier]
