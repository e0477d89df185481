"""A site's policy holds against a server that departs from the protocol."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engines.flower.policed import CONSTANT, FRAME, HONEST, MODEL, TASK, asked, log, site_in
from engines.flower.sites import DirectLink, remote
from hyperfed import trees
from hyperfed.data.examples import fingerprint_of_frozen
from hyperfed.data.own import mean_squared_error, minus_squared_error
from hyperfed.engines import calls
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.methods import (
    METHODS,
    fedala,
    fedas,
    fedavg,
    fedfomo,
    fedrep,
    itpfl,
    pfedhn,
    pfedla,
    pfedme,
)
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.randomness import seeded
from hyperfed.training import Epochs, Steps
from hyperfed.trees import Tree, frozen_of
from toys import Federation, Normed, Stemmed, make_task


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_honest_run_has_the_numbers_of_one_without_a_policy(method: Any, tmp_path: Path) -> None:
    """Bounds of what an update is made of are none of what else a method asks for."""
    task, name = make_task(examples=(48, 60)), method.__name__.rpartition(".")[2]
    given: dict[str, Any] = {"local_steps": 20, "batch_size": 24, "local_lr": 0.1}
    given |= {"encoder": "end_to_end"} if method is itpfl else {}  # which describes batches, too
    given = {key: given[key] for key in given if key in signature(method.Config).parameters}
    settings, bounds = method.Config(**given), {"local_steps": (20, 20), "batch_size": (24, 24)}
    sites = {
        node: Site(
            Shard(task, [node]), tmp_path / str(node), method.Client, settings, seed=0,
            method=name, policy=Policy(methods=(name,), settings=bounds),
        )
        for node in range(2)
    }  # fmt: skip
    ours, theirs = (Federation(name, task, **given) for _ in range(2))
    link = DirectLink(sites)
    theirs.engine = FlowerEngine(remote(task, link, sites), method.Client, settings, seed=0)
    found = []
    for each in (ours, theirs):
        each.round([0, 1], 0)
        each.round([1], 1)
        found.append(evaluate(each.server, each.engine, [0, 1], 2)["test"].loss)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(theirs.server.state(), ours.server.state(), rtol=0, atol=0)


def test_what_tells_of_labels_is_counted_where_the_site_says_so_alone(tmp_path: Path) -> None:
    told = asked(site_in(tmp_path / "strict", count=["r2"]), "evaluate")
    assert isinstance(told, Exception)
    assert "metrics must be among those that the site counts for (none), came r2" in str(told)
    assert "targets" not in asked(site_in(tmp_path / "none"), "evaluate")["test"]
    labels = {"count": ["f1"], "metrics": ("f1", "calibration")}
    classes = asked(site_in(tmp_path / "labels", **labels), "evaluate")["test"]["classes"]
    assert classes[0].tolist() == TASK.y[TASK.test[0]].bincount(minlength=3).tolist()
    refused = asked(
        site_in(tmp_path / "f1", count=["f1", "calibration"], metrics=("f1",)), "evaluate"
    )
    assert "(f1), came calibration" in str(refused)
    answer = asked(site_in(tmp_path / "allows", count=["r2"], metrics=("r2",)), "evaluate")
    y = TASK.y[TASK.test[0]].double()
    assert answer["test"]["targets"].tolist() == [y.sum().item(), y.square().sum().item()]


BODY = {name: leaf for name, leaf in MODEL.items() if "head" not in name}


def aligning(site: Site, **settings: Any) -> Tree | Exception:
    """Asks for a step that draws batches of its own, beside honest ones."""
    own = site_in(site.state, fedas, fedas.Config(**settings), methods=("fedas",))
    return asked(own, model=BODY, batches=HONEST)


def mixing(site: Site) -> Tree | Exception:
    """Asks for a step that goes through examples until a loss stays the same."""
    settings = fedala.Config(local_lr=0.1, first_epochs=10**9, loss_threshold=1e-300)
    limited = {"methods": ("fedala",), "largest_training": 1000}
    asked(site_in(site.state, fedala, settings, **limited), batches=HONEST)
    (site.state / "audit.jsonl").unlink()
    other = {name: 2 * leaf for name, leaf in MODEL.items()}
    memory = {"begin": {0: (10, 1)}, "serial": 2}
    return asked(site_in(site.state, fedala, settings, **limited), model=other, **memory)


def staying(site: Site, **settings: Any) -> Tree | Exception:
    """Asks for steps of which each goes through its batch some times."""
    limited = {"methods": ("pfedme",), "largest_training": 1000}
    own = site_in(site.state, pfedme, pfedme.Config(**settings), **limited)
    return asked(own, batches=Steps(2, 12))


def weighing(site: Site, **changes: Any) -> Tree | Exception:
    """Asks FedFomo's client how much less its loss is with other models, on validation data."""
    own = site_in(site.state, fedfomo, fedfomo.Config(), methods=("fedfomo",), **changes)
    return asked(own, "weigh", payload=({"0": {n: 2 * leaf for n, leaf in MODEL.items()}},))


def bounded(**bounds: tuple[int, int]) -> Callable[[Site, Any], Any]:
    def ask(site: Site, batches: Any) -> Any:
        return asked(site_in(site.state, settings=bounds), batches=batches)

    return ask


def stepping(site: Site, method: Any, steps: int = 1) -> Tree | Exception:
    """Asks for fewer steps than the run's settings say, of a client that answers with a body."""
    name = method.__name__.rpartition(".")[2]
    bounds = {"methods": (name,), "settings": {"local_steps": (10, 1000)}}
    own = site_in(site.state, method, method.Config(), **bounds)
    return asked(own, model=BODY, batches=Steps(steps, 12))


def passing(
    site: Site, passes: int, asked_for: int = 0, size: int = 12, **bounds: tuple[int, int]
) -> Tree | Exception:
    """Asks for passes in a run whose settings say how many."""
    settings = fedavg.Config(local_steps=10, local_epochs=passes, batch_size=size)
    here = site_in(site.state, fedavg, settings, settings=bounds)
    return asked(here, batches=Epochs(asked_for or passes, size))


def pooled(site: Site, *models: Tree) -> Tree | Exception:
    """Has a client evaluate several models, of which it counts what is to be expected."""
    settings = pfedhn.Config(novel_models="sampled", head_layers=0)
    own = site_in(site.state, pfedhn, settings, methods=("pfedhn",))
    return asked(own, "evaluate", model={"pool": trees.stack(models)})


DEPARTURES: dict[str, tuple[Callable[[Site], Any], str]] = {
    "the gradient of one example": (
        lambda site: asked(site, batches=Steps(1, 1)),
        "a batch must be of 4 examples at least here, came 1",
    ),
    "the same in many steps": (lambda site: asked(site, batches=Steps(500, 1)), "a batch must be"),
    "the same in passes": (lambda site: asked(site, batches=Epochs(3, 1)), "a batch must be"),
    "the gradient of a batch of few": (
        lambda site: asked(site, batches=Steps(1, 4)),
        "a reply must be of 11 examples at least here, came 4",
    ),
    "steps without end": (
        lambda site: asked(site, batches=Steps(10**9, 12)),
        "a step must be on 10000000 examples at most here, those that come again too, came 12000",
    ),
    "passes without end": (
        lambda site: asked(site, batches=Epochs(10**9, 12)),
        "a step must be on 10000000 examples at most here",
    ),
    "passes of a method's own without end": (
        lambda site: aligning(site, align_epochs=10**9),
        "a step must be on 10000000 examples at most here",
    ),
    "batches of one of a method's own": (
        lambda site: aligning(site, align_batch_size=1),
        "a batch must be of 4 examples at least here, came 1",
    ),
    "a loop of a method's own without end": (mixing, "a step must be on 1000 examples at most"),
    "one batch without end": (
        lambda site: staying(site, inner_steps=10**3),
        "a step must be on 1000 examples at most here, those that come again too, came 12000",
    ),
    "fewer steps than its settings say": (
        lambda site: bounded(local_steps=(10, 1000))(site, Steps(1, 12)),
        "trained on the batches that the settings say, Steps(count=50, size=64), which are bounded "
        "here, came Steps(count=1, size=12)",
    ),
    "a pass in their place": (
        lambda site: bounded(local_steps=(10, 1000))(site, Epochs(1, 12)),
        "which are bounded here, came Epochs(count=1, size=12)",
    ),
    "a pass as its settings say": (
        lambda site: passing(site, 1, local_steps=(10, 1000)),
        "local_steps must be 10 to 1000 here, came 1",
    ),
    "more passes": (
        lambda site: passing(site, 3, asked_for=9, local_epochs=(1, 5)),
        "which are bounded here, came Epochs(count=9, size=12)",
    ),
    "more steps": (
        lambda site: bounded(local_steps=(10, 1000))(site, Steps(1001, 12)),
        "which are bounded here, came Steps(count=1001, size=12)",
    ),
    "smaller batches": (
        lambda site: bounded(batch_size=(12, 64))(site, Steps(20, 11)),
        "which are bounded here, came Steps(count=20, size=11)",
    ),
    "fewer steps of a reply that is like nothing": (
        lambda site: stepping(site, fedas),
        "which are bounded here, came Steps(count=1, size=12)",
    ),
    "fewer steps of the body, after those of the head": (
        lambda site: stepping(site, fedrep, 51),
        "that the settings say, Steps(count=100, size=64), which are bounded here, came",
    ),
    "losses of few validation examples": (
        lambda site: weighing(site, smallest_evaluation=len(TASK.val[0]) + 1),
        "a choice by validation data must be of 7 examples at least here, came 6",
    ),
    "a client of few": (
        lambda site: asked(site, client=1, batches=HONEST),
        "a reply must be of 11 examples at least here, came 7",
    ),
    "no batches at all": (lambda site: asked(site, client=1), "a reply must be of 11"),
    "a constant model": (
        lambda site: asked(site, "evaluate", model=CONSTANT),
        "this one says the same of all",
    ),
    "a model of noise too small to count": (
        lambda site: asked(
            site, "evaluate", model=CONSTANT | {"head.weight": 1e-6 * MODEL["head.weight"]}
        ),
        "this one says the same of all",
    ),
    "constant models that differ": (
        lambda site: pooled(site, CONSTANT, {name: 2 * leaf for name, leaf in CONSTANT.items()}),
        "this one says the same of all",
    ),
    "a constant model among others": (
        lambda site: pooled(site, MODEL, CONSTANT),
        "this one says the same of all",
    ),
    "a client's own model": (lambda site: asked(site, "export"), "the step export is not run here"),
    "how many examples of each class": (
        lambda site: asked(
            site_in(site.state, pfedhn, methods=("pfedhn",)), "class_counts", payload=()
        ),
        "the step class_counts is not run here",
    ),
    "in which shares": (
        lambda site: asked(
            site_in(site.state, pfedhn, methods=("pfedhn",)), "class_proportions", payload=()
        ),
        "the step class_proportions is not run here",
    ),
}


def test_a_model_of_numbers_is_evaluated_where_it_reads_its_inputs(tmp_path: Path) -> None:
    losses: dict[str, Any] = {"loss": mean_squared_error, "score": minus_squared_error}
    task = make_task(lambda: nn.Linear(5, 1).double(), classes=0, examples=(12,) * 4, **losses)
    task = replace(task, y=task.y.double())
    site = Site(
        Shard(task, range(4)), tmp_path, fedavg.Client, fedavg.Config(), seed=0, method="fedavg",
        policy=Policy(methods=("fedavg",), smallest_batch=1),
    )  # fmt: skip
    model = task.outline().initial()
    frame = replace(FRAME, known=4, novel=0, classes=0)
    assert not isinstance(asked(site, "evaluate", model=model, frame=frame), Exception)
    constant = model | {"weight": torch.zeros_like(model["weight"])}
    told = asked(site, "evaluate", client=1, model=constant, frame=frame)
    assert "this one says the same of all" in str(told)


@pytest.mark.parametrize("departure", sorted(DEPARTURES))
def test_a_server_that_departs_from_the_protocol_is_refused(departure: str, tmp_path: Path) -> None:
    ask, message = DEPARTURES[departure]
    answer = ask(site_in(tmp_path))
    assert message in str(answer)
    assert isinstance(answer, Exception)
    (entry,) = log(tmp_path)
    assert message in entry["decision"]
    assert entry["decision"].startswith("refused: ")
    assert entry["bytes_out"] == 0


@pytest.mark.parametrize(("step", "batches"), [("train_model", HONEST), ("evaluate", None)])
def test_an_error_quotes_no_example(step: str, batches: Any, tmp_path: Path) -> None:
    """PyTorch's of a model with one output says a label that has none."""
    narrow = {name: leaf[:1] if "head" in name else leaf for name, leaf in MODEL.items()}
    answer = asked(site_in(tmp_path), step, model=narrow, batches=batches)
    assert str(answer) == "IndexError: its site's audit log says more"
    (entry,) = log(tmp_path)
    assert re.fullmatch(r"IndexError: Target [12] is out of bounds\.", entry["decision"])


@pytest.mark.parametrize(
    ("step", "options"),
    [
        ("train_model", {"batches": HONEST}),
        ("train_model", {"batches": Epochs(1, 4)}),
        ("train_model", {"batches": Steps(1, 11)}),
        ("evaluate", {}),
        ("evaluate", {"client": 1}),
    ],
)
def test_what_the_policy_allows_is_answered(
    step: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert isinstance(asked(site_in(tmp_path), step, **options), dict)
    (entry,) = log(tmp_path)
    assert entry["decision"] == "answered"


def test_examples_are_counted_of_the_batches_that_the_runs_seed_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the seed alone, three of them are of one number of examples or of another."""
    trained, draw = [], calls.draw

    def drawn(*arguments: Any) -> torch.Tensor:
        rows = draw(*arguments)
        trained.append(len({*rows.tolist()}))
        return rows

    monkeypatch.setattr(calls, "draw", drawn)  # of the engine, and not of the policy
    folders = [tmp_path / str(seed) for seed in range(6)]
    for seed, folder in enumerate(folders):
        site = site_in(folder, seed=seed, smallest_reply=1)
        assert isinstance(asked(site, batches=Steps(3, 4)), dict)
    counted = [entry["examples"] for folder in folders for entry in log(folder)]
    assert counted == trained
    assert len({*counted}) > 1


def test_what_few_steps_have_made_is_not_told_by_a_step_that_makes_none(tmp_path: Path) -> None:
    """A step that replies with nothing may train on any batches, and its client keeps the model."""
    bounds = {"methods": ("pfedla",), "settings": {"local_steps": (10, 1000)}}
    site = site_in(tmp_path, pfedla, pfedla.Config(), **bounds)
    assert asked(site, "join", batches=Steps(1, 12)) == {}
    told = asked(site, payload=({},), serial=2, begin={0: (10, 1)})
    assert isinstance(told, Exception)
    assert "a step that trains must be asked for batches here, came none" in str(told)


def test_a_batch_may_come_again_within_the_bounds(tmp_path: Path) -> None:
    assert isinstance(staying(site_in(tmp_path), inner_steps=40), dict)  # 960 examples


def test_models_of_a_pool_that_read_their_input_are_counted_by(tmp_path: Path) -> None:
    assert isinstance(pooled(site_in(tmp_path), MODEL, MODEL), dict)


def test_methods_and_settings_are_bounded(tmp_path: Path) -> None:
    assert "must be one that the site runs, came fedavg" in str(
        asked(site_in(tmp_path, methods=("pefll",)), batches=HONEST)
    )
    bound = {"local_lr": (0.0, 0.05), "embedding_size": (1, 2)}  # the other is not of this method
    told = str(asked(site_in(tmp_path, settings=bound), batches=HONEST, serial=2))
    assert "local_lr must be 0 to 0.05 here, came 0.1" in told
    allowed = site_in(tmp_path, settings={"local_lr": (0.1, 0.1)})
    assert isinstance(asked(allowed, batches=HONEST, serial=3), dict)
    assert [entry["decision"].partition(":")[0] for entry in log(tmp_path)] == [
        "refused",
        "refused",
        "answered",
    ]


@pytest.mark.parametrize(
    ("passes", "size", "bounds"),
    [
        (10, 12, {"local_steps": (10, 10)}),
        (5, 6, {"local_steps": (10, 10)}),  # of two steps each
        (1, 12, {"local_epochs": (1, 5)}),
        (1, 12, {"local_epochs": (1, 5), "local_steps": (10, 1000)}),
    ],
)
def test_passes_within_bounds_are_answered(
    passes: int, size: int, bounds: Any, tmp_path: Path
) -> None:
    assert isinstance(passing(site_in(tmp_path), passes, size=size, **bounds), dict)


def test_a_model_that_a_client_keeps_is_not_replied_by_another_method(tmp_path: Path) -> None:
    """FedAS's clients keep a model each; FedFomo's would go on from that, and reply with it."""
    kept = site_in(tmp_path, fedas, methods=("fedas",))
    assert isinstance(asked(kept, model=BODY, batches=HONEST), dict)
    memory = {"serial": 2, "begin": {0: (10, 1)}}
    other = site_in(tmp_path, fedfomo, methods=("fedfomo",))
    told = asked(other, "weigh", payload=({},), **memory)
    assert "a run must go on with the method that it began with" in str(told)
    assert log(tmp_path)[-1]["decision"].startswith("refused: a run must go on")


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"local_lr": 1e-9}, "local_lr"), ({"net": Normed}, "targets"), ({}, ""), ({"new": 1}, "")],
)
def test_a_run_goes_on_with_the_settings_that_it_began_with(
    changed: dict[str, Any], what: str, tmp_path: Path
) -> None:
    asked(site_in(tmp_path), batches=HONEST)
    net, new = changed.pop("net", None), changed.pop("new", None)
    here = site_in(tmp_path, fedavg, fedavg.Config(**{"local_lr": 0.1} | changed))
    if net:
        here.source = Shard(make_task(net, examples=(12, 7, 20, 9), novel=1), range(4))
    if new:  # the site has another version of hyperfed since
        known = json.loads((tmp_path / "run-1" / "settings.json").read_text())
        known["settings"] = {"of_old": 1} | {"local_lr": known["settings"]["local_lr"]}
        (tmp_path / "run-1" / "settings.json").write_text(json.dumps(known))
    model = here.source.whole.initial("base")
    told = asked(here, model=model, batches=HONEST, serial=2)
    assert isinstance(told, dict) == (not what)
    if what:
        assert f"a run must go on with the {what} that it began with" in str(told)


def test_a_choice_by_enough_validation_data_is_answered(tmp_path: Path) -> None:
    answer = weighing(site_in(tmp_path), smallest_evaluation=len(TASK.val[0]))
    assert isinstance(answer, dict)


@pytest.mark.parametrize(("method", "kept"), [("fedavg", 1), ("pefll", 0)])
def test_nothing_of_a_run_that_is_refused_is_kept(method: str, kept: int, tmp_path: Path) -> None:
    """Of one that is not, the site has what is frozen in its targets: up to a GB of a message."""
    announced = make_task(Stemmed).models
    weights = {"base": frozen_of(announced["base"])}
    here = site_in(tmp_path, methods=(method,))
    with seeded(1, "toy"):
        other = {"base": Stemmed().double()}
    here.source = Shard(replace(TASK, models=other), range(4))
    asked(here, batches=HONEST, frozen=fingerprint_of_frozen(announced), weights=weights)
    assert len([*tmp_path.glob("frozen-*")]) == kept


@pytest.mark.parametrize(("most", "allowed"), [(160, True), (159, False)])
def test_as_many_examples_are_trained_on_as_the_site_says(
    most: int, allowed: bool, tmp_path: Path
) -> None:
    answer = asked(site_in(tmp_path, largest_training=most), batches=HONEST)  # 20 times 8
    assert isinstance(answer, dict) == allowed


def test_a_message_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="must have 100 bytes at most, has"):
        asked(site_in(tmp_path, largest_message=100), batches=HONEST)


def test_a_bounded_setting_that_is_no_number_is_outside() -> None:
    policy = Policy(settings={"epsilon": (0.01, 1.0)})
    policy.check_run("itpfl", itpfl.Config(epsilon=0.5))
    with pytest.raises(RefusedError, match=r"epsilon must be 0\.01 to 1 here, came None"):
        policy.check_run("itpfl", itpfl.Config(epsilon=None))


def test_the_smallest_evaluation_is_of_each_split(tmp_path: Path) -> None:
    told = str(asked(site_in(tmp_path, smallest_evaluation=7), "evaluate"))
    assert "counts of an evaluation must be of 7 examples at least here, came 6" in told


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_smallest_evaluation_is_of_the_smaller_split(split: str, tmp_path: Path) -> None:
    here = site_in(tmp_path, smallest_evaluation=6)
    few = [rows[:5] for rows in getattr(TASK, split)]
    here.source = Shard(replace(TASK, **{split: few}), range(4))
    told = str(asked(here, "evaluate"))
    assert "counts of an evaluation must be of 6 examples at least here, came 5" in told


def test_a_batch_is_no_larger_than_what_its_client_has(tmp_path: Path) -> None:
    here = site_in(tmp_path, smallest_batch=8, smallest_reply=1)
    told = str(asked(here, client=1, batches=Steps(20, 64)))
    assert "a batch must be of 8 examples at least here, came 7" in told


def test_a_model_whose_logits_all_move_alike_says_the_same_of_all(tmp_path: Path) -> None:
    alike = MODEL | {"head.weight": torch.ones_like(MODEL["head.weight"])}
    told = str(asked(site_in(tmp_path), "evaluate", model=alike))
    assert "this one says the same of all" in told


def test_who_has_too_few_to_reply_may_be_fine_tuned(tmp_path: Path) -> None:
    answer = asked(site_in(tmp_path), "finetune", client=1, batches=HONEST)
    assert answer == {}
