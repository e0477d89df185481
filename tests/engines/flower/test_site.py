"""A site answers for its clients, remembers on disk, and runs nothing twice."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperfed import federation
from hyperfed.apps import cli
from hyperfed.apps.flower import commands
from hyperfed.data.roster import Frame, Introduction, Member, Roster, enrol
from hyperfed.data.site import SiteData
from hyperfed.engines.calls import Call
from hyperfed.engines.flower.releases import KeptReleases
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.flower.store import (
    LostMemoryError,
    Store,
    SupersededError,
    check_state,
)
from hyperfed.engines.flower.wire import Request
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.system.locks import Lock, is_held
from hyperfed.task import Task
from hyperfed.training import Steps
from hyperfed.trees import Tree
from toys import make_task

RAN: list[int] = []
"""The clients whose step really ran."""


class Client(federation.Client):
    """Counts its calls in memory and in scratch, and draws."""

    @step
    def count(self) -> Tree:
        RAN.append(self.id)
        if self.config == self.id:
            raise OSError("disk on fire")
        self.memory["count"] = self.memory.get("count", torch.tensor(0)) + 1
        self.scratch["count"] = self.scratch.get("count", torch.tensor(0)) + 1
        drawn = torch.stack([batch.x.sum() for batch in self.batches])
        return {"memory": self.memory["count"], "scratch": self.scratch["count"], "drawn": drawn}

    @step(deferrable=True)
    def recount(self) -> Tree:
        RAN.append(self.id)
        return {"memory": self.memory["count"], "scratch": self.scratch["count"]}


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


FRAME = Frame(known=4, novel=0, shape=(5,), dtype="torch.float64", classes=3)
NAMES = {client: f"{client:06d}" for client in range(4)}


def request(serial: int = 1, *clients: int, cohort: int = 0, **changes: Any) -> Request:
    calls = [Call(cohort, 0, client, "count", (), Steps(2, 3)) for client in clients or (0, 1)]
    names = {call.client: NAMES[call.client] for call in calls}
    made = Request(1, 10, serial, FRAME, names, calls, {}, {}, [cohort])
    return replace(made, **changes)


def site_in(folder: Path, config: Any = None, task: Task | None = None) -> Site:
    """A new process of the site, as it were."""
    return Site(Shard(task or make_task(), (0, 1, 2)), folder, Client, config, seed=0)


def counts(answers: Any, name: str = "memory") -> dict[int, int]:
    return {client: int(answer[name]) for client, answer in answers.items()}


def test_a_site_answers_as_the_reference_engine_does(tmp_path: Path) -> None:
    answers = site_in(tmp_path).answer(request()).answers
    loop = LoopEngine(make_task(), Client, None, seed=0)
    for call, expected in zip(request().calls, loop.answer(request().calls), strict=True):
        torch.testing.assert_close(answers[call.client], expected, rtol=0, atol=0)


def test_memory_and_scratch_survive_a_restart_between_messages(tmp_path: Path) -> None:
    for serial in (1, 2, 3):
        answers = site_in(tmp_path).answer(request(serial)).answers
    assert counts(answers) == counts(answers, "scratch") == {0: 3, 1: 3}


def test_a_repeated_message_is_answered_and_not_run_again(tmp_path: Path) -> None:
    first = site_in(tmp_path).answer(request())
    again = site_in(tmp_path).answer(request())
    assert RAN == [0, 1]
    assert again.remembers == first.remembers == {0, 1}
    for client in (0, 1):
        torch.testing.assert_close(again.answers[client], first.answers[client], rtol=0, atol=0)


def of_two_rounds(serial: int = 2) -> Request:
    """What clients 0 and 1 were posted in one round travels with what 1 and 2 are asked next."""
    calls = [Call(0, 0, client, "recount", (), None) for client in (0, 1)]
    calls += [Call(1, 1, client, "count", (), Steps(2, 3)) for client in (1, 2)]
    begin = {0: (10, 0), 1: (10, 0)}
    return request(serial, 0, 1, 2, calls=calls, begin=begin, open=[0, 1])


def test_a_message_may_hold_calls_of_one_client_in_two_rounds(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1))
    site_in(tmp_path).answer(request(2))
    response = site_in(tmp_path).answer(of_two_rounds(3))
    assert counts(response.answers) == {0: 2, 1: 2, 2: 3, 3: 1}
    assert counts(response.answers, "scratch") == {0: 2, 1: 2, 2: 1, 3: 1}
    assert response.remembers == {0, 1, 2, 3}
    named = site_in(tmp_path).answer(request(4, 1, cohort=2, begin={1: (10, 1)}))
    assert counts(named.answers) == {0: 4}


def test_a_repeated_message_of_two_rounds_runs_nothing_twice(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1))
    RAN.clear()
    first = site_in(tmp_path).answer(of_two_rounds())
    again = site_in(tmp_path).answer(of_two_rounds())
    assert RAN == [0, 1, 1, 2]
    assert again.remembers == first.remembers == {0, 1, 2, 3}
    for place in range(4):
        torch.testing.assert_close(again.answers[place], first.answers[place], rtol=0, atol=0)


def test_a_message_cut_short_runs_only_what_had_not_been_kept(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1, 0))  # killed before it came to client 1
    assert counts(site_in(tmp_path).answer(request(1, 0, 1)).answers) == {0: 1, 1: 1}
    assert RAN == [0, 1]


def test_a_draft_is_nothing_to_other_cohorts_until_it_is_named(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1, cohort=0))
    unnamed = site_in(tmp_path).answer(request(2, cohort=1, open=[0, 1]))
    assert counts(unnamed.answers) == {0: 1, 1: 1}
    named = site_in(tmp_path).answer(request(3, cohort=2, begin={0: (10, 0)}))
    assert counts(named.answers) == {0: 2, 1: 1}
    assert counts(named.answers, "scratch") == {0: 1, 1: 1}


def changed_for(client: int, change: str) -> Task:
    """The task, of which one client has something else."""
    task = make_task()
    train, test = list(task.train), list(task.test)
    own = train[client]
    if change == "an example more":
        train[client] = torch.cat([own, train[3][:1]])
    elif change == "one to train on that was to test on":
        train[client] = torch.cat([own[1:], test[client][:1]])
        test[client] = torch.cat([test[client][1:], own[:1]])
    elif change == "another order":
        train[client] = own.flip(0)
    else:
        task.y[own[0]] = (task.y[own[0]] + 1) % 3
    return replace(task, train=train, test=test)


@pytest.mark.parametrize(
    "change",
    [
        "an example more",
        "one to train on that was to test on",
        "another order",
        "another label",
    ],
)
def test_a_client_goes_on_with_the_examples_that_it_began_a_run_with(
    change: str, tmp_path: Path
) -> None:
    """Its server counts with their number, and it may be tested on what it was trained on."""
    site_in(tmp_path).answer(request())
    changed = site_in(tmp_path, task=changed_for(0, change))
    answers = changed.answer(request(2)).answers
    assert "client 000000 must go on with the examples" in str(answers[0])
    assert isinstance(answers[1], dict)
    assert isinstance(changed.answer(request(1, run=2)).answers[0], dict)
    assert counts(site_in(tmp_path).answer(request(3)).answers) == {0: 2, 1: 3}


def test_versions_that_are_not_kept_are_dropped_and_missed(tmp_path: Path) -> None:
    for cohort in range(3):
        begin = {0: (10, cohort - 1)} if cohort else {}
        kept = {0: [(10, 0)]}
        asked = request(cohort + 1, 0, cohort=cohort, begin=begin, keep=kept)
        last = site_in(tmp_path).answer(asked)
    assert counts(last.answers) == {0: 3}
    kept = (tmp_path / "run-1" / "_000000").glob("*.safetensors")
    files = sorted(path.name for path in kept)
    assert files == ["10-0.safetensors", "10-1.safetensors", "10-2.safetensors"]
    site_in(tmp_path).answer(request(4, 0, cohort=3, begin={0: (10, 0)}, keep={0: [(10, 0)]}))
    back = site_in(tmp_path).answer(request(5, 0, cohort=4, begin={0: (10, 2)}))
    assert isinstance(back.answers[0], LostMemoryError)
    assert "restore the folder from a copy" in str(back.answers[0])


def test_an_old_version_can_be_gone_back_to(tmp_path: Path) -> None:
    for cohort in range(3):
        begin = {0: (10, cohort - 1)} if cohort else {}
        site_in(tmp_path).answer(
            request(cohort + 1, 0, cohort=cohort, begin=begin, keep={0: [(10, 0)]})
        )
    back = site_in(tmp_path).answer(request(1, 0, session=11, begin={0: (10, 0)}))
    assert counts(back.answers) == {0: 2}


def test_a_late_message_changes_nothing(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1))
    now = site_in(tmp_path).answer(request(5, cohort=1, begin={0: (10, 0), 1: (10, 0)}))
    files = sorted(tmp_path.rglob("*.safetensors"))
    for late in (request(1), request(3, cohort=0), request(9, session=9)):
        answers = site_in(tmp_path).answer(late).answers
        assert {type(answer) for answer in answers.values()} == {SupersededError}
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    assert counts(now.answers) == {0: 2, 1: 2}
    assert RAN == [0, 1, 0, 1]


def test_a_client_that_raises_keeps_its_memory_and_loses_nobody_else(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1))
    answers = site_in(tmp_path, config=1).answer(request(2)).answers
    assert isinstance(answers[1], OSError)
    assert int(answers[0]["memory"]) == 2
    after = site_in(tmp_path).answer(request(3)).answers
    assert counts(after) == {0: 3, 1: 2}


def test_a_client_of_another_site_or_that_left_is_refused_and_loses_nobody_else(
    tmp_path: Path,
) -> None:
    answers = site_in(tmp_path).answer(request(1, 0, 3)).answers
    assert isinstance(answers[1], UserError)
    assert "client 3 (000003) must be one of this site's" in str(answers[1])
    assert RAN == [0]
    assert {path.name for path in (tmp_path / "run-1").glob("_*")} == {"_000000"}


def test_what_was_half_written_is_not_seen(tmp_path: Path) -> None:
    site_in(tmp_path).answer(request(1, 0))
    folder = tmp_path / "run-1" / "_000000"
    (folder / ".10-0.safetensors.aa.tmp").write_bytes(b"half")
    assert counts(site_in(tmp_path).answer(request(2, 0)).answers) == {0: 2}
    (folder / "10-0.safetensors").write_bytes(b"damaged")
    damaged = site_in(tmp_path).answer(request(3, 0)).answers[0]
    assert isinstance(damaged, UserError)


def test_what_killed_writers_left_is_removed_and_nobody_else_may_look(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    site_in(state).answer(request(1, 0))
    folders = [state, state / "run-1", state / "run-1" / "_000000"]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3
    left = [folder / ".10-0.safetensors.aa.tmp" for folder in folders]
    for path in left:
        path.write_bytes(b"half")
    site_in(state).answer(request(2, 0))
    assert [path.exists() for path in left] == [True, False, False]
    left[0].unlink()
    check_state(state)
    assert sorted(state.iterdir()) == [state / "audit.jsonl", state / "released", state / "run-1"]


def test_a_node_that_starts_has_the_state_for_itself_and_removes_what_killed_ones_left(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must be for itself, or one node would remove what another is about to put in place."""
    state = tmp_path / "state"
    site_in(state).answer(request(1, 0))
    KeptReleases(state)
    check_state(state)
    folders = [state, state / "run-1", state / "run-1" / "_000000", state / "released"]
    folders.append(state / "models" / "run-1")
    folders[-1].mkdir(parents=True)
    kept = set(state.rglob("*"))
    for folder in folders:
        (folder / ".10-0.safetensors.aa.tmp").write_bytes(b"half")
    (state / "reading-abc").mkdir()
    (state / "reading-abc" / "train.arrow").write_bytes(b"rows")
    starts = ["node", "--clients", "0-3", "--state", str(state), "--insecure"]
    with pytest.raises(SystemExit):
        cli.main(starts)  # prints how it is started
    assert len(set(state.rglob("*")) - kept) == len(folders) + 2
    served: list[bool | None] = []
    monkeypatch.setattr(commands, "_serve", lambda *_, **__: served.append(is_held(state)))
    for _ in range(2):
        lock = Lock(state)
        with pytest.raises(SystemExit) as end:
            cli.main([*starts, "--superlink", "127.0.0.1:1"])
        assert end.value.code == 2
        assert f"{state} must be written to by one process at a time" in capsys.readouterr().err
        lock.release()
        with pytest.raises(SystemExit):
            cli.main([*starts, "--superlink", "127.0.0.1:1"])
    assert served == [True, True]
    assert set(state.rglob("*")) - kept == {state / ".lock"}


def test_client_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "state", 1)
    for name in ("../../up", "/root", "..", "a/b"):
        path = store._path(name, (1, 1))
        assert path.resolve().parent.parent == (tmp_path / "state" / "run-1").resolve()


def introduction(*names: str, **changes: Any) -> Introduction:
    options: dict[str, Any] = {"shape": (5,), "dtype": "torch.float32", "classes": 3} | changes
    novel = options.pop("novel", False)
    size = options.pop("size", "")
    return Introduction(tuple(Member(n, 7, 6, 5, size, novel) for n in names), **options)


def test_clients_are_numbered_by_name_and_the_novel_come_last(tmp_path: Path) -> None:
    sites = [
        introduction("b/1", "a/2"),
        introduction("a/1", novel=True),
        introduction("c", classes=5),
    ]
    roster = enrol(sites, run=4)
    assert [member.name for member in roster.members] == ["a/2", "b/1", "c", "a/1"]
    assert (roster.frame.known, roster.frame.novel, roster.frame.classes) == (3, 1, 5)
    assert roster == enrol(sites[::-1], run=4)
    roster.save(tmp_path / "sites.json")
    assert Roster.read(tmp_path / "sites.json") == roster


def test_channel_statistics_of_sites_are_those_of_all_their_images() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.rand(n, 2, generator=draw, dtype=torch.float64) * n for n in (3, 10)]
    sites = [
        introduction(
            str(n),
            pixels=len(part),
            mean=tuple(part.mean(0).tolist()),
            std=tuple(part.std(0, correction=0).tolist()),
        )
        for n, part in enumerate(parts)
    ]
    frame = enrol(sites, run=1).frame
    everything = torch.cat(parts)
    assert frame.mean == pytest.approx(everything.mean(0).tolist(), abs=1e-4)
    assert frame.std == pytest.approx(everything.std(0, correction=0).tolist(), abs=1e-4)


def test_a_constant_channel_and_novel_clients_leave_the_statistics_alone() -> None:
    images = np.random.default_rng(0).integers(40, 60, (40, 1, 4, 4), dtype=np.uint8)
    images[:10] = 70
    parts = {"constant": images[:10], "other": images[10:], "novel": 255 - images}
    for pooled in (True, False):
        said = []
        for name, x in parts.items():
            y, rows = torch.zeros(len(x)), (torch.arange(len(x)), torch.zeros(0), torch.zeros(0))
            data = SiteData(torch.from_numpy(x), y, 0, {name: rows}, novel=name == "novel")
            said.append(data.introduce())
        frame = enrol(said, run=1, robust=not pooled).frame
        halves = [images[:10] / 255, images[10:] / 255]
        mean, std = (
            (images.mean() / 255, images.std() / 255)
            if pooled
            else (np.mean([x.mean() for x in halves]), np.mean([x.std() for x in halves]))
        )
        assert frame.mean == pytest.approx((mean,), abs=2e-4)
        assert frame.std == pytest.approx((std,), abs=2e-4)


def test_one_site_of_three_does_not_decide_on_the_channel_statistics() -> None:
    told = [(0.5, 0.25, 30), (0.4, 0.2, 10), (1.0, 0.0, 7 * 10**7)]
    sites = [
        introduction(f"{n}", pixels=pixels, mean=(mean, 0.1), std=(std, 0.0))
        for n, (mean, std, pixels) in enumerate(told)
    ]
    none = introduction("only tests", mean=(0.0, 0.0), std=(0.0, 0.0))
    frame = enrol([*sites, none], run=1, robust=True).frame
    assert (frame.mean, frame.std) == ((0.5, 0.1), (0.2, 1.0))
    everyone = enrol([introduction("a"), introduction("b")], run=1, robust=True).frame
    assert (everyone.mean, everyone.std) == ((), ())


def test_a_site_has_as_many_labels_as_the_run_names() -> None:
    sites = [introduction("a"), introduction("b", classes=10**6)]
    with pytest.raises(UserError, match=r"labels must be the 3 .* got 1000000 at the site of b"):
        enrol(sites, run=1, labels=("x", "y", "z"))
    assert enrol(sites[:1], run=1, labels=("x", "y", "z")).frame.classes == 3


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ([introduction("a"), introduction("a")], "a client must be at one site"),
        ([introduction("a"), introduction("b", shape=(6,))], "one shape and dtype"),
        ([introduction("a"), introduction("b", classes=0)], "all sites must be labels"),
        ([introduction("a", novel=True)], "must be left to train"),
        ([introduction()], "must be left to train"),
    ],
)
def test_sites_that_do_not_fit_together_are_refused(sites: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        enrol(sites, run=1)


def test_names_of_a_large_site_are_not_compared_one_by_one() -> None:
    """A site may say a million, of whom nobody knows anything yet."""
    compared = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

    members = [Member("a", 10, 2, 2) for _ in range(2000)]
    for number, member in enumerate(members):
        object.__setattr__(member, "name", Name(max(number, 1)))
    site = Introduction((), shape=(5,), dtype="torch.float32", classes=3)
    object.__setattr__(site, "members", members)
    with pytest.raises(UserError, match="at one site, but 1 is at several"):
        enrol([site], run=1)
    assert len(compared) < 10 * len(members)


def test_each_client_must_say_its_size_where_there_are_several() -> None:
    with pytest.raises(UserError, match="one of the targets S, L, got none for a"):
        enrol([introduction("a")], run=1, sizes=("S", "L"))
    frame = enrol([introduction("a", size="L")], run=1, sizes=("S", "L")).frame
    assert frame.sizes == ("L",)


def test_a_client_is_called_by_its_own_name(tmp_path: Path) -> None:
    """Its memory and its account are kept by that."""
    answer = site_in(tmp_path).answer(request(1, 0, names={0: NAMES[1]})).answers[0]
    assert isinstance(answer, UserError)
    assert RAN == []


def test_images_of_newcomers_normalise_nobody() -> None:
    def site(name: str, mean: float, *, novel: bool) -> Introduction:
        member = Member(name, 4, 0, 0, novel=novel)
        return Introduction((member,), (1, 8, 8), "torch.uint8", 2, 4, (mean,), (0.1,))

    sites = [site("a", 0.25, novel=False), site("b", 0.75, novel=True)]
    assert enrol(sites, run=1).frame.mean == (0.25,)
