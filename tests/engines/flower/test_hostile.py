"""Whatever a site answers, in training or in evaluation, loses its own clients and nothing else."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.flower.hostile import LIES, MISCOUNTED, UNREADABLE, UNUSABLE, Behave, honest
from engines.flower.sites import DirectLink, remote, sites_of
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.site import Site
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.runs import progress as telling
from hyperfed.runs.config import from_keys
from hyperfed.runs.run import Run
from toys import make_task

HOSTILE = 7
EXAMPLES = (12, 7, 20, 9, 8)
KEYS: dict[str, Any] = {
    "cohort": 1.0,
    "method": {"local_steps": 1, "batch_size": 4},
    "engine": {"name": "flower", "timeout": 0.01},
}


class Lying(DirectLink):
    """A site that answers the messages of a round, or of an evaluation, as it likes."""

    def __init__(self, sites: dict[int, Site], attacks: list[Behave], *, evaluation: bool) -> None:
        super().__init__(sites)
        self.attacks, self.evaluation = attacks, evaluation
        self.broken = {HOSTILE: self._answer}

    def _answer(self, site: Site, content: bytes) -> Any:
        call = wire.unpack_request(content).calls[0]
        there = (call.step == "evaluate") == self.evaluation
        number = call.round - self.evaluation  # evaluated after the round
        lies = there and number < len(self.attacks)
        return (self.attacks[number] if lies else honest)(site, content)


def run(
    method: str, hostile: tuple[int, ...], attacks: list[Behave], state: Path, **options: Any
) -> Run:
    task, module = make_task(examples=EXAMPLES), METHODS[method]
    keys = KEYS | {"rounds": len(attacks), "evaluate_every": options.pop("every")}
    if len(hostile) > 2:  # what lies by its size alone is outvoted by more, or not at all
        keys |= {"robust": {"reply_bound": None}}
    config = from_keys(method, keys)
    shares = {HOSTILE: hostile, 11: [c for c in range(5) if c not in hostile]}
    sites = sites_of(task, module, config.settings, state, shares)
    made = Run(config, remote(task, Lying(sites, attacks, **options), sites))
    for _ in made.train():
        pass
    return made


@pytest.mark.parametrize(
    ("method", "hostile", "attacks"),
    [
        ("fedavg", (1, 3), UNREADABLE | UNUSABLE | LIES),
        ("pefll", (0, 1, 2), UNREADABLE | UNUSABLE),  # most of the clients, and the first
    ],
)
def test_no_reply_in_training_ends_a_run(
    method: str, hostile: tuple[int, ...], attacks: dict[str, Behave], tmp_path: Path
) -> None:
    """One run, a round for each; it is as if the site had never answered."""
    options = {"every": len(attacks), "evaluation": False}
    attacked = run(method, hostile, list(attacks.values()), tmp_path / "a", **options)
    lost = attacked.evaluations[0].lost
    in_order = [one.client for one in lost]
    assert in_order == list(hostile) * len(attacks), dict(zip(attacks, lost, strict=False))
    for one in lost:
        assert 0 < len(one.reason) <= 500
        assert one.reason.isprintable()
    silent = [lambda site, content: None] * len(attacks)
    absent = run(method, hostile, silent, tmp_path / "b", **options)
    assert [e.client_loss for e in attacked.evaluations] == [
        e.client_loss for e in absent.evaluations
    ]
    assert attacked.summary["void_rounds"] == 0
    assert attacked.summary["evaluated"] == "5 of 5"


@pytest.mark.parametrize("hostile", [(1, 3), (0, 1, 2)])
def test_no_reply_in_an_evaluation_ends_a_run_or_counts(
    hostile: tuple[int, ...], tmp_path: Path
) -> None:
    attacks = UNREADABLE | UNUSABLE | MISCOUNTED
    options = {"every": 1, "evaluation": True}
    attacked = run("fedavg", hostile, list(attacks.values()), tmp_path / "a", **options)
    tests = [e for e in attacked.evaluations if e.split == "test"]
    for name, e in zip(attacks, tests, strict=True):
        assert [one.client for one in e.missed] == list(hostile), name
        assert e.evaluated == f"{5 - len(hostile)} of 5"
        assert [c for c, n in zip(e.clients, e.count, strict=True) if not n] == list(hostile)
        assert e.accuracy is not None
        assert not e.lost
    assert attacked.summary["evaluated"] == f"{5 - len(hostile)} of 5"
    whole = run("fedavg", hostile, [honest] * 3, tmp_path / "b", **options)
    there = [c for c in range(5) if c not in hostile]
    for ours, theirs in zip(
        tests, [e for e in whole.evaluations if e.split == "test"], strict=False
    ):
        for client in there:
            assert ours.client_loss[client] == theirs.client_loss[client]


# What goes wrong at honest sites, from some moment on.


class Failing(DirectLink):
    """A site to which something happens before one of its messages, and who says what it raises."""

    def __init__(self, sites: dict[int, Site], happens: Callable[[Site], None], at: int) -> None:
        super().__init__(sites)
        self.happens, self.left = happens, at
        self.broken = {HOSTILE: self._answer}

    def _answer(self, site: Site, content: bytes) -> Any:
        self.left -= 1
        if not self.left:
            self.happens(site)
        try:
            return site.handle(content)
        except Exception as error:  # which Flower tells the server
            return NoAnswerError(f"its app failed: {error}")


def disk_is_full(site: Site) -> None:
    """As if: root may write anywhere, but not below a file."""
    shutil.rmtree(site.state)
    site.state.write_text("no folder")


def state_is_lost(site: Site) -> None:
    shutil.rmtree(site.state)


def state_is_damaged(site: Site) -> None:
    for path in site.state.rglob("*.safetensors"):
        path.write_bytes(b"damaged")


def notes_are_damaged(site: Site) -> None:
    for path in site.state.rglob("latest.json"):
        path.write_text("[1, ")


def clock_was_ahead(site: Site) -> None:
    for path in site.state.rglob("latest.json"):
        path.write_text(f"[{2**62}, 1]")


def source(**changes: Any) -> Callable[[Site], None]:
    def happens(site: Site) -> None:
        site.source = dataclasses.replace(site.source, **changes)

    return happens


def steps_raise(error: Exception) -> Callable[[Site], None]:
    def happens(site: Site) -> None:
        def task(*arguments: Any) -> Any:
            raise error

        site.source = SimpleNamespace(task=task, introduce=site.source.introduce)

    return happens


def labels_are_gone(site: Site) -> None:
    whole = site.source.whole  # type: ignore[attr-defined]
    spoilt = dataclasses.replace(whole, y=whole.y[:0])
    site.source = dataclasses.replace(site.source, whole=spoilt)


FAILURES: dict[str, Callable[[Site], None]] = {
    "its disk is full": disk_is_full,
    "its state is lost": state_is_lost,
    "its state is damaged": state_is_damaged,
    "its notes are damaged": notes_are_damaged,
    "its clock was ahead": clock_was_ahead,
    "its clients are at another site now": source(clients=()),
    "its data cannot be read": steps_raise(UserError("clinic.npz must be readable")),
    "its disk is gone": steps_raise(OSError(5, "Input/output error")),
    "it is out of memory": steps_raise(MemoryError()),
    "its accelerator fails": steps_raise(RuntimeError("CUDA error: device-side assert")),
    "its labels are gone": labels_are_gone,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_no_failure_at_a_site_ends_a_run(failure: str, tmp_path: Path) -> None:
    """From the second evaluation on. A run that is stopped then can be resumed as well."""
    task, module = make_task(examples=EXAMPLES), METHODS["fedper"]
    config = from_keys("fedper", KEYS | {"rounds": 5, "evaluate_every": 2, "checkpoint_every": 1})
    shares = {HOSTILE: [1, 3], 11: [0, 2, 4]}
    sites = sites_of(task, module, config.settings, tmp_path / "state", shares)
    link = Failing(sites, FAILURES[failure], at=6)  # two rounds and an evaluation, two rounds
    enrolled = remote(task, link, sites)  # of those who were there when it began
    made = Run.start(config, tmp_path, enrolled)
    for progress in made.train():
        if progress.round == 4:
            break
    assert made.folder is not None
    resumed = Run.resume(made.folder.path, enrolled)
    for _ in resumed.train():
        pass
    assert resumed.summary["rounds"] == 5
    assert resumed.summary["test_accuracy"] is not None
    second = next(e for e in resumed.evaluations if e.round == 4)
    if failure == "its state is lost":  # a first message after that begins anew
        assert {one.client for one in second.missed} <= {1, 3}
    else:
        assert [one.client for one in second.missed] == [1, 3]
        assert second.evaluated == "3 of 5"


def test_a_reply_that_the_server_cannot_use_makes_its_round_void_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What has the right names and shapes may still be what no computation bears."""
    server, train = METHODS["fedavg"].Server, METHODS["fedavg"].Server.round

    def frail(self: Any, clients: Any) -> None:
        train(self, clients)
        if clients.round in (1, 2):
            self.model = None
            raise torch.linalg.LinAlgError("the\nmatrix is singular")

    monkeypatch.setattr(server, "round", frail)
    options: dict[str, Any] = {"every": 4, "evaluation": True}
    void = run("fedavg", (1, 3), [honest] * 4, tmp_path, **options)
    assert [v.round for v in void.evaluations[0].void] == [1, 2]
    assert "could not use its replies (_LinAlgError: the\\nmatrix is singular)" in caplog.text
    assert void.summary["void_rounds"] == 2
    with pytest.raises(torch.linalg.LinAlgError):  # in this process nobody else can be at fault
        for _ in Run(from_keys("fedavg", {"rounds": 3}), make_task()).train():
            pass


def test_a_server_that_never_can_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def broken(self: Any, clients: Any) -> None:
        rounds.append(clients.round)
        raise KeyError("w")

    monkeypatch.setattr(METHODS["fedavg"].Server, "round", broken)
    with pytest.raises(KeyError):
        run("fedavg", (1, 3), [honest] * 30, tmp_path, every=30, evaluation=True)
    assert len(rounds) == 10


def test_attacks_are_many() -> None:
    assert len(UNREADABLE | UNUSABLE | LIES) >= 60
    assert len(UNREADABLE | UNUSABLE | MISCOUNTED) >= 30
    assert len(FAILURES) >= 10


EVIL = "\x1b[2J\x07\r\n2026-01-01 00:00:00  done after round 9\n\u202e\ud800" + "x" * 10**7


@pytest.mark.parametrize("where", ["train", "evaluate", "everywhere"])
def test_what_a_site_says_of_its_errors_fills_no_log(
    where: str, tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    """10 MB of a terminal's commands, as the text and as the kind of an error."""

    def lie(site: Site, content: bytes) -> Any:
        request = wire.unpack_request(content)
        asked = "evaluate" if request.calls[0].step == "evaluate" else "train"
        if where not in (asked, "everywhere"):
            return honest(site, content)
        errors = {str(place): [EVIL[:1000], EVIL[:1000]] for place in range(len(request.calls))}
        errors["0"] = [EVIL[: 10**6], EVIL]
        meta = {"session": request.session, "serial": request.serial, "errors": errors}
        return wire.dumps({}, meta | {"remembers": [], "spent": {}})

    task, module = make_task(examples=EXAMPLES), METHODS["fedavg"]
    config = from_keys("fedavg", KEYS | {"rounds": 1, "evaluate_every": 1, "track": "none"})
    shares = {HOSTILE: (0, 1), 11: (2, 3, 4)}
    sites = sites_of(task, module, config.settings, tmp_path / "state", shares)
    link = DirectLink(sites)
    link.broken[HOSTILE] = lie
    if where == "everywhere":
        link.broken[11] = lie
    made = Run.start(config, tmp_path / "runs", remote(task, link, sites))
    told: list[str] = []
    try:
        telling.watch(made, told=lambda it: told.append(telling.spoken(it)))
    except UserError as error:
        told.append(str(error))
        assert where == "everywhere"
    assert made.folder is not None
    written = made.folder.log.read_text()
    assert "lost client" in written or "without client" in written
    texts = [written, made.folder.status.read_text(), caplog.text, "\n".join(told)]
    for text in (*texts, capsys.readouterr().err, made.folder.metrics.read_text()):
        assert len(text) < 50_000
        assert all(letter.isprintable() for letter in text.replace("\n", ""))
        assert not any(line.startswith("2026-01-01") for line in text.splitlines())
