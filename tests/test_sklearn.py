"""Estimators of scikit-learn: its own checks, and what they do not know of clients."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from sklearn.exceptions import DataConversionWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from hyperfed.errors import UserError
from hyperfed.methods import NO_ONE_NETWORK
from hyperfed.sklearn import PersonalizedClassifier, PersonalizedRegressor

QUICK: dict[str, Any] = {
    "cohort": 1.0,
    "method": {"local_steps": 20, "local_lr": 0.1, "local_clip": 1.0},
}


@pytest.mark.slow
@parametrize_with_checks(
    [
        estimator("fedavg", hidden=16, rounds=3, settings=QUICK, random_state=0)
        for estimator in (PersonalizedClassifier, PersonalizedRegressor)
    ]
)  # all that apply, without an exception
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def test_settings_may_ask_for_progress_and_a_layer_must_have_units() -> None:
    x, y, client = two_clients()
    shown = classifier(rounds=1, settings=QUICK | {"progress": True}).fit(x, y, client=client)
    assert shown.run_.round == 1
    with pytest.raises(UserError, match="hidden must be at least 1, got 0"):
        classifier(hidden=0).fit(x, y, client=client)


def two_clients(seed: int = 0) -> tuple[Any, Any, Any]:
    """What one calls "yes" is "no" to the other: no common model can be right for both."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(120, 3))
    client = np.array(["ann", "bob"])[np.arange(120) % 2]
    return x, np.where((x[:, 0] > 0) == (client == "ann"), "yes", "no"), client


def classifier(method: str = "local", **options: Any) -> PersonalizedClassifier:
    own = {**QUICK["method"], **({"novel_steps": 60} if method == "local" else {})}
    settings = {**QUICK, "method": own}
    given = {"hidden": 8, "rounds": 5, "settings": settings, "random_state": 0} | options
    return PersonalizedClassifier(method, **given)


@pytest.fixture(scope="module")
def fitted() -> PersonalizedClassifier:
    """Not to be changed."""
    x, y, client = two_clients()
    return classifier().fit(x, y, client=client)


@pytest.mark.parametrize("method", NO_ONE_NETWORK)
def test_a_method_without_one_network_for_a_client_is_told_before_training(method):
    x, y, client = two_clients()
    with pytest.raises(UserError, match=f"one network to predict by, which .* got {method}; ch"):
        classifier(method).fit(x, y, client=client)
    with pytest.raises(UserError, match=f"got {method}; choose another"):
        PersonalizedRegressor(method).fit(x, x[:, 0], client=client)


def test_a_column_of_labels_is_scored_as_labels_are(fitted):
    x, y, client = two_clients(1)
    assert fitted.score(x, y[:, None], client=client) == fitted.score(x, y, client=client) < 1


def test_of_targets_that_are_all_the_same_the_scale_is_one():
    x, _, client = two_clients()
    settings = {"hidden": 2, "rounds": 1, "settings": QUICK, "random_state": 0}
    fit = PersonalizedRegressor("local", **settings).fit(x, np.full(120, 0.1), client=client)
    assert fit.scale_ == 1.0


def test_each_client_has_a_model_of_its_own(fitted):
    x, y, client = two_clients(1)
    assert fitted.clients_ == ["ann", "bob"]
    assert fitted.score(x, y, client=client) > 0.9
    assert fitted.score(x, y, client=client[::-1]) < 0.1  # the other's
    assert fitted.score(x, y, client="ann") == pytest.approx(0.5, abs=0.1)
    # The rows of one client alone, in any order, get what they get among the others.
    bobs = np.flatnonzero(client == "bob")[::-1]
    found = fitted.predict_proba(x, client=list(client))
    np.testing.assert_allclose(fitted.predict_proba(x[bobs], client="bob"), found[bobs], rtol=1e-5)
    # They are those of the run, whose clients are numbered by their first rows.
    output = fitted.run_.model(1)(torch.from_numpy(x[bobs]).float())
    expected = (output.exp() / output.exp().sum(1, keepdim=True)).detach().numpy()
    np.testing.assert_allclose(found[bobs], expected, rtol=1e-4)
    assert fitted.classes_.tolist() == ["no", "yes"]


def test_rows_can_be_weighed_in_the_score(fitted):
    x, y, client = two_clients(1)
    right = fitted.predict(x, client=client) == y
    weight = np.where(right, 1.0, 5.0)
    expected = right.sum() / weight.sum()
    assert fitted.score(x, y, sample_weight=weight, client=client) == pytest.approx(expected)


def test_a_newcomer_gets_a_classifier_and_the_others_keep_theirs(fitted):
    x, _, client = two_clients(2)
    before = fitted.predict(x, client=client)
    flipped = np.where(x[:, 1] > 0, "yes", "no")  # which no client has
    came = fitted.personalize(x, flipped)
    assert came.score(x, flipped) > 0.9
    assert (fitted.predict(x, client=client) == before).all()
    with pytest.raises(UserError, match="client must say whose model to use"):
        fitted.predict(x)


def test_who_and_what_is_not_known_is_told(fitted):
    x, y, client = two_clients()
    with pytest.raises(UserError, match="took part, got eve; make a newcomer's model with pers"):
        fitted.predict(x[:2], client=["ann", "eve"])
    with pytest.raises(UserError, match="one id for each row, got 1 for 2 rows"):
        fitted.predict(x[:2], client=["ann"])
    with pytest.raises(UserError, match="one id for each row, got 119 for 120"):
        classifier().fit(x, y, client=client[:-1])
    with pytest.raises(UserError, match="that fit was given, no, yes, got perhaps"):
        fitted.personalize(x[:2], ["yes", "perhaps"])


def test_a_pickle_predicts_the_same_and_serves_newcomers(fitted):
    x, y, client = two_clients(3)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(
        again.predict_proba(x, client=client), fitted.predict_proba(x, client=client)
    )
    bobs = client == "bob"
    np.testing.assert_array_equal(
        again.personalize(x[bobs], y[bobs]).predict(x),
        fitted.personalize(x[bobs], y[bobs]).predict(x),
    )


def test_ids_and_networks_may_be_of_any_kind():
    x, y, client = two_clients()
    made: list[Any] = []

    def net(shape: Any, classes: int) -> nn.Module:
        made.append((shape, classes))
        return nn.Sequential(nn.Flatten(), nn.Linear(3, classes))

    owners = [("ward", 7) if name == "ann" else 7 for name in client]
    fitted = classifier(model=net).fit(x.reshape(-1, 3, 1), y == "yes", client=owners)
    assert fitted.clients_ == [("ward", 7), 7]
    assert made[0] == ((3, 1), 2)
    assert fitted.score(x.reshape(-1, 3, 1), y == "yes", client=owners) > 0.9
    some = x[:4].reshape(-1, 3, 1)
    assert fitted.predict(some, client=np.int64(7)).dtype == bool
    assert (fitted.predict(some, client=("ward", 7)) != fitted.predict(some, client=7)).all()


def test_a_network_may_be_of_double_precision():
    x, y, client = two_clients()
    options: dict[str, Any] = {
        "model": lambda inputs, outputs: nn.Linear(inputs, outputs, dtype=torch.float64),
        "rounds": 1,
        "settings": {"cohort": 1.0, "method": {"local_steps": 1}},
    }
    labels = PersonalizedClassifier("fedavg", **options).fit(x, y, client=client)
    assert labels.predict_proba(x, client=client).shape == (120, 2)
    numbers = PersonalizedRegressor("fedavg", **options).fit(x, x[:, 0], client=client)
    assert numbers.predict(x, client=client).shape == (120,)


def test_validation_chooses_the_round_and_the_seed_decides_all():
    x, y, client = two_clients()
    chosen = classifier(validation_fraction=0.2, rounds=20).fit(x, y, client=client)
    rounds = [e.round for e in chosen.run_.evaluations if e.split == "val"]
    assert rounds == list(range(2, 21, 2))
    kept = next(e.count for e in chosen.run_.evaluations if e.split == "val")
    assert kept == (12, 12)  # a fifth of sixty rows each
    short = classifier(validation_fraction=0.2, rounds=3).fit(x, y, client=client).run_
    assert [e.round for e in short.evaluations if e.split == "val"] == [1, 2, 3]
    last = classifier(rounds=20).fit(x, y, client=client).run_
    assert [e.round for e in last.evaluations if e.split == "val"] == [20]
    one, same, other = (
        classifier(random_state=seed, rounds=1).fit(x, y, client=client).predict_proba(x, client)
        for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()
    for wrong in (1, -0.1):
        with pytest.raises(UserError, match=f"must leave rows to train on, got {wrong}"):
            classifier(validation_fraction=wrong).fit(x, y, client=client)


def test_a_search_in_a_pipeline_passes_on_whose_the_rows_are():
    x, y, client = two_clients()
    with sklearn.config_context(enable_metadata_routing=True):
        routed = classifier().set_fit_request(client=True).set_score_request(client=True)
        pipe = make_pipeline(StandardScaler(), routed)
        scores = cross_val_score(pipe, 100 * x, y, cv=2, params={"client": client})
    assert scores.min() > 0.8


def flat(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


@pytest.mark.parametrize("kind", [PersonalizedClassifier, PersonalizedRegressor])
def test_images_of_bytes_are_not_learned_from(kind):
    """They stayed at chance; the same as floats from 0 to 1 do not."""
    x = np.zeros((8, 1, 4, 4), dtype=np.uint8)
    with pytest.raises(UserError, match=r"got uint8, .* such as X / 255"):
        kind("local", model=lambda shape, outputs: None).fit(x, np.arange(8) % 2)
    fitted = kind("local", model=flat, rounds=1, settings=QUICK).fit(x / 255, np.arange(8) % 2)
    for asked in (fitted.predict, lambda given: fitted.personalize(given, np.arange(8) % 2)):
        with pytest.raises(UserError, match="got uint8"):
            asked(x)


@pytest.fixture(scope="module")
def regressor() -> PersonalizedRegressor:
    """Not to be changed."""
    x, y, client = rising()
    settings = {**QUICK, "method": {**QUICK["method"], "novel_steps": 100}}
    options = {"hidden": 8, "rounds": 10, "settings": settings, "random_state": 0}
    return PersonalizedRegressor("local", **options).fit(x, y, client=client)


def rising(seed: int = 0) -> tuple[Any, Any, Any]:
    """What rises at one client as it falls at the other."""
    x, _, client = two_clients(seed)
    return x, 500 + 80 * x[:, 0] * np.where(client == "ann", 1, -1), client


def test_each_client_has_a_model_of_its_own_in_the_units_of_its_targets(regressor):
    x, y, client = rising(1)
    assert regressor.score(x, y, client=client) > 0.9
    assert regressor.score(x, y, client=client[::-1]) < 0
    found = regressor.predict(x, client=client)
    assert found.shape == (120,)
    bobs = np.flatnonzero(client == "bob")[::-1]
    np.testing.assert_allclose(regressor.predict(x[bobs], client="bob"), found[bobs], rtol=1e-5)
    _, trained, _ = rising()
    output = regressor.run_.model(1)(torch.from_numpy(x[bobs]).float()).detach().numpy()[:, 0]
    np.testing.assert_allclose(found[bobs], output * trained.std() + trained.mean(), rtol=1e-4)


def test_the_score_weighs_rows(regressor):
    x, y, client = rising(1)
    y[:60] = 500
    some = np.repeat([0.0, 1.0], 60)
    weighed = regressor.score(x, y, sample_weight=some, client=client)
    alone = regressor.score(x[60:], y[60:], client=client[60:])
    assert weighed == pytest.approx(alone)
    assert alone > regressor.score(x, y, client=client)


def test_a_newcomer_gets_a_regressor(regressor):
    x, _, _ = two_clients(2)
    y = 500 + 80 * x[:, 1]  # which no client has
    assert regressor.personalize(x, y).score(x, y) > 0.9


def test_a_regressor_forecasts_several_numbers_each_in_its_unit():
    x, y, client = rising()
    several = np.stack([y, 7 - y / 1000, np.full(120, 3.0)], axis=1)
    options = {"hidden": 8, "rounds": 10, "settings": QUICK, "random_state": 0}
    fitted = PersonalizedRegressor("local", **options).fit(x, several, client=client)
    found = fitted.predict(x, client=client)
    assert found.shape == (120, 3)
    assert fitted.scale_[2] == 1
    np.testing.assert_allclose(fitted.scale_[:2], several[:, :2].std(axis=0), rtol=1e-12)
    each = r2_score(several, found, multioutput="raw_values")
    assert min(each[:2]) > 0.8
    assert fitted.score(x, several, client=client) == pytest.approx(each.mean())
    newcomer = fitted.personalize(x[:20], several[:20])
    assert newcomer.predict(x).shape == (120, 3)


def test_a_newcomers_targets_are_as_many_as_those_of_fit(regressor):
    x, y, client = rising()
    options = {"hidden": 8, "rounds": 1, "settings": QUICK, "random_state": 0}
    several = PersonalizedRegressor("local", **options).fit(x, np.stack([y] * 3, 1), client=client)
    for wrong in (y[:5], y[:5, None], np.stack([y[:5]] * 2, 1), ["a"] * 5):
        with pytest.raises(UserError, match=r"shape \('m', 3\), as those of fit are, got"):
            several.personalize(x[:5], wrong)
    with pytest.raises(UserError, match=r"shape \('m',\), as those of fit are, got \(5, 2\)"):
        regressor.personalize(x[:5], np.stack([y[:5]] * 2, 1))
    with pytest.warns(DataConversionWarning):
        column = regressor.personalize(x, y[:, None])
    np.testing.assert_array_equal(column.predict(x), regressor.personalize(x, y).predict(x))


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (dict.fromkeys(range(120), "ann"), "one id for each row, in their order, got"),
        (set(range(120)), "one id for each row, in their order, got"),
        (3, "one id for each row, in their order, got 3"),
        (np.zeros((120, 1)), "one id for each row, .N,., got rows; flatten it"),
    ],
)
def test_clients_come_in_the_order_of_rows(odd, told):
    x, y, _ = two_clients()
    with pytest.raises(UserError, match=told):
        classifier().fit(x, y, client=odd)


def test_a_client_may_be_a_day_or_bytes():
    x, y, client = two_clients()
    days = np.where(client == "ann", np.datetime64("2026-01-01"), np.datetime64("2026-01-02"))
    for ids in (days, np.array([*client.astype("S3")], object)):
        fitted = classifier(rounds=1).fit(x, y, client=ids)
        mine = ids == ids[0]
        alone = fitted.predict(x[mine], client=ids[0])
        assert alone.tolist() == fitted.predict(x[mine], client=ids[mine]).tolist()


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"settings": "a"}, "settings must be a dict of keys, got 'a'"),
        ({"validation_fraction": "a"}, "validation_fraction must leave rows to train on, got a"),
        ({"rounds": "5", "validation_fraction": 0.2}, "rounds: must be a valid integer"),
    ],
)
def test_settings_that_cannot_be_are_told(odd, told):
    x, y, client = two_clients()
    with pytest.raises(UserError, match=told):
        classifier(**odd).fit(x, y, client=client)


def test_labels_and_numbers_that_cannot_be_learned_are_told():
    x, y, client = two_clients()
    fitted = classifier(rounds=1).fit(x, y, client=client)
    with pytest.raises(UserError, match=r"labels that fit was given, no, yes, got None"):
        fitted.personalize(x[:3], [None, "no", "yes"])
    one = PersonalizedRegressor("fedavg", hidden=4, rounds=1, settings=QUICK)
    with pytest.raises(UserError, match="y must have a finite deviation"):
        one.fit(x, x[:, 0] * 1e300, client=client)
    assert one.fit(x, x[:, 0] > 0, client=client).scale_ == pytest.approx(np.std(x[:, 0] > 0))


def test_targets_that_are_all_the_same_are_what_is_predicted():
    x, _, client = two_clients()
    settings = {"cohort": 1.0, "method": {"local_steps": 1}}
    one = PersonalizedRegressor("fedavg", hidden=4, rounds=1, settings=settings)
    fitted = one.fit(x, np.full(120, 7e6), client=client)
    assert (fitted.mean_, fitted.scale_) == (7e6, 1.0)
    np.testing.assert_allclose(fitted.predict(x, client=client), 7e6, atol=10)
