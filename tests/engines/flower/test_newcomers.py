"""Clients that come to sites when a run is over: their models, and what they cost."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.flower import test_kept_models
from engines.flower.test_kept_models import CLIENTS, LENIENT, Federation, configured, data
from hyperfed.data.examples import hash_of
from hyperfed.data.roster import Introduction, Member, RemoteTask, Roster, enrol, joined
from hyperfed.data.site import SiteData
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Site
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError
from hyperfed.runs.export import export_model
from hyperfed.runs.newcomers import Newcomer
from hyperfed.runs.run import Run
from hyperfed.task import Task
from toys import CLASSES, FEATURES, make_task

NODE, NAMES = 9, ("eve", "max", "zoe")
SIZES = ("S", "M")


class Late:
    """A site that comes when the run of a federation is over, with three clients."""

    def __init__(
        self,
        there: Federation,
        policy: Policy | None = None,
        write: Callable[[nn.Module, Task, Path], None] = export_model,
        state: str = "late",
    ) -> None:
        self.there, self.state = there, there.state / state
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(60, FEATURES, dtype=torch.float64, generator=draw)
        y = torch.randint(CLASSES, (60,), generator=draw)
        parts = iter(torch.arange(60).split([10, 5, 5] * 3))
        rows = {name: (next(parts), next(parts), next(parts)) for name in NAMES}
        models = data().models
        self.data = SiteData(x, y, CLASSES, rows, lambda frame: models, "late", novel=True)
        there.link.sites[NODE] = Site(
            self.data,
            self.state,
            there.run.method.Client,
            there.run.config.settings,
            seed=0,
            policy=policy,
            private=there.run.config.privacy.updates(),
            write=write,
        )

    def serve(self) -> list[Newcomer]:
        run = self.there.run
        assert isinstance(run.task, RemoteTask)
        assert run.task.roster is not None
        everyone, refused = joined(run.task.roster, [self.data.introduce()], run=2)
        assert refused == {}
        names = tuple(member.name for member in everyone.members)
        task = RemoteTask.of(everyone, run.task.models, "toy", self.there.link)
        ids = range(run.task.clients, task.clients)
        return run.serve_newcomers(replace(task, names=names), ids, run.config.engine)

    def kept(self, name: str) -> dict[str, Tensor]:
        return load_file(self.state / "models" / "run-2" / f"_late%2F{name}.safetensors")

    def personalized(self, name: str) -> dict[str, Tensor]:
        """What the run makes of the same training examples where they are here."""
        train, _, _ = self.data.rows[name]
        module = self.there.run.personalize(self.data.x[train], self.data.y[train])
        return {f"model.{entry}": value for entry, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedavg", {}),
        ("fedper", {}),
        ("pfedhn", {"novel_rounds": 3}),
        ("pfedhn", {"descriptor": "class_shares"}),  # of which the server has those of known ones
        ("pefll", {"descriptor_size": "1+n/4"}),  # of those of whom the run knew
        ("headstart", {"novel_rounds": 2}),
        ("itpfl", {}),
    ],
)
def test_a_newcomers_site_keeps_the_model_that_personalize_makes(
    method: str, own: dict[str, Any], tmp_path: Path
) -> None:
    """Of whole batches: what else is drawn depends on a client's number here, there on its data."""
    there = Federation(configured(method, own={"batch_size": 16} | own), tmp_path)
    run = there.run
    before = dict(run.summary), list(run.evaluations), dict(run.engine.memory)
    late = Late(there)
    found = late.serve()
    assert [it.client for it in found] == [f"late/{name}" for name in NAMES]
    for it, name in zip(found, NAMES, strict=True):
        assert (it.model, it.why, it.metric) == ("kept", "", "accuracy")
        assert it.value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of five test examples
        torch.testing.assert_close(late.kept(name), late.personalized(name), rtol=1e-9, atol=1e-12)
    assert (run.summary, run.evaluations, run.engine.memory) == before
    assert not (tmp_path / "1" / "models" / "run-2").exists()


def test_a_newcomers_value_is_of_its_own_examples(tmp_path: Path) -> None:
    late = Late(Federation(configured("fedavg", own={"batch_size": 16}), tmp_path))
    for it, name in zip(late.serve(), NAMES, strict=True):
        train, _, test = late.data.rows[name]
        model = late.there.run.personalize(late.data.x[train], late.data.y[train])
        right = model(late.data.x[test]).argmax(1) == late.data.y[test]
        assert it.value == pytest.approx(right.double().mean().item())


def test_fine_tuning_is_that_of_the_runs_settings(tmp_path: Path) -> None:
    tuned = configured("fedavg", own={"batch_size": 16}, serve={"finetune_steps": 3})
    late = Late(Federation(tuned, tmp_path))
    late.serve()
    torch.testing.assert_close(late.kept("eve"), late.personalized("eve"), rtol=1e-9, atol=1e-12)
    common = late.there.run.best.server["model"]["base"]["body.weight"]
    assert not torch.allclose(late.kept("eve")["model.body.weight"], common)


def test_who_is_not_served_is_told_and_costs_nobody_else_anything(tmp_path: Path) -> None:
    def full(model: nn.Module, task: Task, path: Path) -> None:
        if "max" in path.name:
            raise UserError("the disk is full")
        export_model(model, task, path)

    there = Federation(configured("fedper"), tmp_path)
    found = Late(there, write=full).serve()
    assert [(it.model, it.why) for it in found] == [
        ("kept", ""),
        ("not kept", "UserError: the disk is full"),
        ("kept", ""),
    ]
    assert found[1].value is not None  # it was served, and evaluated

    refuses = Late(there, replace(LENIENT, smallest_evaluation=6)).serve()
    assert [(it.model, it.value) for it in refuses] == [("kept", None)] * 3

    there.link.broken[NODE] = lambda site, content: NoAnswerError("its site did not answer")
    silent = Late(there).serve()
    assert [(it.model, it.value) for it in silent] == [("not kept", None)] * 3
    assert {it.why for it in silent} == {"its site did not answer"}


@pytest.mark.parametrize("lie", [b"", b"nonsense"])
def test_a_site_that_answers_nonsense_is_told_of(lie: bytes, tmp_path: Path) -> None:
    there = Federation(configured("pfedhn"), tmp_path)
    late = Late(there)
    there.link.broken[NODE] = lambda site, content: lie
    assert {(it.model, "cannot be read" in it.why) for it in late.serve()} == {("not kept", True)}


def test_no_known_client_is_asked(tmp_path: Path) -> None:
    there = Federation(configured("pfedhn", own={"novel_rounds": 2}), tmp_path)
    late, sent = Late(there), len(there.link.sent)
    for node in CLIENTS:
        del there.link.sites[node]
    assert {it.model for it in late.serve()} == {"kept"}
    assert {node for _, node, _ in there.link.sent[sent:]} == {NODE}


@pytest.mark.parametrize("models", ["nearest", "ensemble", "sampled"])
def test_a_method_that_asks_known_clients_is_refused(models: str, tmp_path: Path) -> None:
    there = Federation(configured("pfedhn", own={"novel_models": models}), tmp_path)
    late, sent = Late(there), len(there.link.sent)
    with pytest.raises(UserError, match="pfedhn must be served without others"):
        late.serve()
    assert len(there.link.sent) == sent


def test_a_run_that_is_not_done_or_not_at_sites_is_refused(tmp_path: Path) -> None:
    run = Run(configured("fedavg"), data())
    with pytest.raises(UserError, match=r"must be done before .* at round 0 of 2"):
        run.check_newcomers()
    for _ in run.train():
        pass
    with pytest.raises(UserError, match="by engine=auto; use hyperfed personalize"):
        run.check_newcomers()


def test_what_newcomers_let_out_is_on_their_account_and_no_one_elses(tmp_path: Path) -> None:
    private = configured("pfedhn", privacy={"epsilon": 1.0}, own={"novel_rounds": 3})
    there = Federation(private, tmp_path)
    late, run = Late(there, LENIENT), there.run
    before = {client: len(kept["multipliers"]) for client, kept in run.engine.released.items()}
    assert {it.model for it in late.serve()} == {"kept"}
    accounts = {who: held[0]["multipliers"] for who, held in run._newcomers.items()}
    assert accounts.keys() == {hash_of(f"late/{name}") for name in NAMES}
    assert {len(multipliers) for multipliers in accounts.values()} == {3}
    after = {client: len(kept["multipliers"]) for client, kept in run.engine.released.items()}
    assert after == before
    late.serve()  # the same question of the same data, which costs nothing
    assert {len(held[0]["multipliers"]) for held in run._newcomers.values()} == {3}
    stingy = Late(there, replace(LENIENT, epsilon=0.5), state="stingy").serve()
    assert {it.model for it in stingy} == {"not kept"}
    assert all("epsilon" in it.why for it in stingy)


def test_noise_is_as_much_at_a_site_as_where_a_newcomer_is_personalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run without novel clients, which reckoned with fewer answers."""
    monkeypatch.setattr(test_kept_models, "data", lambda: make_task(examples=(12, 15, 20, 14)))
    monkeypatch.setattr(test_kept_models, "CLIENTS", {1: (0, 2), 2: (1, 3)})
    private = configured("pfedhn", privacy={"epsilon": 1.0}, own={"novel_rounds": 3})
    late = Late(Federation(private, tmp_path), LENIENT)
    assert {it.model for it in late.serve()} == {"kept"}
    late.personalized("eve")
    accounts = late.there.run._newcomers.values()
    (multipliers,) = {tuple(held[0]["multipliers"].tolist()) for held in accounts}
    assert len(accounts) == 4
    assert len(multipliers) == 3


def test_what_was_let_out_before_a_failure_is_on_the_account(tmp_path: Path) -> None:
    private = configured("pfedhn", privacy={"epsilon": 1.0}, own={"novel_rounds": 3})
    there = Federation(private, tmp_path)
    late, asked = Late(there, LENIENT), []

    def once(site: Site, content: bytes) -> bytes:
        asked.append(content)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return site.handle(content)

    there.link.broken[NODE] = once
    with pytest.raises(KeyboardInterrupt):
        late.serve()
    accounts = there.run._newcomers
    assert accounts.keys() == {hash_of(f"late/{name}") for name in NAMES}
    assert {len(held[0]["multipliers"]) for held in accounts.values()} == {1}


def test_a_rate_at_which_everybody_diverges_is_told_of_those_who_came(tmp_path: Path) -> None:
    """Not of the made-up client with which it is found out whether known ones are asked."""
    there = Federation(configured("pfedhn", own={"novel_rounds": 3, "novel_lr": 1e308}), tmp_path)
    found = Late(there).serve()
    assert {it.model for it in found} == {"not kept"}
    assert all("finite" in it.why for it in found)


def introduced(**changes: Any) -> Introduction:
    member = Member("late", 10, 5, 5, size="M", novel=True)
    usual: dict[str, Any] = {"shape": (3, 8, 8), "dtype": "torch.uint8", "classes": 4}
    usual |= {"members": (member,), "pixels": 10, "mean": (0.9,) * 3, "std": (0.1,) * 3}
    return Introduction(**(usual | changes))


def roster(**changes: Any) -> Roster:
    members = (Member("a", 10, 5, 5, size="S"), Member("b", 10, 5, 5, size="M", novel=True))
    images = {"mean": (0.25,) * 3, "std": (0.5,) * 3}
    said = introduced(members=members, **images, **changes)
    return enrol([said], run=1, sizes=SIZES, keys={"a": "key of a"})


def test_the_frame_of_the_run_stays() -> None:
    known, new = roster(), introduced()
    keys = {"late": "its key", "other": "another"}
    everyone, refused = joined(known, [new], run=2, sizes=SIZES, keys=keys)
    assert refused == {}
    (late,) = new.members
    beside = introduced(members=(known.members[0], replace(late, novel=False)))
    assert joined(known, [beside], run=2, sizes=SIZES, keys=keys) == (everyone, {})
    assert everyone.frame == replace(known.frame, novel=2, newcomers=1, sizes=("S", "M", "M"))
    assert everyone.members == (*known.members, *new.members)
    assert everyone.keys == {"a": "key of a", "late": "its key"}
    assert (everyone.run, everyone.fingerprint) == (2, known.fingerprint)
    task = RemoteTask.of(everyone, data().models, "toy")
    assert (task.transform.mean, list(task.novel_ids)) == ((0.25,) * 3, [1, 2])  # type: ignore[attr-defined]
    assert (task.outline().clients, task.outline().novel) == (1, 1)


def test_a_newcomer_need_not_have_seen_every_label() -> None:
    everyone, refused = joined(roster(), [introduced(classes=3)], run=2, sizes=SIZES)
    assert refused == {}
    assert everyone.frame.classes == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": (3, 9, 9)}, r"examples must be \(3, 8, 8\) torch.uint8"),
        ({"dtype": "torch.float32", "mean": (), "std": ()}, "got .* torch.float32"),
        ({"classes": 5}, "labels must be of the 4 classes"),
        ({"classes": 0}, "labels must be of the 4 classes"),
        ({"target_size": 2}, "targets must have 1 numbers each, as those of the run have, got 2"),
        ({"features": "dose, age"}, "features must be the columns of the run's sites"),
        ({"labels": ("w", "x", "z", "y")}, "those of the run in their order, w, x, y, z"),
        ({"members": (Member("late", 10, 5, 5, novel=True),)}, "targets S, M, got none"),
    ],
)
def test_who_does_not_fit_is_told_why(changes: dict[str, Any], why: str) -> None:
    known = roster(labels=("w", "x", "y", "z"), features="age, dose")
    other = introduced(members=(Member("fits", 10, 5, 5, size="S", novel=True),))
    everyone, refused = joined(known, [introduced(**changes), other], run=2, sizes=SIZES)
    assert refused.keys() == {"late"}
    assert re.search(why, refused["late"])
    assert [member.name for member in everyone.members] == ["a", "b", "fits"]


def test_who_came_before_stays_and_who_was_not_served_does_not() -> None:
    known = roster()
    names = ("first", "second", "third")
    members = tuple(Member(name, 10, 5, 5, size="S", novel=True) for name in names)
    keys = dict.fromkeys(names, "theirs")
    came, _ = joined(known, [introduced(members=members)], run=2, sizes=SIZES, keys=keys)
    left = came.without({"first", "third"})
    assert left.frame == replace(known.frame, novel=2, newcomers=1, sizes=("S", "M", "S"))
    assert left.members == (*known.members, members[1])
    assert left.keys == known.keys | {"second": "theirs"}
    everyone, _ = joined(left, [introduced(members=members), introduced()], run=3, sizes=SIZES)
    assert [member.name for member in everyone.members[3:]] == ["first", "late", "third"]
    assert (everyone.frame.novel, everyone.frame.newcomers) == (5, 4)
    assert RemoteTask.of(everyone, data().models, "toy").outline().novel == 1


def test_who_is_at_two_sites_is_served_at_neither() -> None:
    everyone, refused = joined(roster(), [introduced(), introduced()], run=2, sizes=SIZES)
    assert refused == {"late": "a client must be at one site, but is at several"}
    assert everyone.frame == roster().frame
