"""Which methods can be trained robustly, privately and by masked sums, and why others cannot."""

from typing import Any

from hyperfed.engines import Faults
from hyperfed.methods import METHODS
from hyperfed.runs.settings import RobustConfig, TrainingPrivacy
from hyperfed.system import toml

NO_MEAN = ("fedfomo", "fedproto", "heurpfedla", "local", "pfedla")
"""Methods for which ``robust.aggregation`` has nothing to stand for.

Their servers keep each client's model by itself, or none; FedProto's averages prototypes class by
class, over those who have the class.
"""


NO_UPDATES = (
    "fedas",
    "feddbe",
    "fedfomo",
    "fedpac",
    "fedproto",
    "heurpfedla",
    "hypcluster",
    "itpfl",
    "lg_fedavg",
    "local",
    "pfedla",
)
"""Methods that cannot be trained privately: clients answer with more than updates, or nothing.

Of all others the servers use updates for nothing but means, of which each can have noise, for
gradients that are bounded before their mean is taken, and for what goes back to the client that
they are from.
"""

NO_SUMS = (
    "fedas",
    "feddbe",
    "fedfomo",
    "fedpac",
    "fedproto",
    "headstart",
    "heurpfedla",
    "hypcluster",
    "itpfl",
    "lg_fedavg",
    "local",
    "mh_pfedhn",
    "pefll",
    "per_fedavg",
    "pfedhn",
    "pfedhn_pc",
    "pfedla",
    "pfedme",
)
"""Methods whose servers need more of clients than means by numbers of examples, or nothing."""


def refusals(
    method: str, settings: Any, robust: RobustConfig, privacy: TrainingPrivacy, faults: Faults
) -> list[str]:
    """Returns why a method cannot be trained so, a line for each key; empty where it can.

    Args:
        method: its name.
        settings: of the method; None where they are not right.
        robust: against clients whose replies are wrong.
        privacy: of training.
        faults: made on purpose.
    """
    return [
        *_not_robust(method, robust),
        *_not_private(method, settings, robust, privacy),
        *_not_masked(method, robust, privacy, faults),
    ]


def _not_robust(method: str, robust: RobustConfig) -> list[str]:
    """Returns why nothing can stand for the mean."""
    if robust.aggregation == "mean" or method not in NO_MEAN:
        return []
    return [
        f"robust.aggregation: must be mean for {method}, whose server averages nothing that a "
        f"rule could stand for; came {toml.literal(robust.aggregation)}"
    ]


def _not_private(
    method: str, settings: Any, robust: RobustConfig, privacy: TrainingPrivacy
) -> list[str]:
    """Returns why training cannot be private."""
    if privacy.epsilon is None:
        return []
    found = []
    if method in NO_UPDATES:
        others = sorted(set(METHODS) - set(NO_UPDATES))
        found.append(
            f"privacy.epsilon: must be none for {method}, whose clients answer with more than "
            f"updates, or with nothing; came {privacy.epsilon:g}; choose one of {', '.join(others)}"
        )
    if privacy.where == "central" and robust.aggregation != "mean":
        found.append(
            "robust.aggregation: must be mean where the server adds noise to means; "
            f"came {toml.literal(robust.aggregation)}"
        )
    unmeant = ("standardize", "delayed_gradient") if privacy.where == "central" else ()
    return found + [
        f"method.{key}: must be false where the server adds noise to means, since what it does for "
        "it is none; came true"
        for key in unmeant
        if getattr(settings, key, False)
    ]


def _not_masked(
    method: str, robust: RobustConfig, privacy: TrainingPrivacy, faults: Faults
) -> list[str]:
    """Returns why sums cannot be masked."""
    if not privacy.masking:
        return []
    found = []
    if method in NO_SUMS:
        others = sorted(set(METHODS) - set(NO_SUMS))
        found.append(
            f"privacy.masking: must be false for {method}, whose server needs more than means; "
            f"came true; choose one of {', '.join(others)}"
        )
    if privacy.epsilon is not None and privacy.where == "local":
        found.append(
            "privacy.where: must be central where sums are masked, which have room for bounded "
            "answers and not for each one's noise; came local"
        )
    if robust.aggregation != "mean":
        found.append(
            "robust.aggregation: must be mean where sums are masked, as every other rule needs the "
            f"answers; came {toml.literal(robust.aggregation)}"
        )
    if faults.nan or faults.hostile:
        found.append(
            "faults.nan, faults.hostile: must be 0 and empty where sums are masked, since they are "
            "made where the server reads answers, which it does not"
        )
    return found
