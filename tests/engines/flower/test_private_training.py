"""A site adds noise to what its clients train, and keeps account of it, whatever a server says."""

import fcntl
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.flower.sites import DirectLink, remote
from hyperfed import trees
from hyperfed.data.roster import Frame
from hyperfed.data.site import SiteData
from hyperfed.engines.calls import Call, hash_of_data
from hyperfed.engines.flower import releases, site
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.flower.store import Store
from hyperfed.engines.flower.wire import Request, pack_request, unpack_response
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError
from hyperfed.methods import fedavg, fedper
from hyperfed.privacy import Ledger, multiplier_of, seeded_noise
from hyperfed.runs.private import charge
from hyperfed.system.randomness import generator
from hyperfed.training import Steps
from hyperfed.trees import Tree
from together import Recorded
from toys import ONE_STEP, make_task

TASK = make_task()
FRAME = Frame(known=4, novel=0, shape=(5,), dtype="torch.float64", classes=3)
CLIENT, CLIP = 2, 0.01
BUDGET = 4.0
PRIVATE = PrivateUpdates("local", CLIP, math.inf, BUDGET, 1e-3)
Z = multiplier_of(BUDGET, 1e-3, 1)
"""With so much noise one answer costs all."""


def site_in(folder: Path, **changes: Any) -> Site:
    rows = {"ann": (TASK.train[CLIENT], TASK.val[CLIENT], TASK.test[CLIENT])}
    data = SiteData(TASK.x, TASK.y, 3, rows, models=lambda frame: TASK.models)
    options = {"seed": 0, "private": PRIVATE, "method": "fedavg"} | changes
    return Site(data, folder, fedavg.Client, fedavg.Config(**ONE_STEP), **options)


def request(serial: int = 1, **changes: Any) -> Request:
    model = TASK.initial("base")
    call = Call(serial, serial, CLIENT, "train_model", (model,), Steps(1, 10_000))
    made = Request(1, 10, serial, FRAME, {CLIENT: "ann"}, [call], {}, {}, [serial], multiplier=Z)
    return replace(made, **changes)


def asked(site: Site, request: Request) -> Tree | Exception:
    return unpack_response(site.handle(pack_request(request))).answers[0]


def change(answer: Tree | Exception) -> Tensor:
    assert isinstance(answer, dict), answer
    parts = trees.subtract(answer, TASK.initial("base"))
    return torch.cat([leaf.flatten() for _, leaf in sorted(parts.items())])


def test_whoever_knows_the_seed_cannot_take_the_noise_away(tmp_path: Path) -> None:
    told, twin = (change(asked(site_in(tmp_path / name), request())) for name in "ab")
    sigma = 2 * CLIP * Z
    assert told.square().mean().sqrt() == pytest.approx(sigma, rel=0.5)  # what was learned is less
    assert (told - twin).abs().min() > 0
    (call,) = request().calls
    about = hash_of_data(TASK, CLIENT)
    for named in (call.question(sigma, 0, about), call.question(sigma, 0), call.question(sigma)):
        theirs = sigma * seeded_noise(generator(0, "noise", CLIENT, named))(told)
        assert (told - theirs).abs().max() > 0.1 * sigma


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Has sites compute clients together, as on an accelerator; returns who was."""
    noted: list[tuple[str, list[int]]] = []

    class Noting(Recorded):
        def answer(self, calls: Any) -> Any:
            found = super().answer(calls)
            noted.extend(self.together)
            return found

    monkeypatch.setattr(site, "best_engine", lambda device: Noting)
    return noted


def of_two(folder: Path, **changes: Any) -> list[Tree | Exception]:
    """The answers of two clients of a site to one message."""
    task = make_task(examples=(12,) * 4)
    data = Shard(task, (0, 1))
    options = {"seed": 0, "private": PRIVATE, "method": "fedavg"} | changes
    there = Site(data, folder, fedavg.Client, fedavg.Config(**ONE_STEP), **options)
    model = task.initial("base")
    calls = [Call(1, 1, client, "train_model", (model,), Steps(1, 4)) for client in (0, 1)]
    names = {client: f"{client:06d}" for client in (0, 1)}
    asks = Request(1, 10, 1, FRAME, names, calls, {}, {}, [1], multiplier=Z)
    answers = unpack_response(there.handle(pack_request(asks))).answers
    return [answers[place] for place in (0, 1)]


def test_noise_is_as_secret_where_clients_are_computed_together(
    tmp_path: Path, together: list[tuple[str, list[int]]]
) -> None:
    ours, twins = ([change(each) for each in of_two(tmp_path / name)] for name in "ab")
    assert together == [("train_model", [0, 1])] * 2
    for one, other in zip(ours, twins, strict=True):
        assert (one - other).abs().min() > 0


def test_a_sites_epsilon_holds_where_clients_are_computed_together(
    tmp_path: Path, together: list[tuple[str, list[int]]]
) -> None:
    policy = Policy(smallest_reply=1, smallest_batch=1, epsilon=0.9 * BUDGET)
    for refused in of_two(tmp_path, policy=policy):
        assert "must stay within epsilon 3.6" in str(refused)
    assert together == [("train_model", [0, 1])]


def test_an_account_is_written_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs that ask at once both would read it before either writes it."""
    waits = []
    save = releases.save_state

    def written_while_others_wait(path: Path, *given: Any) -> None:
        with (path.parent / "lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits.append(path.name)
        save(path, *given)

    monkeypatch.setattr(releases, "save_state", written_while_others_wait)
    assert isinstance(asked(site_in(tmp_path), request()), dict)
    assert waits == ["_ann.safetensors"]


def test_asked_anew_it_spends_anew_and_not_beyond_its_budget(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [{}, {"run": 2}, {"open": []}, {"session": 11}]
    half = {"multiplier": 2 * Z}
    made = [request(serial, **way, **half) for serial, way in enumerate(ways, start=1)]
    answers = [asked(site_in(tmp_path), each) for each in made]
    assert len({float(change(answer).sum()) for answer in answers}) == 4
    refused = asked(site_in(tmp_path), request(9, session=12, multiplier=2 * Z))
    assert "must stay within epsilon 4 at delta 0.001" in str(refused)
    response = unpack_response(site_in(tmp_path).handle(pack_request(request(10, session=12))))
    assert response.spent[0] == {2 * Z: 4}


def test_a_message_that_comes_again_has_the_answer_that_it_had(tmp_path: Path) -> None:
    first, again = (asked(site_in(tmp_path), request()) for _ in range(2))
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_a_server_cannot_have_the_noise_left_out_or_weakened(tmp_path: Path) -> None:
    refused = asked(site_in(tmp_path), request(multiplier=None))
    assert "must say how much noise" in str(refused)
    weak = asked(site_in(tmp_path), request(2, multiplier=0.9 * Z))
    assert "must stay within epsilon 4" in str(weak)
    assert isinstance(asked(site_in(tmp_path), request(3)), dict)


@pytest.mark.parametrize("private", [None, replace(PRIVATE, where="central")])
def test_a_site_can_insist_on_noise_of_its_own(
    private: PrivateUpdates | None, tmp_path: Path
) -> None:
    policy = Policy(noise_in_training=True, smallest_reply=1, smallest_batch=1, epsilon=BUDGET)
    refused = asked(site_in(tmp_path, policy=policy, private=private), request())
    assert "noise of their own" in str(refused)
    assert isinstance(asked(site_in(tmp_path, policy=policy), request(2)), dict)


@pytest.mark.parametrize(
    ("most", "refused"), [((4.0, 1e-3), False), ((3.9, 1e-3), True), ((4.0, 1e-4), True)]
)
def test_a_server_is_trusted_with_no_more_than_the_site_gives(
    most: tuple[float, float], refused: bool, tmp_path: Path
) -> None:
    policy = Policy(smallest_reply=1, smallest_batch=1, epsilon=most[0], delta=most[1])
    central = site_in(tmp_path, policy=policy, private=replace(PRIVATE, where="central"))
    told = asked(central, request(multiplier=None))
    assert isinstance(told, Exception) == refused
    if refused:
        assert f"at most {most[0]:g} and {most[1]:g} here, came 4 and 0.001; lower" in str(told)
        assert not [*tmp_path.glob("run-*")]


def test_the_site_s_own_epsilon_holds(tmp_path: Path) -> None:
    policy = Policy(smallest_reply=1, smallest_batch=1, epsilon=0.9 * BUDGET)
    refused = asked(site_in(tmp_path, policy=policy), request())
    assert "must stay within epsilon 3.6" in str(refused)


def test_epsilon_is_for_one_run_where_the_site_has_its_own_for_all(tmp_path: Path) -> None:
    both = Ledger(math.inf, 1e-3, (Z, Z)).spent
    policy = Policy(smallest_reply=1, smallest_batch=1, epsilon=1.001 * both)

    def told(serial: int, run: int) -> Tree | Exception:
        return asked(site_in(tmp_path, policy=policy), request(serial, run=run))

    assert isinstance(told(1, run=1), dict)
    assert "must stay within epsilon 4 at" in str(told(2, run=1))
    assert isinstance(told(3, run=2), dict)
    assert "must stay within epsilon 4 at" in str(told(4, run=1))
    assert f"must stay within epsilon {policy.epsilon:g} at" in str(told(5, run=3))


def test_the_account_is_on_the_disk_before_the_answer_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(releases, "save_state", full)
    with pytest.raises(AssertionError):
        change(asked(site_in(tmp_path), request()))
    monkeypatch.undo()
    synced: list[str] = []

    def note(number: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{number}").readlink()))

    monkeypatch.setattr(os, "fsync", note)
    assert isinstance(asked(site_in(tmp_path), request(2)), dict)
    assert any("released" in path for path in synced)


def served(folder: Path, private: PrivateUpdates) -> FlowerEngine:
    """Has three clients of two sites train for a round; returns who asked them."""
    task = make_task()
    config = fedavg.Config(**ONE_STEP)
    sites = {
        node: Site(
            Shard(task, clients),
            folder / str(node),
            fedavg.Client,
            config,
            seed=0,
            private=private,
        )
        for node, clients in ((1, (0, 1)), (2, (2, 3)))
    }
    known = remote(task, DirectLink(sites), sites)
    engine = FlowerEngine(known, fedavg.Client, config, seed=0, private=private)
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(fedavg.Client.train_model, task.initial("base"), batches=config.batches)
    assert cohort.state.lost == {}
    return engine


def test_that_a_client_diverged_is_not_told(tmp_path: Path) -> None:
    """It has no memory after its first round, which the server must not see from what it names."""
    whole = make_task()
    x = whole.x.clone()
    x[whole.train[1]] = torch.nan
    config = fedper.Config(**ONE_STEP)
    data = Shard(replace(whole, x=x), (0, 1, 2))
    private = replace(PRIVATE, multiplier=Z)
    sites = {1: Site(data, tmp_path, fedper.Client, config, seed=0, private=private)}
    known = remote(whole, DirectLink(sites), sites)
    assert known.roster is not None
    engine = FlowerEngine(known, fedper.Client, config, seed=0, private=private)
    server = fedper.Server(known.outline(), config)
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    server.round(cohort)
    engine.commit(cohort)
    assert cohort.state.lost == {}
    assert engine.memory.keys() == {0, 1, 2}
    version = engine.memory[1]["version"].tolist()
    kept = Store(tmp_path, known.roster.run)
    assert kept.memory("000001", (version[0], version[1])) == {}
    assert kept.memory("000000", (version[0], version[1])).keys() == {"head"}
    again = engine.cohort([0, 1], 1, training=False)
    again.ask(fedper.Client.evaluate, server.body["base"])  # begins with it, and writes nothing
    engine.commit(again)
    assert engine.memory.keys() == {0, 1, 2}


def test_the_server_s_records_have_what_sites_say_was_spent(tmp_path: Path) -> None:
    engine = served(tmp_path, replace(PRIVATE, multiplier=2 * Z))
    assert {c: kept["multipliers"].tolist() for c, kept in engine.released.items()} == {
        0: [2 * Z],
        1: [2 * Z],
        2: [2 * Z],
    }


def test_a_client_that_has_answered_often_is_heard(tmp_path: Path) -> None:
    """What it has spent travels with each reply, which may be no longer than an honest one."""
    before = torch.full((5000,), 1e3, dtype=torch.float64)
    for node, clients in ((1, (0, 1)), (2, (2, 3))):
        kept = releases.KeptReleases(tmp_path / str(node))
        for client in clients:
            kept.write(f"{client:06d}", {"multipliers": before})
    engine = served(tmp_path, replace(PRIVATE, multiplier=2 * Z))
    told = engine.released[0]["multipliers"]
    assert sorted(told.tolist()) == sorted([*before.tolist(), 2 * Z])


def test_what_sites_say_was_spent_does_not_end_the_run_of_a_trusted_server(tmp_path: Path) -> None:
    served(tmp_path, replace(PRIVATE, multiplier=Z))  # all of epsilon, of noise of their own
    central = replace(PRIVATE, where="central", multiplier=Z)
    engine = served(tmp_path, central)
    charge(engine, [0, 1, 2], central)
    assert {len(kept["multipliers"]) for kept in engine.released.values()} == {1}
    with pytest.raises(UserError, match="must stay within epsilon 4"):
        charge(engine, [0], central)
