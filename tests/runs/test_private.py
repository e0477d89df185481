"""Private training of a run: how much noise it takes, and what was spent of it."""

import math
import re
from collections import Counter, deque
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperfed
from hyperfed.engines.made_up import EXAMPLES
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.methods import METHODS
from hyperfed.privacy import Releases
from hyperfed.runs.capability import NO_UPDATES
from hyperfed.runs.config import from_keys
from hyperfed.runs.private import AggregateNoise, charge, cohort_of
from hyperfed.runs.run import Run
from hyperfed.system.randomness import seeded
from hyperfed.trees import Tree, tree_map
from toys import Normed, TwoLayers, lengths, make_task, make_token_task

TASK = {"clients": 8, "novel": 0.0, "model": "mlp", "hidden": [4]}
SMALL: dict[str, Any] = {"rounds": 4, "cohort": 3, "evaluate_every": 4, "task": TASK}
QUICK = {"local_steps": 1, "batch_size": 8}
DELTA = 1e-3
CENTRAL = {"where": "central"}


def begun(method: str = "fedavg", epsilon: float = 8.0, **keys: Any) -> Run:
    private = {"epsilon": epsilon, "delta": DELTA} | keys.pop("privacy", {})
    settings = SMALL | {"method": QUICK | keys.pop("own", {})} | keys
    return Run(from_keys(method, settings | {"privacy": private, "track": "none"}))


def train(*given: Any, **keys: Any) -> Run:
    run = begun(*given, **keys)
    for _ in run.train():
        pass
    return run


def normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def delta_of(epsilon: float, multiplier: float, answers: int) -> float:
    """Of so many Gaussian answers: the hockey-stick divergence of N(0, 1) from N(mu, 1)."""
    mu = math.sqrt(answers) / multiplier
    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


def renyi_epsilon(multiplier: float, answers: int) -> float:
    """The bound of Mironov (2017): order a costs answers a / (2 z^2), and log(1/delta)/(a - 1)."""
    orders = [1 + n / 20 for n in range(1, 2000)]
    return min(answers * a / (2 * multiplier**2) + math.log(1 / DELTA) / (a - 1) for a in orders)


@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_epsilon_is_that_of_the_client_who_answers_most_often(where: str, epsilon: float) -> None:
    run = train(epsilon=epsilon, privacy={"where": where}, rounds=6)
    told = run.summary["privacy"]
    answers = {client: len(kept["multipliers"]) for client, kept in run.engine.released.items()}
    assert sum(answers.values()) == 6 * SMALL["cohort"]
    most = max(answers.values())
    assert 1 < most < 6  # or rounds would do as well
    z = told["noise_multiplier"]
    assert delta_of(epsilon, z, most) == pytest.approx(DELTA, rel=1e-6)
    assert epsilon <= renyi_epsilon(z, most) <= 2 * epsilon  # a bound, not exact
    assert told["epsilon_spent"] == pytest.approx(epsilon, rel=1e-6)
    for bare in ("evaluations", "numbers of examples", "labels", "a hash", "channels", "classes"):
        assert bare in told["not_covered"]
    for client, spent in enumerate(told["epsilon_of_clients"]):
        count = answers.get(client, 0)
        assert (spent == 0) == (count == 0)
        if count:
            assert delta_of(spent, z, count) == pytest.approx(DELTA, rel=1e-6)


def test_the_composition_is_that_of_privacy_loss_distributions_too() -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    from hyperfed.privacy import multiplier_of

    event = dp_accounting.GaussianDpEvent(multiplier_of(4.0, DELTA, 30))
    composed = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, 30))
    assert composed.get_epsilon(DELTA) == pytest.approx(4.0, rel=1e-2)


def test_what_a_client_answers_counts_also_where_it_does_not_arrive() -> None:
    # Of faults.drop the client was never reached; with faults.nan what it sent was spoiled.
    run = train(faults={"nan": 0.6}, seed=1)
    lost = Counter(entry.client for e in run.evaluations for entry in e.lost)
    assert sum(lost.values())
    answers = {client: len(kept["multipliers"]) for client, kept in run.engine.released.items()}
    assert sum(answers.values()) == SMALL["rounds"] * SMALL["cohort"]
    dropped = train(faults={"drop": 0.6}, seed=1)
    count = sum(len(kept["multipliers"]) for kept in dropped.engine.released.values())
    missing = sum(len(e.lost) for e in dropped.evaluations if e.split == "val")
    assert count + missing == SMALL["rounds"] * SMALL["cohort"]
    assert 0 < count < SMALL["rounds"] * SMALL["cohort"]


def test_a_round_that_is_taken_back_was_told_of_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hyperfed.runs.rounds.is_finite", lambda server: False)
    run = train(privacy={"where": "central"})
    assert run.summary["void_rounds"] == SMALL["rounds"]
    answers = [len(kept["multipliers"]) for kept in run.engine.released.values()]
    assert sum(answers) == SMALL["rounds"] * SMALL["cohort"]


def test_who_is_alone_in_a_round_is_not_lost_by_its_own_noise() -> None:
    """Which is more than a hundred times as long as the model that it was sent."""
    run = train(epsilon=0.01, cohort=1)
    assert not [entry for e in run.evaluations for entry in e.lost]
    assert sum(len(kept["multipliers"]) for kept in run.engine.released.values()) == 4


def test_a_trusted_server_adds_noise_of_the_round_and_of_the_runs_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise that came twice would be gone from the difference of what was told."""
    add, found = AggregateNoise.add, []

    def noted(self: AggregateNoise, mean: Tree, share: float, clients: Any = None) -> Tree:
        told = add(self, mean, share, clients)
        name = max(mean, key=lambda name: mean[name].numel())
        found.append((told[name] - mean[name]) / share)
        return told

    runs = [begun(privacy=CENTRAL, rounds=2, seed=seed) for seed in (1, 2)]
    monkeypatch.setattr(AggregateNoise, "add", noted)  # and not in the plans of the runs
    for run in runs:
        assert len(list(run.train())) == 2
    first, second, other, _ = found  # a mean a round
    for unlike in (second, other):  # independent: the difference has twice the variance
        assert (unlike - first).std() > first.std()


def test_a_mean_is_paid_for_beside_what_its_clients_have_let_out_by_themselves() -> None:
    """Which a method of one's own may have them do: what is kept is given again for nothing."""
    kept = {"multipliers": torch.tensor([2.0]).double(), "answers": {"q": torch.ones(1)}}
    engine: Any = SimpleNamespace(released={0: kept})
    charge(engine, [0, 1], PrivateUpdates("central", 1.0, 3.0, math.inf, DELTA))
    assert {c: of["multipliers"].tolist() for c, of in engine.released.items()} == {
        0: [2.0, 3.0],
        1: [3.0],
    }
    assert engine.released[0]["answers"] == kept["answers"]


@pytest.mark.parametrize("where", ["local", "central"])
def test_a_run_that_is_gone_on_with_spends_what_one_that_never_stopped_does(
    where: str, tmp_path: Path
) -> None:
    keys = SMALL | {"method": QUICK, "privacy": {"epsilon": 8.0, "where": where}, "track": "none"}
    whole = Run(from_keys("fedper", keys))
    for _ in whole.train():
        pass
    stopped = Run.start(from_keys("fedper", keys), tmp_path)
    for progress in stopped.train():
        if progress.round == 2:
            stopped.stop()
    assert stopped.folder is not None
    resumed = hyperfed.resume(stopped.folder.path)
    assert resumed.summary["privacy"] == whole.summary["privacy"]
    assert resumed.evaluations[-1].client_loss == whole.evaluations[-1].client_loss
    opened = hyperfed.open_run(stopped.folder.path)
    assert opened.privacy() == whole.summary["privacy"]


def test_every_reply_of_a_round_and_of_serving_is_an_answer() -> None:
    run = train("pefll", epsilon=50.0, evaluate_every=2)
    drawn = Counter(client for number in range(4) for client in drawn_in(run, number))
    for client in range(8):  # three in a round, one for each of two evaluations
        assert len(run.engine.released[client]["multipliers"]) == 3 * drawn[client] + 2
    before = run.privacy()
    run.model(0)  # is made of the same answer once more
    assert run.privacy() == before
    assert before == run.summary["privacy"]


def test_an_answer_that_is_posted_is_one_of_its_round() -> None:
    run = train("pefll", epsilon=50.0, evaluate_every=2, own={"delayed_gradient": True})
    drawn = Counter(client for number in range(4) for client in drawn_in(run, number))
    for client in range(8):
        assert len(run.engine.released[client]["multipliers"]) == 3 * drawn[client] + 2
    assert run.summary["privacy"]["epsilon_spent"] == pytest.approx(50, rel=1e-6)
    assert not [lost for e in run.evaluations for lost in e.lost]


def test_noise_is_for_an_evaluation_after_the_last_round_too() -> None:
    run = train("pefll", epsilon=50.0, rounds=5, evaluate_every=2)
    assert [e.round for e in run.evaluations if e.split == "test"] == [2, 4, 5]
    assert run.evaluations[-1].evaluated == "8 of 8"
    drawn = Counter(client for number in range(5) for client in drawn_in(run, number))
    for client in range(8):
        assert len(run.engine.released[client]["multipliers"]) == 3 * drawn[client] + 3
    assert run.summary["privacy"]["epsilon_spent"] == pytest.approx(50, rel=1e-6)


def drawn_in(run: Run, number: int) -> list[int]:
    return cohort_of(run.config, run.task, number)


def test_a_newcomer_s_exchanges_are_answers_and_a_second_time_is_refused() -> None:
    task = TASK | {"novel": 2}
    run = train("pfedhn", epsilon=50.0, task=task, own={"novel_rounds": 9})
    assert {len(run.engine.released[c]["multipliers"]) for c in (6, 7)} == {9}
    assert run.summary["privacy"]["epsilon_spent"] == pytest.approx(50, rel=1e-6)
    with pytest.raises(UserError, match=r"must stay within epsilon 50 at delta 0\.001"):
        run.evaluate_novel(draws=2)


def test_a_newcomer_is_served_by_a_run_without_novel_clients_too() -> None:
    """Who answers more often than those who trained, and has noise for that."""
    keys: dict[str, Any] = {"own": {"novel_rounds": 9}, "rounds": 2, "cohort": 1.0}
    run = train("pfedhn", **keys)
    run.personalize(run.task.x[:9], run.task.y[:9])
    (account,) = run._newcomers.values()
    with_novel = begun("pfedhn", **keys, task=TASK | {"novel": 1}).private
    assert with_novel is not None
    assert run.private is not None
    assert account[0]["multipliers"].tolist() == [with_novel.multiplier] * 9
    assert with_novel.multiplier > run.private.multiplier
    told = run.privacy()
    assert told is not None
    assert told["epsilon_spent"] == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("method", sorted({*METHODS} - {*NO_UPDATES}))
def test_of_several_sizes_each_client_pays_for_the_means_that_it_is_in(method: str) -> None:
    """Those of its own size, and those of all of them: no more than where there is one size."""
    keys = {"rounds": 2, "cohort": 1.0, "evaluate_every": 2, "track": "none"}
    private = {"epsilon": 8.0, "delta": DELTA, "where": "central"}
    own = QUICK | lengths(method)
    if method in ("pefll", "headstart"):
        own["standardize"] = False
    with seeded(0, "sizes"):
        models = {size: TwoLayers().double() for size in "SML"}
    noise = []
    for sizes in ((), ("S", "L", "M", "S", "L")):
        kinds = {"models": models, "sizes": sizes} if sizes else {}
        task = make_task(examples=(8, 8, 8, 9, 9), **kinds)
        run = Run(from_keys(method, keys | {"privacy": private, "method": own}), task)
        list(run.train())
        answers = [len(kept["multipliers"]) for kept in run.engine.released.values()]
        assert len(answers) == 5
        assert len(set(answers)) == 1
        noise.append(run.summary["privacy"]["noise_multiplier"])
        assert run.summary["privacy"]["epsilon_spent"] == pytest.approx(8, rel=1e-6)
    assert noise[1] == noise[0]


@pytest.mark.parametrize("method", ["pfedhn", "mh_pfedhn"])
def test_a_newcomer_begins_at_a_draw_of_its_own_for_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says nothing of its data, so that it is neither shortened nor blurred."""
    begun: list[torch.Tensor] = []
    fit = METHODS[method].fit_rows

    def fit_rows(rows: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        begun.append(rows.detach().clone())
        return fit(rows, *others, **options)

    monkeypatch.setattr(METHODS[method], "fit_rows", fit_rows)
    own = {"novel_rounds": 3} | ({"novel_start": "random"} if method == "pfedhn" else {})
    at = {}
    for privacy in ({"where": "local"}, {"where": "central"}, {"epsilon": None}):
        run = train(method, 50.0, task=TASK | {"novel": 2}, own=own, privacy=privacy)
        at[privacy.get("where")] = begun[-1]
        if privacy == {"where": "local"}:
            assert {len(run.engine.released[c]["multipliers"]) for c in (6, 7)} == {3}
    torch.testing.assert_close(at["local"], at[None], rtol=0, atol=0)
    torch.testing.assert_close(at["central"], at[None], rtol=0, atol=0)


def test_what_known_clients_answer_after_training_stays_told(tmp_path: Path) -> None:
    keys = SMALL | {"track": "none", "privacy": {"epsilon": 8.0, "delta": DELTA}}
    own = QUICK | {"descriptor_size": 4}
    run = Run.start(from_keys("pefll", keys | {"method": own}), tmp_path)
    list(run.train())
    run.close()
    assert run.folder is not None
    spent = run.summary["privacy"]["epsilon_of_clients"]
    least = min(range(8), key=spent.__getitem__)

    def asked(rate: float) -> None:
        opened = hyperfed.open_run(run.folder.path)
        opened.served_otherwise([f"method.local_lr={rate}"]).model(least)

    for rate in (0.01, 0.02, 0.03, 0.02):  # each is another question, but for the last
        asked(rate)
    z = run.summary["privacy"]["noise_multiplier"]
    answers = len(run.engine.released[least]["multipliers"]) + 3
    told = hyperfed.open_run(run.folder.path).privacy()
    assert delta_of(told["epsilon_of_clients"][least], z, answers) == pytest.approx(DELTA, rel=1e-6)
    with pytest.raises(UserError, match="must stay within epsilon 8"):
        deque(map(asked, range(1, 99)))


@pytest.mark.parametrize("hidden", [4, 100])
def test_other_data_and_other_settings_have_noise_of_their_own(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the difference of two answers would be bare; those of 100 are too long to be kept."""
    noise: list[torch.Tensor] = []
    told: list[torch.Tensor] = []
    release = Releases.release

    def seen(self: Releases, value: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        answer = release(self, value, *others, **options)
        noise.append(answer - value)
        return answer

    task = TASK | {"novel": 1, "hidden": [hidden]}
    run = train("pfedhn", epsilon=50.0, task=task, own={"novel_rounds": 1})
    monkeypatch.setattr(Releases, "release", seen)
    for settings, samples in (([], 9), ([], 8), (["method.local_lr=0.07"], 9)):
        run.engine.released.clear()  # or it may not be served again
        served = run.served_otherwise(settings, samples=samples)
        noise.clear()  # of the made-up clients by which noise is planned
        served.evaluate_novel()
        (own,) = noise
        told.append(own)
    for one, other in combinations(told, 2):
        assert (one - other).std() > one.std()


def test_models_of_bare_answers_are_sent_to_nobody_else() -> None:
    central = {"privacy": CENTRAL, "own": {"standardize": False}}
    assert train("pefll", **central).summary["others_accuracy"] is None
    assert train("pefll").summary["others_accuracy"] is not None
    with pytest.raises(UserError, match="examine=crossed needs models that others may see"):
        train("pefll", **central, examine="crossed")


@pytest.mark.parametrize("hidden", [4, 100])
def test_a_newcomer_s_model_is_given_again_for_nothing(hidden: int) -> None:
    """An answer of pFedHN's is as long as the model: of 10 * hidden and more numbers."""
    task = TASK | {"novel": 1, "hidden": [hidden]}
    run = train("pfedhn", epsilon=50.0, task=task, own={"novel_rounds": 9})
    newcomer = run.task.x[:9], run.task.y[:9]
    model = run.personalize(*newcomer).state_dict()
    (account,) = run._newcomers.values()
    assert len(account[0]["multipliers"]) == 9  # its answers are blurred as those of training are
    before = run.privacy()
    assert before["epsilon_spent"] == pytest.approx(50, rel=1e-6)
    again = run.personalize(*newcomer).state_dict()
    torch.testing.assert_close(again, model, rtol=0, atol=0)
    assert run.evaluate_novel().client_loss == run.evaluations[-1].client_loss
    run.model(7)
    assert run.privacy() == before


def test_a_newcomer_is_known_by_its_examples_in_any_order_and_with_any_labels() -> None:
    """Or whoever turns its examples round would have another budget for them."""
    run = train("pfedhn", own={"novel_rounds": 1}, task=TASK | {"novel": 1})
    x, y = run.task.x[:9], run.task.y[:9]
    for examples, labels in ((x, y), (x.flip(0), y.flip(0)), (x, y.flip(0))):
        run.personalize(examples, labels)
    (account,) = run._newcomers.values()
    assert len(account[0]["multipliers"]) == 3
    run.personalize(x[:8], y[:8])
    assert len(run._newcomers) == 2


def test_a_newcomer_of_another_size_is_not_given_the_model_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hyperfed.engines.calls.KEPT", 0)  # as of a large target
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    keys = {"rounds": 3, "cohort": 1.0, "evaluate_every": 3, "track": "none"}
    own = {"method": QUICK | {"novel_rounds": 1}, "privacy": {"epsilon": 50.0, "delta": DELTA}}
    run = Run(from_keys("pfedhn", keys | own), task)
    list(run.train())
    newcomer = task.x[:9].numpy(), task.y[:9].numpy()
    for _ in range(2):
        for size, kind in (("S", TwoLayers), ("L", Normed)):
            assert isinstance(run.personalize(*newcomer, size=size), kind)
    (account,) = run._newcomers.values()
    assert len(account[0]["multipliers"]) == 2  # each was made once


NEWCOMERS = TASK | {"novel": 2, "hidden": [100]}
OWN: dict[str, dict[str, Any]] = {
    "pfedhn": {"novel_rounds": 3},
    "mh_pfedhn": {"novel_rounds": 3},
    "headstart": {"label_dropout": 0.5},
}


@pytest.mark.parametrize("method", OWN)
def test_a_novel_client_s_model_is_made_once_and_kept(method: str, tmp_path: Path) -> None:
    run, told = stored(method, tmp_path)
    for served in (run, hyperfed.open_run(run.folder.path)):
        for novel in (7, 6):
            assert served.evaluate_novel().client_loss == told.client_loss
            loss = loss_of(served, served.model(novel), novel)
            assert loss == pytest.approx(told.client_loss[novel - 6])
        assert served.privacy() == run.summary["privacy"]


def test_another_model_of_a_novel_client_s_is_paid_for(tmp_path: Path) -> None:
    run, _ = stored("pfedhn", tmp_path)
    with pytest.raises(UserError, match=r"must stay within epsilon 50 .* given again for nothing"):
        run.evaluate_novel(draws=2)
    for other in (
        run.served_otherwise(samples=3),
        run.served_otherwise(["method.lr=0.5"]),
        run.served_otherwise(["task.novel_corruption=blur"]),
    ):
        with pytest.raises(UserError, match="must stay within epsilon 50"):
            other.evaluate_novel()


def test_what_was_made_stays_where_more_is_asked_for(tmp_path: Path) -> None:
    """Novel clients of HeadStart have answered less often than those that trained."""
    run, told = stored("headstart", tmp_path)
    run.served_otherwise(samples=3).evaluate_novel()
    with pytest.raises(UserError, match="must stay within epsilon 50"):  # without labels
        run.served_otherwise(["task.unlabelled=true"]).evaluate_novel()
    after = run.privacy()
    assert len(run.engine.released[6]["multipliers"]) > 10
    assert run.evaluate_novel().client_loss == told.client_loss
    assert run.privacy() == after


def test_what_was_made_is_tuned_on_by_its_client_for_nothing(tmp_path: Path) -> None:
    run, told = stored("pfedhn", tmp_path)
    tuned = run.served_otherwise(["serve.finetune_steps=3", "method.local_lr=0.1"])
    with pytest.raises(UserError, match="must stay within epsilon 50"):  # another rate
        tuned.evaluate_novel()
    tuned = run.served_otherwise(["serve.finetune_steps=3"])
    found = tuned.evaluate_novel()
    assert found.client_loss != told.client_loss
    assert loss_of(tuned, tuned.model(6), 6) == pytest.approx(found.client_loss[0])
    assert run.evaluate_novel().client_loss == told.client_loss


def test_who_was_lost_when_others_were_served_is_served_beside_them() -> None:
    run = train("pfedhn", epsilon=50.0, task=NEWCOMERS, own={"novel_rounds": 3})
    _, other = run.evaluate_novel().client_loss
    del run.engine.released[6]
    found = run.evaluate_novel().client_loss
    assert found[1] == other
    assert len(run.engine.released[6]["multipliers"]) == 3
    assert loss_of(run, run.model(6), 6) == pytest.approx(found[0])
    assert run.evaluate_novel().client_loss == found


def test_what_novel_clients_let_out_while_a_run_is_stopped_is_spent_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each opening is that of a process of its own."""
    keys = SMALL | {"evaluate_every": 2, "task": NEWCOMERS | {"val": 0.0}, "track": "none"}
    keys |= {"privacy": {"epsilon": 50.0, "delta": DELTA}, "method": QUICK | {"novel_rounds": 3}}
    run = Run.start(from_keys("pfedhn", keys), tmp_path)
    for progress in run.train():
        if progress.round == 2:
            run.stop()
    run.close()
    assert run.folder is not None
    hyperfed.open_run(run.folder.path).model(6)
    stopped = hyperfed.open_run(run.folder.path)
    assert len(stopped.engine.released[6]["multipliers"]) == 3
    assert 7 not in stopped.engine.released
    done = hyperfed.resume(run.folder.path, progress=False)
    assert "novel clients are not evaluated: all queries to a client must stay" in caplog.text
    assert done.summary["novel_accuracy"] is None
    assert done.summary["test_accuracy"] is not None
    assert done.summary["privacy"]["epsilon_spent"] == pytest.approx(50)
    assert hyperfed.open_run(run.folder.path).summary == done.summary


def test_what_a_server_makes_when_it_has_learned_more_is_made_anew() -> None:
    """Without validation data the last round is the best."""
    run = begun("headstart", 50.0, task=NEWCOMERS | {"val": 0.0}, evaluate_every=2)
    rounds = run.train()
    assert [next(rounds).round for _ in range(2)] == [1, 2]
    early = run.evaluate_novel().client_loss
    assert run.evaluate_novel().client_loss == early
    assert len(list(rounds)) == 2
    assert not {*early} & {*run.evaluations[-1].client_loss}


def test_a_model_that_did_not_come_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train("headstart", 50.0, task=NEWCOMERS)
    told = run.evaluations[-1].client_loss
    run.engine.released.clear()

    @step
    def export(self: Any, received: Tree) -> Tree:
        spoiled = torch.nan if self.id == 6 else 1.0
        return tree_map(lambda leaf: spoiled * leaf, self.served_model(received))

    with monkeypatch.context() as broken:
        broken.setattr(METHODS["headstart"].Client, "export", export)
        assert run.evaluate_novel().client_loss == (None, told[1])
    answers = len(run.engine.released[6]["multipliers"])
    late, other = run.evaluate_novel().client_loss
    assert late is not None
    assert other == told[1]
    assert len(run.engine.released[6]["multipliers"]) > answers


def stored(method: str, folder: Path) -> tuple[Run, Any]:
    """Returns a run with two novel clients whose epsilon is spent, and their evaluation."""
    keys: dict[str, Any] = {"privacy": {"epsilon": 50.0, "delta": DELTA}, "track": "none"}
    keys |= {"task": NEWCOMERS, "method": QUICK | OWN[method]}
    run = hyperfed.train(method, out=folder, progress=False, **(SMALL | keys))
    return run, run.evaluations[-1]


def loss_of(run: Any, model: torch.nn.Module, client: int) -> float:
    rows = run.task.test[client]
    with torch.no_grad():
        output = model(run.task.transform(run.task.x[rows]))
    return float(torch.nn.functional.cross_entropy(output.double(), run.task.y[rows]))


def test_training_with_a_label_for_every_token_can_be_private() -> None:
    """What it spends is found out from clients with made-up examples, of such labels too."""
    private, quick = {"epsilon": 8.0, "delta": DELTA}, {"local_steps": 1}
    run = hyperfed.train(
        "fedavg", make_token_task(), rounds=2, cohort=1.0, privacy=private, method=quick
    )
    assert run.summary["privacy"]["epsilon_spent"] == pytest.approx(8, rel=1e-6)


REFUSED = {
    "fedproto": ({}, "privacy.epsilon: must be none for fedproto, .* choose one of apfl, ditto"),
    "fedavg": (
        {"robust": {"aggregation": "median"}, "privacy": {"where": "central"}},
        "robust.aggregation: must be mean",
    ),
    "pefll": ({"privacy": {"where": "central"}}, "method.standardize: must be false"),
    "headstart": (
        {"privacy": {"where": "central"}, "method": {"delayed_gradient": True}},
        "method.delayed_gradient: must be false",
    ),
    "pfedhn": (
        {"method": {"descriptor": "class_proportions"}},
        "must be an update, but that of step class_proportions is none",
    ),
    "fedper": ({"privacy": {"clip": 0.0}}, "privacy.clip: must be greater than 0"),
}


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_what_cannot_be_private_is_refused_before_anything_is_written(
    method: str, tmp_path: Path
) -> None:
    keys, why = REFUSED[method]
    settings = SMALL | keys | {"privacy": {"epsilon": 1.0} | keys.get("privacy", {})}
    with pytest.raises(UserError, match=why):
        hyperfed.train(method, out=tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


def test_descriptors_that_are_too_long_to_be_kept_are_refused_before_a_run_begins() -> None:
    """Whoever wants a model of what was trained, the run itself at its end, would ask anew."""
    own = {"descriptor_size": 4097, "standardize": False}
    with pytest.raises(UserError, match=r"4096 numbers at most .* lower method\.descriptor_size"):
        begun("pefll", own=own)
    for fits in ({"own": own | {"descriptor_size": 4096}}, {"own": own, "privacy": CENTRAL}):
        assert begun("pefll", **fits).private is not None


NOT_PRIVATE = {"epsilon": "none", "clip": 1e-9}


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ({"clip": 1.0}, ["clip"]),
        ({"delta": 1e-5, "where": "local"}, ["delta", "where"]),
        ({"clip": 1.0, "where": "central", "masking": True}, ["where"]),
        ({"clip": 1.0, "masking": True}, []),
        (NOT_PRIVATE, []),
    ],
)
def test_settings_of_private_training_need_an_epsilon(
    keys: dict[str, Any], idle: list[str]
) -> None:
    if not idle:
        assert from_keys("fedavg", {"privacy": keys}).privacy.clip == keys["clip"]
        return
    with pytest.raises(UserError, match=r"privacy\.epsilon, without which no training") as told:
        from_keys("fedavg", {"privacy": keys})
    refused = re.findall(r"privacy\.(\w+): must come with privacy\.epsilon", str(told.value))
    assert refused == idle


def test_without_epsilon_nothing_is_private_and_counts_weigh() -> None:
    run = Run(from_keys("fedavg", SMALL | {"method": QUICK, "privacy": NOT_PRIVATE}))
    assert run.private is None
    assert run.engine.cohort([0, 1], 0, training=True).weight.min() > 1
    assert run.privacy() is None


def test_a_network_that_takes_no_made_up_example_is_told_of_before_private_training() -> None:
    class Choosy(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == EXAMPLES:
                raise ValueError("no eight examples")
            return super().forward(x)

    with pytest.raises(
        UserError, match=r"must take examples that nobody holds .*no eight examples"
    ):
        hyperfed.train("fedavg", make_task(Choosy), rounds=1, cohort=1.0, privacy={"epsilon": 5.0})


def test_what_else_is_wrong_before_private_training_is_not_said_of_its_network() -> None:
    private = {"rounds": 1, "cohort": 1.0, "privacy": {"epsilon": 5.0}}
    with pytest.raises(UserError, match=r"^pefll needs labels to personalise"):
        hyperfed.train("pefll", make_task(novel=1, unlabelled=True), **private)
    own = {"descriptor": "class_proportions"}
    with pytest.raises(UserError, match=r"^a reply in private training must be an update"):
        hyperfed.train("pfedhn", make_task(), **private, method=own)
