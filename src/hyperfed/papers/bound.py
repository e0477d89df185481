"""Both sides of PeFLL's theorem 4.2 on a trained run, and by how much they are apart.

A table of experiments says at which points (:class:`hyperfed.runs.experiments.Bound`). Where the
run is done they go into a file beside its record.

The theorem is about models that are drawn, and so is what is measured here: hypernetwork and
descriptor network from Gaussians around what was trained, and each client's model from one around
what they make of all the client's training examples. The loss is the error rate, which is bounded.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.analysis import statistics
from hyperfed.errors import UserError, check_positive, told
from hyperfed.functional import apply
from hyperfed.runs import experiments
from hyperfed.runs.settings import RunConfig
from hyperfed.runs.trained import TrainedMethod
from hyperfed.system.files import atomic_write
from hyperfed.system.provenance import commit
from hyperfed.system.randomness import generator
from hyperfed.task import Split, Task
from hyperfed.theory.pefll import gaussian_kl, generalization_bound

FILE = "bound.json"
"""Beside a record."""


@dataclass(frozen=True)
class Variances:
    """Of the Gaussians around what was trained and, the same, of the priors around zero.

    Attributes:
        networks: alpha_h = alpha_v.
        model: alpha_theta.
    """

    networks: float
    model: float

    def __post_init__(self) -> None:
        check_positive(networks=self.networks, model=self.model)


@dataclass(frozen=True)
class Measured:
    """Both sides of theorem 4.2, as estimated from draws of networks and models.

    Not the left side alone is an expectation over them; so are, on the right, the empirical error
    and the clients' part of the divergence. What the theorem promises is of the expectations.

    Attributes:
        variances: of the Gaussians.
        clients: n, that were trained on.
        samples: m, training examples of the client that has the fewest.
        terms: of the right side (:func:`hyperfed.theory.pefll.generalization_bound`).
        unseen_error: the error rate of drawn models on novel clients' test examples.
        networks_norm: |eta|^2, of both networks.
        model_norm: the mean over known clients and draws of |theta_i|^2.
    """

    variances: Variances
    clients: int
    samples: int
    terms: dict[str, float]
    unseen_error: float
    networks_norm: float
    model_norm: float

    @property
    def bound(self) -> float:
        """The right side."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Sides:
    """Both sides at several points, of which the bound holds for all together.

    Attributes:
        delta: probability that it does not.
        draws: of networks and models at each point.
        known_error: the error rate of the trained models themselves on known clients' test
            examples.
        unseen_error: the same on novel clients'.
        points: what was measured, at least one.
        commit: of the code; None where it is not known.
    """

    delta: float
    draws: int
    known_error: float
    unseen_error: float
    points: Annotated[tuple[Measured, ...], Field(min_length=1)]
    commit: str | None

    @property
    def without_divergence(self) -> float:
        """What so few clients and examples add, even where nothing differs from its prior."""
        terms = generalization_bound(
            0,
            meta_kl=0,
            client_kls=[0],
            clients=self.points[0].clients,
            samples=self.points[0].samples,
            delta=self.delta / len(self.points),
        )
        return sum(terms.values())


def sides(run: TrainedMethod, wanted: experiments.Bound) -> Iterator[Measured]:
    """Measures both sides at all points of a table, one after the other.

    Raises:
        UserError: the theorem is not about this run.
    """
    pairs = list(product(wanted.networks, wanted.models))
    for pair in pairs:  # a union over all of them
        yield measure(run, Variances(*pair), delta=wanted.delta / len(pairs), draws=wanted.draws)


def write(
    path: Path, summary: Mapping[str, Any], wanted: experiments.Bound, points: Sequence[Measured]
) -> None:
    """Writes what was measured of a run beside the errors that its summary has.

    Raises:
        UserError: the disk refuses.
    """
    known, unseen = (1 - float(summary[f"{who}_accuracy"]) for who in ("test", "novel"))
    found = Sides(wanted.delta, wanted.draws, known, unseen, tuple(points), commit())
    atomic_write(path, f"{json.dumps(asdict(found), indent=2)}\n".encode())


def read(path: Path) -> Sides | None:
    """Reads what was measured of a run; None where nothing was.

    Raises:
        UserError: it is damaged.
    """
    try:
        return _SIDES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise UserError(
            f"{path} must hold both sides of a bound, but: {told(error)}; remove it, and make it "
            "again by the command that made the record"
        ) from error


_SIDES = TypeAdapter(Sides)


def in_words(runs: Sequence[Sides]) -> tuple[list[list[str]], str]:
    """Returns the rows of a table, the mean over runs of each point, and what they come to.

    Args:
        runs: of one cell with several seeds, at least one, with the same points.

    Returns:
        Rows of the two variances, the terms of the right side, their sum ± its deviation over runs,
        and the left side; and a paragraph.
    """
    rows, least = [], []
    for of_point in zip(*(run.points for run in runs), strict=True):
        at = of_point[0].variances
        terms = [fmean(one.terms[name] for one in of_point) for name in of_point[0].terms]
        right = statistics.spread([one.bound for one in of_point])
        left = fmean(one.unseen_error for one in of_point)
        rows.append(
            [
                f"{at.networks:g}",
                f"{at.model:g}",
                *map(_shown, terms),
                _shown(right.mean) + ("" if right.std is None else f" ± {_shown(right.std)}"),
                _shown(left),
            ]
        )
        least.append(right.mean)
    first = runs[0]
    verdict = "vacuous: no error rate exceeds 1" if min(least) >= 1 else "below 1"
    return rows, (
        f"{first.points[0].clients} clients with at least {first.points[0].samples} examples, "
        f"{first.draws} draws at each point, from which both sides are estimated. With probability "
        f"{1 - first.delta:g} the bound itself holds at all points together. The least is "
        f"{_shown(min(least))}, {verdict}. So few clients and examples add "
        f"{fmean(run.without_divergence for run in runs):.3g} even where nothing differs "
        "from its prior. The trained models themselves err on "
        f"{fmean(run.unseen_error for run in runs):.1%} of the test examples of unseen clients and "
        f"on {fmean(run.known_error for run in runs):.1%} of those of known ones."
    )


def _shown(value: float) -> str:
    """Returns a number with three digits, or whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measure(
    run: TrainedMethod, variances: Variances, *, delta: float = 0.05, draws: int = 20
) -> Measured:
    """Measures both sides of theorem 4.2 with the networks of a run's best round.

    Args:
        run: of ``pefll``, which has come to an evaluation.
        variances: chosen without a look at the data.
        delta: probability that the bound does not hold; divide it by the number of ``variances``
            among which the least bound is to be taken.
        draws: of the networks and models, by the run's seed.

    Raises:
        UserError: the theorem is not about this run.
    """
    check_positive(draws=draws)
    check(run.config, run.task)
    task, known = run.task, run.task.known
    server = run.method.Server(task.outline(), run.config.settings)
    server.load(trees.clone(run.best.server))
    seen: list[float] = []
    unseen: list[float] = []
    norms: list[float] = []  # of each draw the sum over clients of |theta_i|^2
    for draw in range(draws):
        with torch.no_grad():
            noise = generator(run.config.seed, "bound", "networks", draw)
            descriptor_net, hyper_net = (
                _drawn(net, variances.networks, noise)
                for net in (server.descriptor_net, server.hyper_net)
            )
            norms.append(0.0)
            for client in range(task.clients):
                looked_at = Split(task, task.train[client]).batch()
                descriptor = descriptor_net(looked_at.x, looked_at.y).mean(dim=0)
                size = task.size_of(client)
                model = trees.take(hyper_net(descriptor[None], size), 0)
                novel = client in task.novel_ids
                if not novel:
                    norms[-1] += square_norm(model)
                noise = generator(run.config.seed, "bound", "model", draw, client)
                around = {k: _around(value, variances.model, noise) for k, value in model.items()}
                judged = Split(task, task.test[client]).batch() if novel else looked_at
                output = apply(task.models[size], around, judged.x)
                if len(judged.y):
                    error = 1 - float(task.score(output, judged.y).mean())
                    (unseen if novel else seen).append(error)
    networks_norm = sum(
        square_norm(trees.parameters_of(net)) for net in (server.descriptor_net, server.hyper_net)
    )
    samples = min(len(task.train[client]) for client in known)
    terms = generalization_bound(
        sum(seen) / len(seen),
        meta_kl=gaussian_kl(networks_norm, variances.networks),
        client_kls=[gaussian_kl(norm, variances.model) for norm in norms],
        clients=len(known),
        samples=samples,
        delta=delta,
    )
    return Measured(
        variances=variances,
        clients=len(known),
        samples=samples,
        terms=terms,
        unseen_error=sum(unseen) / len(unseen),
        networks_norm=networks_norm,
        model_norm=sum(norms) / (draws * len(known)),
    )


def check(config: RunConfig, task: Task) -> None:
    """Raises ``UserError`` unless theorem 4.2 is about a run with such settings and data."""
    wrong = ""
    if config.method != "pefll":
        wrong = f"be of pefll, came {config.method}; train that"
    elif config.settings.standardize:
        wrong = (
            "have method.standardize=false, as in the paper: the first client's descriptor would "
            "decide what all others are; train such a run"
        )
    elif not task.classes:
        wrong = "be of classification, whose error rate is bounded; choose such a task"
    elif any(trees.buffers_of(net) for net in task.models.values()):
        wrong = "have a target without buffers (batch-norm), which h does not make; choose another"
    elif not task.novel or not any(len(task.test[client]) for client in task.novel_ids):
        wrong = "have novel clients with test examples; train with task.novel above 0"
    elif any(not len(task.train[client]) for client in range(task.clients)):
        wrong = "give every client a training example; choose fewer clients or another partition"
    if wrong:
        raise UserError(f"a run for theorem 4.2 must {wrong}")


def square_norm(model: Mapping[str, Tensor]) -> float:
    """Returns the sum of all squared entries."""
    return sum(float(value.detach().double().square().sum()) for value in model.values())


def _drawn(net: nn.Module, variance: float, noise: torch.Generator) -> nn.Module:
    """Returns a copy of a network with noise on what is trained of it."""
    drawn = copy.deepcopy(net).eval()
    for parameter in trees.parameters_of(drawn).values():
        parameter.copy_(_around(parameter, variance, noise))
    return drawn


def _around(value: Tensor, variance: float, noise: torch.Generator) -> Tensor:
    """Returns a draw from N(value, variance I)."""
    return value + sqrt(variance) * torch.randn(value.shape, generator=noise, dtype=value.dtype)
