"""A site adds noise whatever a server says: attacks on what a novel client lets out."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.flower.sites import DirectLink
from hyperfed import trees
from hyperfed.data.roster import Frame
from hyperfed.data.site import SiteData
from hyperfed.engines.calls import Call, hash_of_data
from hyperfed.engines.flower import releases
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.site import Site
from hyperfed.engines.flower.store import Draft, Store
from hyperfed.engines.flower.wire import Request, pack_request, unpack_response
from hyperfed.errors import UserError
from hyperfed.methods import itpfl
from hyperfed.privacy import analytic_multiplier, seeded_noise
from hyperfed.system.randomness import generator, seeded
from hyperfed.training import Steps
from hyperfed.trees import Tree, model_of
from toys import make_task

FRAME = Frame(known=3, novel=1, shape=(5,), dtype="torch.float64", classes=3)
NOVEL = 3
TASK = make_task(novel=1)
SIGMA = 2 / len(TASK.train[NOVEL]) * analytic_multiplier(0.3, 0.01)


def config(**settings: Any) -> itpfl.Config:
    return itpfl.Config(**{"epsilon": 0.3, "embedding_size": 6} | settings)


def data(*, novel: bool = True, scale: float = 1.0) -> SiteData:
    rows = {"ann": (TASK.train[NOVEL], TASK.val[NOVEL], TASK.test[NOVEL])}
    models = lambda frame: TASK.models  # noqa: E731
    return SiteData(scale * TASK.x, TASK.y, 3, rows, models=models, novel=novel)


def site_in(folder: Path, **settings: Any) -> Site:
    return Site(data(), folder, itpfl.Client, config(**settings), seed=0)


def encoder(shift: float = 0.0) -> Tree:
    with seeded(0, "encoder"):
        network = itpfl.Client.networks(TASK.outline(), config())["encoder"]
    return trees.tree_map(lambda leaf: leaf + shift, model_of(network))


def clean(sent: Tree) -> Tensor:
    """What the client would say without noise, in plain PyTorch."""
    network = itpfl.Client.networks(TASK.outline(), config())["encoder"]
    network.load_state_dict(sent)
    with torch.no_grad():
        told: Tensor = network.eval()(TASK.x[TASK.train[NOVEL]])
    return told


def request(serial: int = 1, sent: Tree | None = None, **changes: Any) -> Request:
    call = Call(serial, 5, NOVEL, "describe", (encoder() if sent is None else sent,))
    made = Request(1, 10, serial, FRAME, {NOVEL: "ann"}, [call], {}, {}, [serial])
    return replace(made, **changes)


def asked(site: Site, request: Request) -> Tree | Exception:
    """The answer to the first call, as it comes over the network."""
    return unpack_response(site.handle(pack_request(request))).answers[0]


def descriptor(site: Site, request: Request) -> Tensor:
    answer = asked(site, request)
    assert isinstance(answer, dict), answer
    told: Tensor = answer["descriptor"]
    return told


def test_whoever_knows_the_seed_cannot_take_the_noise_away(tmp_path: Path) -> None:
    told = descriptor(site_in(tmp_path / "a"), request())
    noise = told - clean(encoder())
    assert 0.2 * SIGMA < noise.square().mean().sqrt() < 3 * SIGMA
    (call,) = request().calls
    for named in (call.question(SIGMA, hash_of_data(TASK, NOVEL)), call.question(SIGMA), "q"):
        theirs = SIGMA * seeded_noise(generator(0, "noise", NOVEL, named))(told)
        assert (noise - theirs).abs().max() > 0.1 * SIGMA
    legacy = torch.randn(6, generator=generator(0, "client", *call.keys), dtype=told.dtype)
    assert (noise - SIGMA * legacy).abs().max() > 0.1 * SIGMA
    other = descriptor(site_in(tmp_path / "b"), request())  # the same question to its twin
    assert (told - other).abs().min() > 0


def as_it_is(serial: int) -> dict[str, Any]:
    return {}


RESETS: dict[str, Callable[[int], dict[str, Any]]] = {
    "later messages": as_it_is,
    "another run each": lambda serial: {"run": serial},
    "another session each": lambda serial: {"session": 10 + serial},
    "a memory of before": lambda serial: {"begin": {NOVEL: (10, 1)}} if serial > 1 else {},
    "nothing to be kept": lambda serial: {"open": [], "keep": {}},
    "by another number": lambda serial: {
        "frame": replace(FRAME, novel=1 + serial),
        "names": {NOVEL + serial: "ann"},
        "calls": [replace(request(serial).calls[0], client=NOVEL + serial)],
    },
}


@pytest.mark.parametrize("attack", sorted(RESETS))
def test_no_message_gives_a_budget_back(attack: str, tmp_path: Path) -> None:
    answered = []
    for serial in range(1, 21):
        changes = RESETS[attack](serial)
        made = request(serial, encoder(serial * 1e-9), **changes)
        if "calls" in changes:
            (call,) = made.calls
            made = replace(made, calls=[replace(call, payload=(encoder(serial * 1e-9),))])
        answered.append(asked(site_in(tmp_path), made))
    refused = [answer for answer in answered if isinstance(answer, UserError)]
    assert len(refused) == 19
    assert all("within epsilon 0.3 at delta 0.01" in str(error) for error in refused)


def test_the_same_question_is_answered_alike_in_any_run(tmp_path: Path) -> None:
    first = descriptor(site_in(tmp_path), request())
    for changes in ({}, {"run": 2}, {"session": 11}):
        again = descriptor(site_in(tmp_path), request(2, **changes))
        assert torch.equal(again, first)


def test_a_client_whose_data_changed_does_not_answer_of_those_before(tmp_path: Path) -> None:
    first = descriptor(site_in(tmp_path), request())
    changed = Site(data(scale=2.0), tmp_path, itpfl.Client, config(), seed=0)
    refused = asked(changed, request(2, run=2))
    assert "within epsilon 0.3 at delta 0.01" in str(refused)
    assert torch.equal(descriptor(site_in(tmp_path), request(3, run=3)), first)


@pytest.mark.parametrize(("novel", "newcomers"), [(0, 0), (3, 0), (3, 7)])
def test_a_message_cannot_say_that_a_novel_client_is_none(
    novel: int, newcomers: int, tmp_path: Path
) -> None:
    frame = replace(FRAME, known=4, novel=novel, newcomers=newcomers)
    answer = asked(site_in(tmp_path), request(frame=frame))
    assert isinstance(answer, UserError)
    assert "client ann must join after training, as its site says" in str(answer)
    known = Site(data(novel=False), tmp_path, itpfl.Client, config(), seed=0)
    assert "must take part in training" in str(asked(known, request()))


def test_nobody_is_asked_twice_in_one_message(tmp_path: Path) -> None:
    (call,) = request().calls
    other = replace(call, payload=(encoder(1e-9),))
    both = [call, replace(other, client=4)]
    two = request(frame=replace(FRAME, novel=2), names={3: "ann", 4: "ann"}, calls=both)
    for wrong in (two, request(calls=[call, other])):
        response = unpack_response(site_in(tmp_path).handle(pack_request(wrong)))
        assert all(isinstance(answer, UserError) for answer in response.answers.values())
    separate = request(calls=[call, replace(other, cohort=7)], open=[1, 7])
    response = unpack_response(site_in(tmp_path).handle(pack_request(separate)))
    assert isinstance(response.answers[0], dict)
    assert isinstance(response.answers[1], UserError)


@pytest.mark.parametrize(
    "step", ["train_model", "train_encoder", "describe_batch", "encoder_gradient", "export"]
)
def test_a_private_client_is_asked_for_nothing_without_noise(step: str, tmp_path: Path) -> None:
    call = Call(1, 5, NOVEL, step, (encoder(),), Steps(1, 1))
    answer = asked(site_in(tmp_path), request(calls=[call]))
    assert isinstance(answer, UserError)
    assert f"asked for no other, but was asked to {step}" in str(answer)


def test_what_cannot_be_noted_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(releases, "save_state", full)
        assert "no space left" in str(asked(site_in(tmp_path), request()))
    first = descriptor(site_in(tmp_path), request(2))
    (file,) = (tmp_path / "released").glob("*.safetensors")
    file.write_bytes(b"damaged")
    assert "damaged" in str(asked(site_in(tmp_path), request(3)))
    assert "damaged" in str(asked(site_in(tmp_path), request(4, encoder(1e-9))))
    assert first.isfinite().all()
    file.unlink()
    file.symlink_to(tmp_path / "a disk that is away")  # no account is not an empty one
    assert "there must be a checkpoint" in str(asked(site_in(tmp_path), request(5)))


LONG = "\u4e2d" * 100
"""Of 100 letters, as a client's name may be; 900 where a file is called so."""


def test_a_client_with_a_long_name_has_an_account_of_its_own(tmp_path: Path) -> None:
    kept = releases.KeptReleases(tmp_path)
    account = {"multipliers": torch.ones(1, dtype=torch.float64)}
    kept.write(LONG, account)
    assert kept.multipliers(LONG) == {1.0: 1}
    assert kept.multipliers(LONG[:-1] + "x") == kept.multipliers(LONG[:-1]) == {}
    memory = {"head": torch.ones(2)}
    Store(tmp_path, 1).write(LONG, (1, 1), Draft(1, memory, {}, {}))
    assert Store(tmp_path, 1).memory(LONG, (1, 1)).keys() == memory.keys()


def test_it_is_on_the_disk_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and then its folder, and before the draft that a repeated message is answered by."""
    synced: list[str] = []
    real = os.fsync

    def noted(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").resolve().name)
        real(number)

    monkeypatch.setattr(os, "fsync", noted)
    descriptor(site_in(tmp_path), request())
    names = [name.removeprefix(".").partition(".safetensors")[0] for name in synced]
    assert names[-3:] == ["_ann", "released", "10-1"]


def test_the_server_is_told_what_was_spent(tmp_path: Path) -> None:
    site = site_in(tmp_path, budget=1.0)
    spent = []
    for serial, shift in ((1, 0.0), (2, 0.0), (3, 1e-9)):
        content = pack_request(request(serial, encoder(shift)))
        spent.append(unpack_response(site.handle(content)).spent)
    z = analytic_multiplier(0.3, 0.01)
    assert spent == [{0: {z: 1}}, {0: {z: 1}}, {0: {z: 2}}]


def test_the_engine_collects_it(tmp_path: Path) -> None:
    from engines.flower.sites import remote, sites_of

    sites = sites_of(TASK, itpfl, config(), tmp_path, {7: [0, 1], 8: [2, 3]})
    link = DirectLink(sites)
    engine = FlowerEngine(remote(TASK, link, sites), itpfl.Client, config(), seed=0)
    cohort = engine.cohort([NOVEL], 5, training=False)
    cohort.ask(itpfl.Client.describe, encoder())
    assert engine.released.keys() == {NOVEL}
    assert engine.released[NOVEL]["multipliers"].tolist() == [analytic_multiplier(0.3, 0.01)]
