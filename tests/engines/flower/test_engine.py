"""The Flower engine keeps the contract, over a Grid that serialises but needs no network."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.flower.sites import DirectLink, remote, sites_of
from hyperfed import federation, trees
from hyperfed.data.own import mean_squared_error, minus_squared_error
from hyperfed.data.roster import RemoteTask, enrol
from hyperfed.engines.flower import site as site_module
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.grid import GridLink
from hyperfed.engines.flower.sites import HELLO, STEP, Sites
from hyperfed.engines.flower.wire import MOST_INTRODUCED
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.engines.replies import BadReplyError, NoAnswerError
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, step
from hyperfed.methods import METHODS
from hyperfed.runs.config import from_keys
from hyperfed.runs.evaluation import evaluate, finetuned
from hyperfed.runs.run import Run
from hyperfed.runs.tally import Tally
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.training import Steps
from hyperfed.trees import Tree
from toys import ONE_STEP, Federation, Normed, Stemmed, TwoLayers, close, make_task

flwr = pytest.importorskip("flwr")


from engines.flower.grid_double import Remote, both, settings_of, values  # noqa: E402

ALL = sorted(METHODS)

pytestmark = pytest.mark.usefixtures("inside_a_flower_process")


@pytest.mark.parametrize("method", ALL)
def test_a_round_equals_that_of_the_reference_engine(method: str, tmp_path: Path) -> None:
    ours, loop = both(method, tmp_path, net=Stemmed)
    for number, clients in enumerate(([0, 1, 2], [0, 2, 3])):
        ours.round(clients, number)
        loop.round(clients, number)
    expected = loop.server.state()
    close(ours.server.state(), expected)
    remembering = {client for client, memory in loop.engine.memory.items() if memory}
    assert set(ours.engine.memory) == remembering


@pytest.mark.parametrize("method", ["pfedhn", "pefll", "pfedkt", "itpfl"])
def test_ten_rounds_give_the_evaluations_of_the_reference_engine(
    method: str, tmp_path: Path
) -> None:
    ours, loop = both(method, tmp_path, novel=1)
    for number in range(10):
        clients = [number % 3, (number + 1) % 3]
        ours.round(clients, number)
        loop.round(clients, number)
    for ids in ([0, 1, 2], [3]):
        here = evaluate(ours.server, ours.engine, ids, 10)
        there = evaluate(loop.server, loop.engine, ids, 10)
        torch.testing.assert_close(values(here), values(there), rtol=1e-9, atol=1e-9)


def test_a_site_is_given_what_is_frozen_once_and_again_where_it_lost_it(tmp_path: Path) -> None:
    """The sites build their targets from another seed, as another version of PyTorch would."""
    ours, loop = both("fedavg", tmp_path, net=Stemmed)
    with seeded(1, "toy"):
        other = Stemmed().double()
    sites = sites_of(loop.task, ours.module, ours.config, tmp_path, {11: [0, 2], 7: [1, 3]})
    link = DirectLink(sites)
    ours.task = remote(loop.task, link, sites)
    for site in sites.values():
        site.source = replace(site.source, whole=replace(loop.task, models={"base": other}))
    ours.engine = ours.new_engine()

    def given() -> list[bool]:
        steps = [content for kind, _, content in link.sent if kind != HELLO]
        link.sent.clear()
        return sorted(bool(wire.unpack_request(content).weights) for content in steps)

    for number, expected in enumerate([True, False, False]):
        for each in (ours, loop):
            each.round([0, 1, 2], number)
        assert given() == [expected] * 2
    for path in (tmp_path / "7").glob("frozen-*"):
        path.unlink()
    lost = ours.round([0, 1], 3).state.lost
    assert list(lost) == [1]
    assert "what is frozen in the targets must be in" in lost[1]
    loop.round([0], 3)
    assert given() == [False, False]
    for each in (ours, loop):
        each.round([0, 1, 2], 4)
    assert given() == [False, True]
    close(ours.server.state(), loop.server.state())


def test_replies_computed_in_bfloat16_may_be_of_any_floating_point_type(tmp_path: Path) -> None:
    task, method = make_task(), METHODS["fedavg"]
    sites = sites_of(task, method, method.Config(**ONE_STEP), tmp_path, {7: [0]})
    link = remote(task, DirectLink(sites), sites)
    promised = trees.structure({"w": torch.ones(2)})
    for precision, taken in (("bf16", True), ("float32", False)):
        engine = FlowerEngine(link, method.Client, None, seed=0, precision=precision)
        half = engine._as_promised({"w": torch.ones(2).bfloat16()}, promised)
        assert isinstance(half, BadReplyError) != taken
        for wrong in (torch.ones(2).long(), torch.ones(3)):
            assert isinstance(engine._as_promised({"w": wrong}, promised), BadReplyError)


def test_clients_that_are_computed_together_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_module, "best_engine", lambda device: VmappedEngine)
    ours, loop = both("fedper", tmp_path, examples=(12,) * 4)
    for number in range(2):  # the heads of the second round are those of the first
        for each in (ours, loop):
            each.round([0, 1, 2, 3], number)
    assert ours.engine.memory.keys() == loop.engine.memory.keys() == {0, 1, 2, 3}
    close(ours.server.state(), loop.server.state())


def test_a_client_belongs_to_its_key_in_training_too(tmp_path: Path) -> None:
    task, method = make_task(), METHODS["fedavg"]
    sites = sites_of(task, method, method.Config(**ONE_STEP), tmp_path, {7: [0, 1], 8: [2, 3]})
    link = DirectLink(sites)
    link.keys = {7: "B", 8: "C"}
    introductions = [each.source.introduce() for each in sites.values()]
    roster = enrol(introductions, run=1, keys={"000000": "A", "000002": "C"})
    known = RemoteTask.of(roster, task.models, task.name, link)
    engine = FlowerEngine(known, method.Client, method.Config(**ONE_STEP), seed=0)
    cohort = engine.cohort([0, 2], 0, training=True)
    cohort.ask(method.Client.train_model, task.initial("base"), batches=Steps(1, 4))
    assert cohort.there == [2]
    assert "belongs to A" in cohort.state.lost[0]


def test_no_more_of_a_reply_is_taken_than_an_honest_one_has(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[int, int]]] = []

    class Noting(DirectLink):
        def exchange(self, kind: str, contents: Any, timeout: float, most: Any) -> Any:
            found = super().exchange(kind, contents, timeout, most)
            asked.append((kind, dict(most)))
            lengths.extend(len(reply) for reply in found.values() if kind == STEP)
            return found

    lengths: list[int] = []
    task, method = make_task(), METHODS["fedavg"]
    sites = sites_of(task, method, method.Config(**ONE_STEP), tmp_path, {7: [0, 1]})
    known = remote(task, Noting(sites), sites)
    engine = FlowerEngine(known, method.Client, method.Config(**ONE_STEP), seed=0)
    cohort = engine.cohort([0, 1], 0, training=True)
    cohort.ask(method.Client.train_model, task.initial("base"), batches=Steps(1, 4))
    assert [kind for kind, _ in asked] == [HELLO, STEP]
    assert asked[0][1] == {7: MOST_INTRODUCED}
    assert lengths[0] < asked[1][1][7] < 100_000


def test_frozen_weights_that_are_not_what_was_announced_are_refused(tmp_path: Path) -> None:
    task = make_task(Stemmed)
    sites = sites_of(task, METHODS["fedavg"], METHODS["fedavg"].Config(), tmp_path, {7: [0]})
    engine = FlowerEngine(
        remote(task, DirectLink(sites), sites), METHODS["fedavg"].Client, None, seed=0
    )
    engine._frozen = "0" * 32
    answers = engine.cohort([0], 0, training=True)
    with pytest.raises(AllLostError, match="must have the hash that came with it"):
        answers.ask(METHODS["fedavg"].Client.evaluate, {})
    assert not list((tmp_path / "7").glob("frozen-*"))


def test_names_that_came_after_a_run_began_are_not_kept(tmp_path: Path) -> None:
    task, method = make_task(), METHODS["fedavg"]
    sites = sites_of(task, method, method.Config(**ONE_STEP), tmp_path, {7: [0, 1], 8: [2, 3]})
    known = remote(task, DirectLink(sites), {7: sites[7]})
    engine = FlowerEngine(known, method.Client, method.Config(**ONE_STEP), seed=0)
    engine.cohort([0], 0, training=True).ask(method.Client.evaluate, task.initial("base"))
    assert engine._sites is not None
    assert known.roster is not None
    assert engine._sites.keys.keys() == known.roster.numbers.keys()


@pytest.mark.parametrize("method", ["fedper", "pefll"])
def test_sites_fine_tune_the_models_of_their_clients(method: str, tmp_path: Path) -> None:
    ours, loop = both(method, tmp_path, net=Normed, novel=1)
    for each in (ours, loop):
        each.round([0, 1, 2])
    for ids in ([0, 1, 2], [3]):
        here, there = (
            evaluate(
                each.server,
                each.engine,
                ids,
                10,
                serve=finetuned(each.server.personalize, each.engine.client, Steps(3, 4)),
            )
            for each in (ours, loop)
        )
        torch.testing.assert_close(values(here), values(there), rtol=1e-9, atol=1e-9)
        plain = evaluate(ours.server, ours.engine, ids, 10)
        assert not torch.equal(here["test"].loss, plain["test"].loss)


def test_several_target_sizes(tmp_path: Path) -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    ours, loop = both("pfedhn", tmp_path, models=models, sizes=("S", "L", "S", "L"))
    for each in (ours, loop):
        each.round([0, 1, 2, 3])
    expected = loop.server.state()
    close(ours.server.state(), expected)


def test_one_message_to_a_site_holds_all_that_its_clients_are_asked(tmp_path: Path) -> None:
    ours, _ = both("pefll", tmp_path)
    ours.round([0, 1, 2, 3])
    steps = [node for node, kind in ours.grid.delivered if kind != HELLO]
    assert sorted(steps) == [7] * 3 + [11] * 3  # PeFLL's three messages, to each of the two
    assert sorted(set(ours.grid.delivered) - {(7, "train.step"), (11, "train.step")}) == [
        (7, HELLO),
        (11, HELLO),
    ]
    resources = ours.engine.resources(4)
    assert resources["sites"] == 2
    assert resources["message_bytes_down"] > resources["message_bytes_up"] > 0


# What is posted travels with the next message.


def messages(ours: Remote) -> list[int]:
    """How many each of the two sites has had."""
    delivered = [node for node, kind in ours.grid.delivered if kind != HELLO]
    return [delivered.count(node) for node in (7, 11)]


ROUNDS = [[0, 1, 2, 3], [1, 2], [0, 1, 3], [2, 3], [0, 1, 2, 3]]
"""Cohorts with clients at both sites, some of them twice in a row."""


@pytest.mark.parametrize(("delayed", "exchanges"), [(False, 3), (True, 2)])
def test_a_delayed_gradient_saves_pefll_an_exchange_in_each_round(
    delayed: bool, exchanges: int, tmp_path: Path
) -> None:
    task, own = make_task(Normed), {"delayed_gradient": delayed}
    ours = Remote("pefll", task, tmp_path, **own)
    loop = Federation("pefll", task, **settings_of("pefll"), **own)
    travelled: list[list[Any]] = [[], []]
    for number, clients in enumerate(ROUNDS):
        for each, cohorts in zip((ours, loop), travelled, strict=True):
            cohorts.append(each.round(clients, number).state.exchanges)
        assert messages(ours) == [exchanges * (number + 1)] * 2
    expected = loop.server.state()
    close(ours.server.state(), expected)
    assert travelled[0] == travelled[1]
    assert messages(ours) == [exchanges * len(ROUNDS) + delayed] * 2  # the state's own
    left = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.rglob("*.safetensors"))
    assert set(left) <= {len(ROUNDS) - 2, len(ROUNDS) - 1}  # what older rounds wrote is dropped


def test_a_run_with_a_delayed_gradient_equals_that_of_the_reference_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every evaluation, bytes and losses too; checkpoints fall between evaluations."""
    late, count = list[Any](), Tally.count

    def watched(tally: Tally, bytes: dict[str, int]) -> None:
        late.extend(tally.late)
        count(tally, bytes)

    monkeypatch.setattr(Tally, "count", watched)
    faults = {"drop": 0.1, "nan": 0.3}
    own = settings_of("pefll") | {"delayed_gradient": True}
    keys = {"rounds": 10, "evaluate_every": 3, "checkpoint_every": 2, "cohort": 3, "faults": faults}
    task, found = make_task(Normed, novel=1), []
    ours = Remote("pefll", task, tmp_path / "sites", delayed_gradient=True)
    for name, data in (("loop", task), ("flower", ours.task)):
        settings = from_keys("pefll", keys | {"method": own, "engine": {"name": name}})
        run = Run.start(settings, tmp_path / name, data)
        said = [lost for progress in run.train() for lost in progress.lost]
        recorded = [lost for each in run.evaluations if each.split == "val" for lost in each.lost]
        assert said == recorded
        found.append(run)
    for here, there in zip(*(run.evaluations for run in found), strict=True):
        assert here.client_loss == pytest.approx(there.client_loss, rel=1e-9)
        for field in ("round", "split", "client_accuracy", "bytes_down", "bytes_up", "lost"):
            assert getattr(here, field) == getattr(there, field)
    assert late


@pytest.mark.parametrize("method", ["fedavg", "pefll"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_errors_of_a_regression_are_the_same_on_every_engine(
    size: int, method: str, tmp_path: Path
) -> None:
    """The root of the mean over all examples, from the sums of each client; R2 on request."""
    options = {"loss": mean_squared_error, "score": minus_squared_error, "metrics": ("r2",)}
    task = make_task(lambda: nn.Linear(5, size), classes=0, **options)
    y = task.x[:, :3] * 3 + task.x[:, 1:4] + torch.arange(10, 13)
    task = replace(task, y=y[:, 0] if size == 1 else y)
    ours = Remote(method, task, tmp_path)
    keys = {"rounds": 2, "evaluate_every": 1, "cohort": 1.0, "method": settings_of(method)}
    found = {}
    for name, data in (("loop", task), ("vmap", task), ("flower", ours.task)):
        run = Run(from_keys(method, keys | {"engine": {"name": name}, "metrics": ["r2"]}), data)
        list(run.train())
        found[name] = {key: run.summary[f"test_{key}"] for key in ("rmse", "mse", "r2")}
    assert found["vmap"] == pytest.approx(found["loop"], rel=1e-12)
    assert found["flower"] == pytest.approx(found["loop"], rel=1e-12)
    unasked = Run(from_keys(method, keys | {"engine": {"name": "flower"}}), ours.task)
    assert (unasked.task.metrics, Run(from_keys(method, keys), task).task.metrics) == (
        (),
        ("r2",),
    )


class Remembering(federation.Client):
    """Counts its rounds."""

    @step
    def count(self) -> Tree:
        self.memory["count"] = self.memory.get("count", torch.tensor(0)) + 1
        self.scratch["count"] = self.memory["count"] * 10
        return {"count": self.memory["count"]}

    @step(deferrable=True)
    def recall(self) -> Tree:
        return {"memory": self.memory["count"], "scratch": self.scratch["count"]}


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_posted_finds_and_leaves_the_memory_of_its_round(
    gone: bool, tmp_path: Path
) -> None:
    task, method = make_task(), SimpleNamespace(Client=Remembering)
    sites = sites_of(task, method, None, tmp_path, {7: [0, 1], 11: [2, 3]})
    link = DirectLink(sites)
    engine = FlowerEngine(remote(task, link, sites), Remembering, None, seed=0)

    def one_round(number: int, *clients: int) -> tuple[Any, list[int]]:
        cohort = engine.cohort(clients, number, training=True)
        counts = cohort.ask(Remembering.count)["count"].tolist()
        pending = cohort.post(Remembering.recall)
        engine.commit(cohort)
        return pending, counts

    pending, counts = one_round(0, 0, 1, 2)
    assert counts == [1, 1, 1]
    if gone:
        link.broken[11] = lambda site, content: NoAnswerError("its site is gone")
    _, counts = one_round(1, 0, 2, 3)
    assert counts == ([2, 0, 0] if gone else [2, 2, 1])
    there = 0 if gone else 1
    assert pending.weight.sign().tolist() == [1, 1, there]
    assert pending.reply()["memory"].tolist() == [1, 1, there]
    assert pending.reply()["scratch"].tolist() == [10, 10, 10 * there]
    link.broken.clear()
    _, counts = one_round(2, 0, 1, 2)
    assert counts == [3, 2, 2 if gone else 3]


def test_a_server_that_starts_again_goes_on_with_what_sites_remember(tmp_path: Path) -> None:
    ours, loop = both("fedper", tmp_path)
    for number in range(2):
        for each in (ours, loop):
            each.round([0, 1, 2, 3], number)
    memory = trees.clone({str(c): tree for c, tree in ours.engine.memory.items()})
    ours.engine.saved(ours.engine.memory)
    ours.round([0, 1], 2)  # a round that no checkpoint has
    ours.server.load(trees.clone(loop.server.state()))
    ours.engine = ours.new_engine()
    ours.engine.memory = {int(client): tree for client, tree in memory.items()}
    for number in range(2, 5):
        for each in (ours, loop):
            each.round([0, 1, 3], number)
    expected = loop.server.state()
    close(ours.server.state(), expected)


def test_sites_keep_what_two_checkpoints_and_whoever_holds_a_memory_refer_to(
    tmp_path: Path,
) -> None:
    ours, _ = both("fedper", tmp_path)
    held = []
    for number in range(8):
        ours.round([0], number)
        if number in (1, 3, 5):
            ours.engine.saved(dict(ours.engine.memory))
        if number == 2:
            held.append(dict(ours.engine.memory))  # as a run does with its best round
    kept = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.rglob("*.safetensors"))
    assert kept == [2, 3, 5, 6, 7]
    held.clear()
    ours.round([0], 8)
    kept = sorted(int(path.stem.partition("-")[2]) for path in tmp_path.rglob("*.safetensors"))
    assert kept == [3, 5, 7, 8]


def test_a_run_that_was_resumed_can_be_resumed_from_the_checkpoint_before(tmp_path: Path) -> None:
    """Sites drop what no checkpoint refers to, and a resumed server has read but one of two."""
    task, module = make_task(), METHODS["fedper"]
    keys = {"rounds": 6, "checkpoint_every": 2, "evaluate_every": 6, "cohort": 1.0}
    config = from_keys("fedper", keys | {"method": ONE_STEP, "engine": {"name": "flower"}})
    sites = sites_of(task, module, config.settings, tmp_path, {7: [0, 1], 11: [2, 3]})

    def there() -> Task:
        return remote(task, DirectLink(sites), sites)

    def until(run: Run, round: int) -> None:
        for progress in run.train():
            assert progress.lost == ()
            if progress.round == round:
                break
        run.close()

    run = Run.start(config, tmp_path / "runs", there())
    assert run.folder is not None
    until(run, 4)  # of which and of 2 there are checkpoints
    until(Run.resume(run.folder.path, there()), 5)
    run.folder.state.write_bytes(b"torn")
    again = Run.resume(run.folder.path, there())
    assert again.round == 2
    until(again, 6)


def test_too_few_sites_are_told(tmp_path: Path) -> None:
    ours, _ = both("fedper", tmp_path)
    link = GridLink(ours.grid)
    assert len(Sites(link, 0.01).gather(2)) == 2
    with pytest.raises(UserError, match=r"engine.sites=3 .* but 2 did"):
        Sites(link, 0.01).gather(3)


def test_without_its_app_an_engine_asks_nobody(tmp_path: Path) -> None:
    ours, _ = both("fedper", tmp_path)
    task = remote(make_task(), None, ours.sites)
    engine = FlowerEngine(task, ours.module.Client, ours.config, seed=0)
    with pytest.raises(UserError, match="resume the run"):
        ours.server.round(engine.cohort([0], 0, training=True))


def test_the_server_has_no_example(tmp_path: Path) -> None:
    task = make_task()
    ours = Remote("fedper", task, tmp_path)
    assert len(ours.task.x) == len(ours.task.y) == 0
    assert [len(rows) for rows in ours.task.train] == [len(rows) for rows in task.train]
    held = [leaf for leaf in vars(ours.task).values() if isinstance(leaf, Tensor)]
    assert sum(leaf.numel() for leaf in held) == 0
    assert isinstance(ours.task.models["base"], nn.Module)
