"""Figures of what methods have learned of clients, and of what new ones are served with.

They are drawn from records: of pFedLA's weights (figures 5, 6 and 7 of its paper), of the shift of
novel clients (IT-PFL-HN, figure 3; pFedHN, figures 2 and 7), and of what ``examine`` has looked
into: t-SNE of descriptors and others' models (pFedHN, figures 4 and 3), rank correlation (PeFLL,
figure 3). A table of experiments names those that its report shows.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from hyperfed.errors import UserError
from hyperfed.metrics import ACCURACY, Metric, named
from hyperfed.runs.config import to_dict
from hyperfed.runs.drawing import finish, look, new_figure
from hyperfed.runs.records import MOST_NUMBERS, Evaluation, FinishedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

Distance = Literal["kl_divergence", "total_variation"]
"""Of a novel client's labels to those of the known client nearest to it, as records have it."""

TARGET = 0
"""The client whose weights figures 5 and 7 of pFedLA are about: the first one."""


class NothingToDrawError(UserError):
    """A record lacks what a figure is of."""


def weights_over_rounds(
    evaluations: Sequence[Evaluation],
) -> tuple[list[int], dict[str, Floats]]:
    """Returns how much of each layer a client took from whom, at each evaluation.

    Args:
        evaluations: of a run of ``pfedla`` or ``heurpfedla``.

    Returns:
        The (R,) rounds, and layer -> (R, n, n), whose rows are who takes. Of several target sizes
        the layers' names begin with the size.

    Raises:
        NothingToDrawError: no evaluation has weights.
    """
    told = [(e.round, e.diagnostics["weights"]) for e in evaluations if "weights" in e.diagnostics]
    if not told:
        raise NothingToDrawError(
            "weights must be in the diagnostics of a run to draw them, but are in none; train "
            f"with pfedla or heurpfedla, and with so few clients that they are {MOST_NUMBERS} "
            "numbers at most"
        )
    sizes = told[0][1]
    names = {
        layer if len(sizes) == 1 else f"{size} {layer}": (size, layer)
        for size, layers in sizes.items()
        for layer in layers
    }
    found = {
        name: np.array([weights[size][layer] for _, weights in told], dtype=np.float64)
        for name, (size, layer) in names.items()
    }
    return [number for number, _ in told], found


def shifted(
    evaluations: Sequence[Evaluation], distance: Distance = "kl_divergence"
) -> list[tuple[float, float]]:
    """Returns (distance to the nearest known client, accuracy in %) of each novel client.

    Those for which one of both is not there, or infinite, are left out.

    Args:
        evaluations: of a run.
        distance: KL in nats, or total variation from 0 to 1.

    Raises:
        NothingToDrawError: there is no such client.
    """
    found = [
        (float(far), 100 * float(accuracy))
        for e in evaluations
        if e.split == "novel"
        for far, accuracy in zip(getattr(e, f"client_{distance}"), e.client_accuracy, strict=False)
        if far is not None and accuracy is not None
    ]
    if not found:
        raise NothingToDrawError(
            f"novel clients must have an accuracy and a finite {distance.replace('_', ' ')} to be "
            "drawn, but none has; train with task.novel above 0, or a larger task.novel_alpha"
        )
    return found


def generalization_gap(run: FinishedRun) -> tuple[float, float]:
    """Returns how far novel clients are from known ones, and what they lose by it.

    The mean over novel clients of the total variation to the nearest known one, and the accuracy of
    novel clients less that of known ones, acc_novel - acc_train in points, both means over clients
    (pFedHN, section 5 and figure 2).

    Raises:
        NothingToDrawError: there are no novel clients, or no known ones that were tested.
    """
    far = [distance for distance, _ in shifted(run.evaluations, "total_variation")]
    novel = next(e.accuracy_client_mean for e in run.evaluations if e.split == "novel")
    known = (run.summary or {}).get("test_accuracy_client_mean")
    if novel is None or known is None:
        raise NothingToDrawError(
            "a run must be done and have tested known clients to draw what novel ones lose"
        )
    return fmean(far), 100 * (novel - known)


def correlations(evaluations: Sequence[Evaluation]) -> list[tuple[float, float]]:
    """Returns (round, rank correlation) at each evaluation, of novel clients where there are any.

    Raises:
        NothingToDrawError: no evaluation has one.
    """
    told = [(e.round, e.diagnostics.get("descriptors", {})) for e in evaluations]
    found = [
        (float(number), float(value))
        for number, of in told
        if (value := of.get("novel_rank_correlation", of.get("rank_correlation"))) is not None
    ]
    if not found:
        raise NothingToDrawError(
            "a rank correlation must be in the diagnostics of a run to draw it, but is in none; "
            "train with examine=descriptors"
        )
    return found


def accuracies(evaluations: Sequence[Evaluation]) -> list[tuple[float, float]]:
    """Returns (round, test accuracy in %) at each evaluation of known clients.

    Raises:
        NothingToDrawError: none has test examples and classes.
    """
    found = [
        (float(e.round), 100 * e.accuracy)
        for e in evaluations
        if e.split == "test" and e.accuracy is not None
    ]
    if not found:
        raise NothingToDrawError("a run must have been tested for its accuracy to draw it")
    return found


def described(run: FinishedRun) -> tuple[Floats, list[int]]:
    """Returns the clients' descriptors at the best round, (n, l), and their groups, (n,).

    Clients of a group have the same classes; where hardly two have, most examples of the same one.

    Raises:
        NothingToDrawError: there are no descriptors, or fewer than four.
    """
    told = (run.summary or {}).get("examined", {})
    if len(told.get("descriptors", ())) < 4:
        raise NothingToDrawError(
            "there must be the descriptors of four clients to draw them; train with "
            "examine=descriptors"
        )
    rows = np.array(told["descriptors"], dtype=np.float64)
    shares = np.array(told["proportions"], dtype=np.float64)
    supports, group = np.unique(shares > 0, axis=0, return_inverse=True)
    if 2 * len(supports) > len(rows):
        group = shares.argmax(axis=1)
    return rows, group.ravel().tolist()


def crossed(run: FinishedRun) -> Floats:
    """Returns how well each client does with others' models, (n, n), from 0 to 1 in a row.

    norm-acc_ij = (acc_ij - min_l acc_il) / (max_l acc_il - min_l acc_il), as pFedHN's figure 3; 1
    where all of a row are the same. Of a metric of which less is better, such as the RMSE, the
    least is 1. nan where there is no number, as in the row of a client without test examples;
    minimum and maximum are of the others.

    Raises:
        NothingToDrawError: it was not measured.
    """
    told = (run.summary or {}).get("examined", {}).get("crossed")
    if told is None:
        raise NothingToDrawError(
            "accuracies with others' models must have been measured to draw them; train with "
            "examine=crossed"
        )
    found = np.array(told, dtype=np.float64) * (-1 if _judged_by(run).less_is_better else 1)
    low, high = (of.reduce(found, axis=1, keepdims=True) for of in (np.fmin, np.fmax))
    scaled = np.where(high > low, (found - low) / np.where(high > low, high - low, 1.0), 1.0)
    return np.where(np.isnan(found), np.nan, scaled)


def _judged_by(run: FinishedRun) -> Metric:
    return named((run.summary or {}).get("metric", ACCURACY.name))


def draw_weights(run: FinishedRun) -> "Figure":
    """Draws from whom the first client takes how much over rounds, for each layer (figure 5)."""
    rounds, layers = weights_over_rounds(run.evaluations)
    figure = new_figure(3.2 * len(layers) + 1, 3.2)
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    for axes, (layer, weights) in zip(panels, layers.items(), strict=True):
        for client in range(weights.shape[2]):
            axes.plot(
                rounds,
                weights[:, TARGET, client],
                **look(client, "linestyle"),
                linewidth=2.5 if client == TARGET else 1.2,
                label=f"{client}, itself" if client == TARGET else str(client),
            )
        axes.set_title(layer, fontsize="medium")
        finish(axes, "round", "")
    panels[0].set_ylabel(f"weight in client {TARGET}'s model")
    panels[-1].legend(title="client", frameon=False, fontsize="x-small")
    return figure


def draw_heatmap(run: FinishedRun) -> "Figure":
    """Draws who takes how much from whom at the best round, for each layer (figure 6)."""
    layers = _at_best(run)
    figure = new_figure(2.6 * len(layers) + 1, 3)
    panels = figure.subplots(1, len(layers), squeeze=False)[0]
    top = max(float(weights.max()) for weights in layers.values())
    for axes, (layer, weights) in zip(panels, layers.items(), strict=True):
        shown = axes.imshow(weights, vmin=0, vmax=top, cmap="viridis")
        axes.set_title(layer, fontsize="medium")
        axes.set_xlabel("takes from client")
    panels[0].set_ylabel("client")
    figure.colorbar(shown, ax=list(panels), label="weight")
    return figure


def draw_layers(run: FinishedRun) -> "Figure":
    """Draws from whom the first client takes how much of a layer at the best round (figure 7)."""
    layers = _at_best(run)
    rows = np.stack([weights[TARGET] for weights in layers.values()])
    figure = new_figure(6, 0.35 * len(layers) + 1.6)
    axes = figure.subplots()
    shown = axes.imshow(rows, vmin=0, cmap="viridis", aspect="auto")
    axes.set_yticks(range(len(layers)), list(layers))
    axes.set_xlabel(f"client {TARGET} takes from client")
    figure.colorbar(shown, ax=axes, label="weight")
    return figure


def draw_shift(runs: Mapping[str, Sequence[FinishedRun]]) -> "Figure":
    """Draws the accuracy of novel clients over their KL divergence to the nearest known one.

    Args:
        runs: of each method, by its name.

    Raises:
        NothingToDrawError: no run has novel clients with both.
    """
    return _over_distance(runs, "kl_divergence", "KL to the nearest known client (nats)")


def draw_variation(runs: Mapping[str, Sequence[FinishedRun]]) -> "Figure":
    """Draws the same over their total variation to the nearest known one (pFedHN, figure 7)."""
    return _over_distance(runs, "total_variation", "total variation to the nearest known client")


def _over_distance(
    runs: Mapping[str, Sequence[FinishedRun]], distance: Distance, across: str
) -> "Figure":
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for index, (name, own) in enumerate(runs.items()):
        points = [point for run in own for point in shifted(run.evaluations, distance)]
        places, values = zip(*points, strict=True)
        axes.scatter(
            places,
            values,
            s=16,
            alpha=0.7,
            **look(index, "marker"),
            label=name,
        )
    finish(axes, across, "accuracy of a novel client (%)")
    axes.legend(frameon=False)
    return figure


def draw_gap(runs: Mapping[str, Sequence[FinishedRun]]) -> "Figure":
    """Draws what novel clients lose over how far they are from known ones (pFedHN, figure 2).

    Runs whose novel clients are dealt classes alike, but for the seed, are averaged into a point.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for index, (name, own) in enumerate(runs.items()):
        alike: dict[object, list[tuple[float, float]]] = {}
        for run in own:
            alike.setdefault(_alpha_of(run), []).append(generalization_gap(run))
        points = sorted(np.mean(several, axis=0).tolist() for several in alike.values())
        places, values = zip(*points, strict=True)
        axes.plot(
            places,
            values,
            **look(index, "linestyle", "marker"),
            label=name,
        )
    axes.axhline(0, color="0.6", linewidth=1, zorder=1)
    across = "mean total variation of novel clients to the nearest known one"
    finish(axes, across, "accuracy, novel less known clients (points)")
    axes.legend(frameon=False)
    return figure


def _alpha_of(run: FinishedRun) -> object:
    """Returns the Dirichlet concentration of the novel clients of a run, or None."""
    return to_dict(run.config)["task"].get("novel_alpha")


def draw_correlation(runs: Mapping[str, Sequence[FinishedRun]]) -> "Figure":
    """Draws the rank correlation over rounds, a line for each run (PeFLL, figure 3)."""
    return _over_rounds(runs, correlations, "mean rank correlation")


def draw_rounds(runs: Mapping[str, Sequence[FinishedRun]]) -> "Figure":
    """Draws the test accuracy over rounds, a line for each run (pFedKT, figures 8 and 9)."""
    return _over_rounds(runs, accuracies, "test accuracy (%)")


def draw_embedding(run: FinishedRun) -> "Figure":
    """Draws t-SNE of descriptors, clients with the same classes in one colour (figure 4)."""
    from matplotlib import colormaps
    from sklearn.manifold import TSNE  # takes seconds to import

    rows, group = described(run)
    perplexity = min(30.0, (len(rows) - 1) / 3)  # below the number of clients; 30 is the usual one
    placed = TSNE(perplexity=perplexity, random_state=0).fit_transform(rows)  # (n, 2)
    figure = new_figure(4.6, 4.4)
    axes = figure.subplots()
    colours = colormaps["tab20"]([number % 20 for number in group])
    axes.scatter(placed[:, 0], placed[:, 1], s=26, c=colours)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("one colour: the same classes, or the same largest", fontsize="medium")
    return figure


def draw_crossed(run: FinishedRun) -> "Figure":
    """Draws how a client's classifier gets on with others' feature extractors (figure 3)."""
    figure = new_figure(4.6, 3.8)
    axes = figure.subplots()
    shown = axes.imshow(crossed(run), vmin=0, vmax=1, cmap="viridis")
    axes.set_xlabel("with the server's part of client")
    axes.set_ylabel("client, with its own part")
    metric = _judged_by(run)
    end = ", 1 the least" if metric.less_is_better else ""
    figure.colorbar(shown, ax=axes, label=f"{metric.label}, from 0 to 1 in each row{end}")
    return figure


def _over_rounds(
    runs: Mapping[str, Sequence[FinishedRun]],
    of: Callable[[Sequence[Evaluation]], list[tuple[float, float]]],
    up: str,
) -> "Figure":
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for index, (name, own) in enumerate(runs.items()):
        for at, run in enumerate(own):
            rounds, values = zip(*of(run.evaluations), strict=True)
            axes.plot(
                rounds,
                values,
                **look(index, "linestyle"),
                label="_" if at else name,  # of which a legend says nothing
            )
    finish(axes, "round", up)
    axes.legend(frameon=False, fontsize="small")
    return figure


OF_A_RUN: Mapping[str, Callable[[FinishedRun], "Figure"]] = MappingProxyType(
    {
        "weights": draw_weights,
        "heatmap": draw_heatmap,
        "layers": draw_layers,
        "embedding": draw_embedding,
        "crossed": draw_crossed,
    }
)
"""Figures of a single run, by name."""

OF_RUNS: Mapping[str, Callable[[Mapping[str, Sequence[FinishedRun]]], "Figure"]] = MappingProxyType(
    {
        "shift": draw_shift,
        "variation": draw_variation,
        "gap": draw_gap,
        "correlation": draw_correlation,
        "rounds": draw_rounds,
    }
)
"""Figures of several runs by name: of the methods of a table, of its cells, or of a column's."""


def draw(name: str, run: FinishedRun, called: str) -> "Figure":
    """Draws a figure of one run.

    Args:
        name: a key of ``CAPTIONS``.
        run: its evaluations have what the figure is of.
        called: the run's name, for figures of several.

    Raises:
        UserError: no such figure, or a run that has not what it is of.
    """
    if name not in CAPTIONS:
        raise UserError(f"figure must be one of metric, {', '.join(CAPTIONS)}, came {name!r}")
    _NEEDS[name](run)
    return OF_A_RUN[name](run) if name in OF_A_RUN else OF_RUNS[name]({called: [run]})


def can_draw(name: str, run: FinishedRun) -> bool:
    """Whether a run has what a figure of ``OF_A_RUN`` or ``OF_RUNS`` is of."""
    try:
        _NEEDS[name](run)
    except NothingToDrawError:
        return False
    return True


CAPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "from whom the first client takes how much, over rounds",
        "heatmap": "who takes how much from whom, at the best round",
        "layers": "from whom the first client takes how much of each layer, at the best round",
        "embedding": "t-SNE of the clients' descriptors at the best round",
        "crossed": "accuracy of each client with what the server makes for every other one",
        "correlation": "whether descriptors are as far apart as labels, over rounds",
        "rounds": "test accuracy over rounds",
        "shift": "accuracy of novel clients over their distance to the nearest known one",
        "variation": "accuracy of novel clients over their total variation to the nearest known",
        "gap": "what novel clients lose against known ones, over how far they are from these",
    }
)
"""Name of a figure -> what it shows."""


def _at_best(run: FinishedRun) -> dict[str, Floats]:
    """Returns layer -> (n, n) at the best round of a run that is done, else at the latest."""
    rounds, layers = weights_over_rounds(run.evaluations)
    best = (run.summary or {}).get("best_round", rounds[-1])
    return {layer: weights[rounds.index(best)] for layer, weights in layers.items()}


_NEEDS: Mapping[str, Callable[[FinishedRun], object]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("weights", "heatmap", "layers"), lambda run: weights_over_rounds(run.evaluations)
        ),
        "embedding": described,
        "crossed": crossed,
        "correlation": lambda run: correlations(run.evaluations),
        "rounds": lambda run: accuracies(run.evaluations),
        "shift": lambda run: shifted(run.evaluations),
        "variation": lambda run: shifted(run.evaluations, "total_variation"),
        "gap": generalization_gap,
    }
)
"""Name of a figure -> what raises ``NothingToDrawError`` where a run lacks what it is of."""
