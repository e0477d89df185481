"""What a run is looked into for beside how good its models are (``examine``).

How the server tells clients apart: their descriptors, and whether their distances rank as those of
the clients' label distributions do (PeFLL, section 5.1 and figure 3). And whose model suits whom:
every known client's metric with every other's model (pFedHN, section 5.4 and figure 3).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask
from hyperfed.engines import Engine
from hyperfed.errors import UserError
from hyperfed.federation import Server
from hyperfed.runs.evaluation import CHUNK, Serve, evaluate
from hyperfed.runs.measures import measure
from hyperfed.runs.settings import RunConfig
from hyperfed.system.devices import CPU
from hyperfed.trees import Tree


def check(config: RunConfig, task: Task, server: Server) -> None:
    """Finds out whether a run has what it is to be looked into for.

    Raises:
        UserError: it has not.
    """
    if not config.examine:
        return
    if isinstance(task, RemoteTask):
        raise UserError(
            f"examine must be left out where clients are at sites, got {', '.join(config.examine)}:"
            " descriptors and others' models are nobody else's business; remove it"
        )
    if "descriptors" in config.examine:
        if type(server).descriptors_of is Server.descriptors_of:
            raise UserError(
                f"examine=descriptors needs a method that has some, but {config.method} has none; "
                "choose pfedhn, pefll, itpfl or headstart, or remove it"
            )
        private = server.privacy() is not None or config.privacy.epsilon is not None
        if not task.classes or task.of_tokens or private:
            raise UserError(
                "examine=descriptors needs clients with labels of examples, not of tokens, and "
                "answers that are not private, each of which would cost; remove it"
            )
    if "crossed" in config.examine and config.privacy.trusts_server:
        raise UserError(
            "examine=crossed needs models that others may see, but with privacy.where=central they "
            "may be made of what a client answers without noise; remove it"
        )
    if "crossed" in config.examine and (len(task.known) > CHUNK or len(task.models) > 1):
        raise UserError(
            f"examine=crossed needs at most {CHUNK} known clients with one target, got "
            f"{len(task.known)} with {len(task.models)}; lower task.clients or remove it"
        )


def descriptors(server: Server, engine: Engine, ids: Sequence[int], round: int) -> Tensor | None:
    """Returns (C, l) descriptors in the order of ``ids``, as an evaluation of that round has them.

    None where there are none of these clients.

    Args:
        server: its state does not change.
        engine: runs the clients; what they remember does not change.
        ids: of clients that are all known or all novel.
        round: on which the draws of a description depend.
    """
    found: dict[int, Tensor] = {}
    for start in range(0, len(ids), CHUNK):
        cohort = engine.cohort(ids[start : start + CHUNK], round, training=False)
        for group in cohort.sizes.values():
            rows = server.descriptors_of(group)
            if rows is None:
                return None
            found |= dict(zip(group.ids.tolist(), rows.detach().to(CPU), strict=True))
    return torch.stack([found[client] for client in ids])


def descriptors_of_all(server: Server, engine: Engine, round: int) -> Tensor:
    """Returns (clients, l), as :func:`descriptors` has them, those of known clients first.

    Those of known clients alone, where there are no novel ones or these have none.
    """
    known, novel = list(engine.task.known), list(engine.task.novel_ids)
    found = descriptors(server, engine, known, round)
    assert found is not None  # as was checked
    others = descriptors(server, engine, novel, round) if novel else None
    return found if others is None else torch.cat([found, others])


def crossed(server: Server, engine: Engine, round: int, moved: Callable[[int], Serve]) -> Tensor:
    """Returns (n, n): the metric of the row's known client with the model made for the column's.

    It is nan where that client has no test examples.

    Args:
        server: its state does not change.
        engine: runs the clients; what they remember does not change.
        round: on which the draws of a personalisation depend.
        moved: returns what serves each client with the model of the one so many places before it.

    Raises:
        NotOfOneClientError: what clients are sent is not a model of each.
    """
    ids = list(engine.task.known)
    found = torch.full((len(ids), len(ids)), torch.nan, dtype=torch.float64)
    for places in range(len(ids)):
        counts = evaluate(server, engine, ids, round, serve=moved(places))["test"]
        values = measure(engine.task.metric, counts.by_name).client
        for row, value in enumerate(values):
            if value is not None:
                found[row, (row - places) % len(ids)] = value
    return found


def proportions(task: Task) -> Tensor:
    """Returns (clients, classes) float64, the share of each class in the training examples.

    Of several labels side by side there is one for each class of each.
    """
    held = [task.class_counts(rows).double() for rows in task.train]
    return torch.stack([count / count.sum().clamp(min=1) for count in held])


def rank_correlations(task: Task, descriptors: Tensor) -> Tree:
    """Returns by how much descriptors tell clients apart as their labels do.

    Args:
        task: the data.
        descriptors: (clients, l), or of known clients alone.

    Returns:
        {"rank_correlation": of known clients, "novel_rank_correlation": of novel ones, if any}.
    """
    whose = {"rank_correlation": task.known, "novel_rank_correlation": task.novel_ids}
    shares = proportions(task)[: len(descriptors)]
    return {
        name: torch.tensor(rank_correlation(descriptors, shares, ids))
        for name, ids in whose.items()
        if ids and max(ids) < len(descriptors)
    }


def rank_correlation(descriptors: Tensor, proportions: Tensor, of: Sequence[int]) -> float:
    """Returns Spearman's correlation of distances between descriptors and label distributions.

    For a client i of ``of`` these are ||v_i - v_j|| and ||p_i - p_j|| over all n clients j, itself
    included; the correlations of these clients are averaged. Ties have their mean rank, also where
    distances differ by how sums were rounded alone, as between clients who have a third each of
    some three classes. A client whose distances are all the same, of which there is no correlation,
    is left out; nan where all are.

    Args:
        descriptors: (n, l).
        proportions: (n, classes).
        of: numbers of the clients that it is averaged over.
    """
    from scipy.stats import rankdata  # takes long to import

    found = []
    for client in of:
        ranks = [rankdata(_distances(rows, client).numpy()) for rows in (descriptors, proportions)]
        if all(np.ptp(rank) > 0 for rank in ranks):
            found.append(np.corrcoef(*ranks)[0, 1])
    return float(np.mean(found)) if found else float("nan")


def _distances(rows: Tensor, client: int) -> Tensor:
    """Returns (n,) distances of rows to that of a client, as parts of the largest in 9 digits."""
    far = (rows.double() - rows[client].double()).norm(dim=1)
    return torch.round(far / far.max().clamp(min=torch.finfo(far.dtype).tiny), decimals=9)
