"""What a server may rely on, whichever engine answers: replies, losses, bytes, sizes, others."""

import gc
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.engines import Engine, EngineCohort, Faults
from hyperfed.engines.calls import Call
from hyperfed.engines.cohort import CohortState, Question
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Each, step
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.devices import CPU
from hyperfed.task import Task
from hyperfed.trees import Tree
from probe import Client, Config, engine_of
from toys import EXAMPLES, Federation, Normed, TwoLayers, make_task

MODEL = {"w": torch.ones(2)}


@pytest.mark.parametrize("how", ["raise", "nan", "name", "shape", "dtype", "not a tree"])
def test_a_bad_reply_loses_its_client_and_keeps_its_memory(how: str) -> None:
    engine = engine_of()
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(Client.remember)
    engine.commit(cohort)
    engine.config = Config((1,), how)
    cohort = engine.cohort([0, 1, 2], 1, training=True)
    step_ = Client.remember if how in ("nan", "raise") else Client.echo
    reply = cohort.ask(step_) if how in ("nan", "raise") else cohort.ask(step_, MODEL)
    engine.commit(cohort)
    assert list(cohort.state.lost) == [1]
    assert cohort.weight.tolist() == [EXAMPLES[0], 0, EXAMPLES[2]]
    assert engine.memory[1]["count"] == 1
    assert all(bool(leaf[1].eq(0).all()) for _, leaf in trees.leaves(reply))
    # A lost client is not asked again in this round.
    cohort.ask(Client.echo, MODEL)
    assert [e.client for e in cohort.state.exchanges if e.step == "echo"][-2:] == [0, 2]


def test_replies_unlike_the_majority_are_refused() -> None:
    engine = engine_of(config=Config((2,), "name"))
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(Client.remember)
    assert "surplus" in cohort.state.lost[2]


def test_all_lost_ends_the_round_and_says_why() -> None:
    cohort = engine_of(config=Config((0, 1), "raise")).cohort([0, 1], 0, training=True)
    with pytest.raises(AllLostError, match="client 0: OSError: disk on fire") as caught:
        cohort.ask(Client.echo, MODEL)
    assert isinstance(caught.value.__cause__, OSError)


def test_outside_training_what_a_client_raises_is_raised() -> None:
    cohort = engine_of(config=Config((1,), "raise")).cohort([0, 1], 0, training=False)
    with pytest.raises(OSError, match="disk on fire"):
        cohort.ask(Client.echo, MODEL)


def test_bytes_are_counted_per_direction_step_and_client() -> None:
    engine = engine_of(config=Config((2,), "raise"))
    cohort = engine.cohort([0, 2], 0, training=True)
    cohort.ask(Client.echo, {"w": torch.zeros(3), "n": torch.zeros(2, dtype=torch.int64)})
    cohort.ask(Client.echo, Each({"w": torch.zeros(2, 5)}))
    counted = [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges]
    assert counted == [("echo", 0, 28, 28), ("echo", 2, 28, 0), ("echo", 0, 20, 20)]


def test_each_client_may_be_sent_other_entries_and_the_rest_does_not_travel() -> None:
    cohort = engine_of().cohort([0, 2], 0, training=True)
    tree = {"v": torch.tensor([[1.0], [2.0]]), "w": torch.tensor([[10.0, 20.0], [30.0, 40.0]])}
    reply = cohort.ask(Client.total, Each(tree, [{"v", "w"}, {"w"}]))
    assert reply["total"].tolist() == [31, 70]
    assert [(e.client, e.down) for e in cohort.state.exchanges] == [(0, 12), (2, 8)]


def test_what_carries_a_gradient_is_not_sent() -> None:
    cohort = engine_of().cohort([0], 0, training=True)
    with pytest.raises(ValueError, match="no gradient crosses the network"):
        cohort.ask(Client.echo, {"w": torch.ones(1, requires_grad=True) * 2})


def test_who_remembers_what_is_no_tensor_is_told_so() -> None:
    class Counting(Client):
        @step
        def count(self) -> Tree:
            self.memory["rounds"] = 1
            return {"one": torch.ones(1)}

    cohort = LoopEngine(make_task(), Counting, None, seed=0).cohort([0], 0, training=True)
    with pytest.raises(AllLostError, match=r"must remember a .nested. dict of tensors"):
        cohort.ask(Counting.count)


def test_who_diverges_while_served_is_lost_and_the_others_are_served() -> None:
    """A newcomer of Local, whose model diverges as it trains."""
    ours = Federation("local", make_task(novel=2), local_steps=3, novel_steps=3)
    ours.task.x[ours.task.train[3]] = torch.nan
    cohort = ours.engine.cohort([2, 3], 0, training=False)
    ours.server.personalize(cohort)
    assert cohort.state.lost == {3: "what it would remember is not finite"}
    assert cohort.weight.tolist() == [EXAMPLES[2], 0]


def test_sizes_group_a_cohort_and_share_its_fate() -> None:
    sizes = ("S", "L", "S", "L")
    task = make_task(models={"S": TwoLayers().double(), "L": TwoLayers().double()}, sizes=sizes)
    cohort = engine_of(task, Config((1,), "raise")).cohort([0, 1, 2, 3], 0, training=True)
    groups = cohort.sizes
    assert {size: group.ids.tolist() for size, group in groups.items()} == {
        "S": [0, 2],
        "L": [1, 3],
    }
    assert groups["L"].size == "L"
    groups["L"].ask(Client.echo, MODEL)
    assert cohort.weight.tolist() == [EXAMPLES[0], 0, EXAMPLES[2], EXAMPLES[3]]


def test_injected_faults_shrink_a_cohort_reproducibly() -> None:
    def lost(faults: Faults, training: bool = True, seed: int = 0) -> dict[int, str]:
        engine = engine_of(make_task(examples=(5,) * 40), faults=faults, seed=seed)
        cohort = engine.cohort(range(40), 3, training=training)
        cohort.ask(Client.echo, MODEL)
        return dict(cohort.state.lost)

    dropped = lost(Faults(drop=0.3))
    assert 3 <= len(dropped) <= 25
    assert dropped == lost(Faults(drop=0.3))
    assert lost(Faults(drop=0.3), seed=1) != dropped
    assert lost(Faults(nan=0.3), seed=1) != lost(Faults(nan=0.3))
    assert set(lost(Faults(nan=0.3)).values()) == {"the reply is not finite"}
    assert lost(Faults(drop=0.3), training=False) == {}


# Known clients while others are served.


def test_known_clients_of_every_size_can_be_asked_while_a_novel_one_is_served() -> None:
    models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"), novel=1)
    cohort = engine_of(task).cohort([3], 5, training=False)
    known = cohort.sizes["L"].known
    assert known.ids.tolist() == [0, 1, 2]
    assert known.weight.tolist() == list(EXAMPLES[:3])
    assert {size: group.ids.tolist() for size, group in known.sizes.items()} == {
        "S": [0, 2],
        "L": [1],
    }
    assert (known.novel, known.round) == (False, 5)


def test_known_clients_remember_but_what_they_write_meanwhile_is_not_kept() -> None:
    engine = engine_of(make_task(novel=1))
    training = engine.cohort([0, 2], 0, training=True)
    training.ask(Client.remember)
    engine.commit(training)
    cohort = engine.cohort([3], 1, training=False)
    for turn in (1, 2):  # one cohort however often it is asked for
        reply = cohort.known.ask(Client.remember)
        assert reply["memory"].tolist() == [1 + turn, turn, 1 + turn]
        assert reply["scratch"].tolist() == [turn] * 3
    engine.commit(cohort)
    assert {client: tree["count"].item() for client, tree in engine.memory.items()} == {0: 1, 2: 1}


def test_messages_to_known_clients_are_counted_with_the_others() -> None:
    cohort = engine_of(make_task(novel=1)).cohort([3], 0, training=False)
    cohort.ask(Client.echo, MODEL)
    cohort.known.ask(Client.remember)
    counted = [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges]
    assert counted == [("echo", 3, 8, 8), *(("remember", client, 0, 16) for client in range(3))]


def test_a_newcomers_known_clients_are_those_of_its_engines_home() -> None:
    home = engine_of()
    training = home.cohort([1], 0, training=True)
    training.ask(Client.remember)
    home.commit(training)
    engine = engine_of(make_task(novel=1, examples=(5,)), home=home)
    known = engine.cohort([0], 4, training=False).known
    assert known.ids.tolist() == [0, 1, 2, 3]
    assert known.ask(Client.remember)["memory"].tolist() == [1, 2, 1, 1]


def test_where_nobody_is_known_nobody_can_be_asked() -> None:
    cohort = engine_of(make_task(novel=1, examples=(5,))).cohort([0], 0, training=False)
    with pytest.raises(UserError, match="all clients of task toy are novel; give"):
        _ = cohort.known


# What is posted.


class Poster(Client):
    """Steps that can run later."""

    @step(deferrable=True)
    def add(self, own: Tree) -> Tree:
        """Tells what the client remembers of the round, and what it was sent."""
        memory, scratch = self.memory["count"], self.scratch["count"]
        return self.answer({"own": own["w"], "memory": memory, "scratch": scratch})

    @step(deferrable=True)
    def scribble(self) -> Tree:
        self.memory["count"] = self.memory["count"] + 1
        return {}

    @step(deferrable=True)
    def threads(self) -> Tree:
        return {"threads": torch.tensor(torch.get_num_threads())}


class Counting(LoopEngine):
    """Notes what it is asked, message by message."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.messages: list[list[tuple[str, int]]] = []

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        self.messages.append([(call.step, call.client) for call in calls])
        return super().answer(calls)


def posting(task: Task | None = None, **options: Any) -> Counting:
    return Counting(task or make_task(), Poster, Config(), seed=0, **options)


def opened(engine: Counting, *clients: int, number: int = 0) -> EngineCohort:
    """A round whose clients have been asked something, so that they can be posted something."""
    cohort = engine.cohort(clients, number, training=True)
    cohort.ask(Poster.remember)
    return cohort


def own_of(clients: int) -> Each:
    return Each({"w": torch.arange(clients) + 10.0})


def test_what_is_posted_travels_with_the_next_message() -> None:
    engine = posting()
    cohort = opened(engine, 0, 1)
    pending = cohort.post(Poster.add, own_of(2))
    engine.commit(cohort)
    after = engine.cohort([1, 2], 1, training=True)
    assert after.ask(Poster.remember) == {
        "memory": pytest.approx(torch.tensor([2, 1])),
        "scratch": pytest.approx(torch.tensor([1, 1])),
    }
    reply = {name: leaf.tolist() for name, leaf in pending.reply().items()}
    assert reply == {"own": [10, 11], "memory": [1, 1], "scratch": [1, 1]}
    assert pending.weight.tolist() == list(EXAMPLES[:2])
    engine.commit(after)
    assert {client: int(tree["count"]) for client, tree in engine.memory.items()} == {
        0: 1,
        1: 2,
        2: 1,
    }
    assert engine.messages == [
        [("remember", 0), ("remember", 1)],
        [("add", 0), ("add", 1), ("remember", 1), ("remember", 2)],
    ]


def test_what_is_posted_travels_alone_where_it_is_read_before() -> None:
    engine = posting()
    pending = opened(engine, 0, 3).post(Poster.add, own_of(2))
    assert pending.weight.tolist() == [EXAMPLES[0], EXAMPLES[3]]
    assert pending.reply()["own"].tolist() == [10, 11]
    engine.cohort([1], 1, training=True).ask(Poster.remember)
    assert engine.messages[1:] == [[("add", 0), ("add", 3)], [("remember", 1)]]


def at_once(engine: Counting) -> None:
    assert engine.waiting


def with_training(engine: Counting) -> None:
    engine.cohort([1, 2], 1, training=True).ask(Poster.remember)


def with_an_evaluation(engine: Counting) -> None:
    engine.cohort([0, 1], 1, training=False).ask(Poster.evaluate, engine.task.outline().initial())


def with_known_clients(engine: Counting) -> None:
    newcomer = engine_of(make_task(novel=1, examples=(5,)), home=engine)
    newcomer.cohort([0], 1, training=False).known.ask(Poster.remember)


def with_other_memories(engine: Counting) -> None:
    """As a run does to serve the models of its best round."""
    engine.memory = {}
    with_training(engine)


WAYS = [at_once, with_training, with_an_evaluation, with_known_clients, with_other_memories]


@pytest.mark.parametrize("travel", WAYS)
def test_when_it_travels_changes_no_result(travel: Callable[[Counting], None]) -> None:
    engine = posting(faults=Faults(nan=0.3))  # client 1's numbers, in round 1
    for number in range(2):
        cohort = engine.cohort(range(4), number, training=True)
        cohort.ask(Poster.remember)
        engine.commit(cohort)
    sent = torch.arange(4) + 10.0
    pending = cohort.post(Poster.add, Each({"w": sent}))
    sent += 1  # as an optimiser would
    del cohort
    gc.collect()  # what its clients wrote must outlive it
    travel(engine)
    assert pending.weight.tolist() == [EXAMPLES[0], 0, *EXAMPLES[2:]]
    reply = {name: leaf.tolist() for name, leaf in pending.reply().items()}
    assert reply == {"own": [10, 0, 12, 13], "memory": [2, 0, 2, 2], "scratch": [1, 0, 1, 1]}


@pytest.mark.parametrize("how", ["raise", "nan", "shape"])
def test_who_is_lost_by_what_was_posted_stays_in_its_round_and_is_reported(how: str) -> None:
    engine = posting()
    cohort = opened(engine, 0, 1, 2)
    pending = cohort.post(Poster.add, own_of(3))
    engine.config = Config((1,), how)
    assert pending.weight.tolist() == [EXAMPLES[0], 0, EXAMPLES[2]]
    assert all(bool(leaf[1].eq(0).all()) for _, leaf in trees.leaves(pending.reply()))
    assert [client for client, _ in cohort.state.late] == [1]
    assert cohort.state.lost == {}
    assert cohort.weight.tolist() == list(EXAMPLES[:3])
    engine.commit(cohort)
    assert set(engine.memory) == {0, 1, 2}


def test_a_client_that_is_lost_before_is_not_posted_to() -> None:
    engine = posting()
    cohort = opened(engine, 0, 1)
    engine.config = Config((0,), "raise")
    cohort.ask(Poster.echo, MODEL)
    assert cohort.post(Poster.add, own_of(2)).weight.tolist() == [0, EXAMPLES[1]]
    assert engine.messages[-1] == [("add", 1)]
    assert cohort.state.late == []


def test_where_nobody_answers_what_was_posted_others_are_asked_all_the_same() -> None:
    engine = posting()
    pending = opened(engine, 0, 1).post(Poster.add, own_of(2))
    engine.config = Config((0, 1), "raise")
    after = engine.cohort([0, 2], 1, training=True)
    assert after.ask(Poster.total, MODEL)["total"].tolist() == [2, 2]
    assert pending.reply() == {}
    assert pending.weight.tolist() == [0, 0]
    assert after.state.lost == {}


def test_an_exchange_that_fails_leaves_waiting_what_was_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = posting()
    pending = opened(engine, 0).post(Poster.add, own_of(1))

    def refuse(calls: Sequence[Call]) -> list[Tree | Exception]:
        raise UserError("the sites are gone")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "answer", refuse)
        with pytest.raises(UserError):
            pending.reply()
    assert pending.reply()["own"].tolist() == [10]


def test_bytes_of_what_was_posted_are_counted_once_where_it_was_posted() -> None:
    engine = posting()
    cohort = opened(engine, 0, 1)
    pending = cohort.post(Poster.add, own_of(2))
    assert len(cohort.state.exchanges) == 2
    after = engine.cohort([1], 1, training=True)
    after.ask(Poster.echo, MODEL)
    pending.reply()
    counted = [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges[2:]]
    assert counted == [("add", 0, 4, 4 + 8 + 8), ("add", 1, 4, 4 + 8 + 8)]
    assert [(e.step, e.client) for e in after.state.exchanges] == [("echo", 1)]


def test_each_target_size_can_be_posted_something() -> None:
    models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    engine = posting(make_task(models=models, sizes=("S", "L", "S", "L")))
    groups = opened(engine, 0, 1, 2).sizes
    pending = {
        size: group.post(Poster.add, own_of(2)) for size, group in groups.items() if size == "S"
    }
    groups["L"].ask(Poster.echo, MODEL)
    pending["L"] = groups["L"].post(Poster.add, own_of(1))
    assert {size: each.reply()["own"].tolist() for size, each in pending.items()} == {
        "S": [10, 11],
        "L": [10],
    }
    assert len(engine.messages) == 3


def test_what_travels_along_changes_nobodys_number_of_cores() -> None:
    """With it the last bits of a result would depend on when it travels."""
    engine = posting()
    engine.cores = 2
    pending = opened(engine, 0).post(Poster.threads)
    alone = engine.cohort([1], 1, training=True)
    assert alone.ask(Poster.threads)["threads"].tolist() == [2]
    assert pending.reply()["threads"].tolist() == [2]


def test_what_cannot_be_posted_is_refused() -> None:
    engine = posting()
    cohort = opened(engine, 0, 1)
    with pytest.raises(ValueError, match=r"echo is not marked @step\(deferrable=True\)"):
        cohort.post(Poster.echo, MODEL)
    with pytest.raises(ValueError, match="no gradient crosses the network"):
        cohort.post(Poster.add, {"w": torch.ones(1, requires_grad=True) * 2})
    served = engine.cohort([0], 0, training=False)
    served.ask(Poster.remember)
    with pytest.raises(ValueError, match="only in a training round"):
        served.post(Poster.threads)
    with pytest.raises(ValueError, match="client 2 was asked nothing before threads"):
        engine.cohort([2], 0, training=True).post(Poster.threads)
    cohort.post(Poster.threads)
    for again in (cohort.post, cohort.ask):
        with pytest.raises(ValueError, match="threads came after it for client 0; ask it before"):
            again(Poster.threads)


def test_a_step_that_can_run_later_may_not_write_memory() -> None:
    engine = posting()
    cohort = opened(engine, 0)
    pending = cohort.post(Poster.scribble)
    assert pending.reply() == {}
    ((client, reason),) = cohort.state.late
    assert client == 0
    assert "PermissionError: a step marked @step(deferrable=True) must not write memory" in reason
    engine.commit(cohort)
    assert engine.memory[0]["count"] == 1


# Any engine.


class Sites:
    """An engine as real ones will be: two sites, which hold memories, and messages between."""

    name = "sites"
    home = None
    device = CPU

    def __init__(self, task: Task, client: Any, config: Any, *, seed: int) -> None:
        self.task, self.client, self.seed, self.faults = task, client, seed, Faults()
        self.sites = [LoopEngine(task, client, config, seed=seed) for _ in range(2)]
        self.numbers = count()
        self.waiting: list[Question] = []
        self.traffic: dict[str, int] = {}
        self.private = self.masking = None

    @property
    def memory(self) -> dict[int, Tree]:
        return {i: tree for site in self.sites for i, tree in sorted(site.memory.items())}

    @memory.setter
    def memory(self, memory: dict[int, Tree]) -> None:
        for parity, site in enumerate(self.sites):
            site.memory = {i: tree for i, tree in memory.items() if i % 2 == parity}

    def cohort(self, ids: Sequence[int], round: int, *, training: bool) -> EngineCohort:
        return EngineCohort(self, ids, CohortState(next(self.numbers), round, training))

    def commit(self, cohort: EngineCohort) -> None:
        for site in self.sites:
            site.memories.keep(cohort.state.number, cohort.there)

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        replies = {}
        for parity, site in enumerate(self.sites):
            mine = {place: call for place, call in enumerate(calls) if call.client % 2 == parity}
            message = pickle.dumps(list(mine.values()))
            replies |= zip(mine, site.answer(pickle.loads(message)), strict=True)
        return [pickle.loads(pickle.dumps(replies[place])) for place in range(len(calls))]

    def saved(self, *memories: Mapping[int, Tree]) -> None:
        pass

    def resources(self, clients: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        for site in self.sites:
            site.close()


DELAYED = {"delayed_gradient": True}


@pytest.mark.parametrize(
    ("method", "own"), [("pfedhn_pc", {}), ("pefll", {}), ("pefll", DELAYED), ("itpfl", {})]
)
def test_an_engine_only_has_to_answer_calls(method: str, own: dict[str, Any]) -> None:
    task = make_task(Normed, novel=1)
    short = {"local_steps": 3, "batch_size": 4} | own
    here, there = Federation(method, task, **short), Federation(method, task, **short)
    engine: Engine = Sites(task, there.method.Client, there.config, seed=0)
    there.engine = engine  # type: ignore[assignment]
    found = []
    for ours in (here, there):
        for number, clients in enumerate([[0, 1, 2], [1, 2]]):
            ours.round(clients, number)
        counts = evaluate(ours.server, ours.engine, [0, 1, 2], 2)["test"]
        found.append(
            {"server": ours.server.state(), "loss": counts.loss}
            | {str(client): tree for client, tree in ours.engine.memory.items()}
        )
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_is_posted_to_all_alike_is_what_it_was_then() -> None:
    engine = posting()
    cohort, sent = opened(engine, 0, 1), {"w": torch.ones(2)}
    pending = cohort.post(Poster.add, sent)
    sent["w"] += 1  # as an optimiser would
    assert pending.reply()["own"].tolist() == [[1, 1]] * 2
