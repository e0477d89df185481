"""The settings of private methods."""

import math

import pytest
from pydantic import ValidationError

from hyperfed.errors import UserError
from hyperfed.methods.parts.privacy import PrivacyConfig
from hyperfed.runs import config as configuration


def test_without_epsilon_nothing_is_promised() -> None:
    assert PrivacyConfig().mechanism is None
    assert PrivacyConfig().privacy() is None


def test_the_record_is_plain_data() -> None:
    assert PrivacyConfig(epsilon=0.5, delta=1e-3, calibration="classical").privacy() == {
        "mechanism": "gaussian, classical calibration",
        "adjacency": "one sample replaced",
        "epsilon_of_an_answer": 0.5,
        "delta": 1e-3,
        "noise_multiplier": math.sqrt(2 * math.log(1250)) / 0.5,
        "epsilon_budget": 0.5,
    }
    several = PrivacyConfig(epsilon=0.5, budget=2.0).privacy()
    assert several is not None
    assert (several["epsilon_of_an_answer"], several["epsilon_budget"]) == (0.5, 2.0)


def test_wrong_settings_are_refused_before_a_run_begins() -> None:
    with pytest.raises(UserError, match="below 1 only, came 2"):
        configuration.from_keys("itpfl", {"method": {"epsilon": 2.0, "calibration": "classical"}})
    for wrong in ({"epsilon": 0.0}, {"epsilon": math.inf}, {"delta": 0.0}, {"delta": 1.0}):
        with pytest.raises(ValidationError):
            PrivacyConfig(**wrong)


def test_a_budget_for_no_answer_is_refused_before_a_run_begins() -> None:
    why = r"within epsilon 0\.5 .* after 0 of them .*; raise method\.budget"
    with pytest.raises(UserError, match=why):
        configuration.from_keys("itpfl", {"method": {"epsilon": 1.0, "budget": 0.5}})
    enough = PrivacyConfig(epsilon=0.9, budget=0.8, calibration="classical")  # whose noise is more
    assert enough.budget == 0.8
