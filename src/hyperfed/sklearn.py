"""Personalised federated learning as a classifier and a regressor of scikit-learn.

Example:
    >>> classifier = PersonalizedClassifier("pefll").fit(x, y, client=person)
    >>> classifier.predict(x_new, client=person_of_each_row)
    >>> classifier.personalize(x_of_a_newcomer, y_of_a_newcomer).predict(x_later)
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

import hyperfed
from hyperfed.data import partitions
from hyperfed.data.arrays import PARTS, in_order, numbered
from hyperfed.data.own import from_arrays
from hyperfed.errors import UserError, one_line
from hyperfed.methods import NO_ONE_NETWORK

Array = npt.NDArray[Any]

ALONE = "the only one"
"""Whose the rows are where nobody says."""


class Personalized(BaseEstimator):  # type: ignore[misc]
    """A model for each client, learned together: what classifier and regressor have in common.

    Whose a row is goes beside the data as ``client``: pass it to ``fit`` and ``predict``, or have
    a pipeline or a search pass it: with ``sklearn.set_config(enable_metadata_routing=True)``, by
    ``set_fit_request(client=True)``, and likewise ``set_score_request`` and
    ``set_predict_request``. Where it is left out, all rows are one client's.

    Args:
        method: a name of ``hyperfed list methods``, but for knn_per, gpfl and mapper, of which a
            client has no one network to predict by.
        model: makes the network, called with (number of features, number of outputs), of which a
            classifier has one for each class and a regressor for each number of a target; where
            None, ``hidden`` units between the two. Of inputs with more than one dimension it is
            called with their shape.
        hidden: units of the default network.
        rounds: of training.
        settings: further keys of a run, such as ``{"cohort": 1.0, "method": {"local_lr": 0.05}}``.
        validation_fraction: of each client's rows, by which the best round is chosen; 0 for the
            last round.
        random_state: seed, or what scikit-learn takes in its place.

    A pickle has the training data in it, which some methods look at to make a client's model.

    Attributes:
        clients_: ids of the clients that trained, in the order of their first rows.
        n_features_in_: number of features, where rows are vectors.
        run_: the finished :class:`hyperfed.Run`; from a pickle what serves its models, a
            :class:`hyperfed.runs.serving.Served`.
    """

    def __init__(
        self,
        method: str = "pfedhn",
        *,
        model: Callable[[Any, int], nn.Module] | None = None,
        hidden: int = 64,
        rounds: int = 100,
        settings: Mapping[str, Any] | None = None,
        validation_fraction: float = 0.0,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.model = model
        self.hidden = hidden
        self.rounds = rounds
        self.settings = settings
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def _train(self, X: Array, y: Array, client: Any, *, outputs: int, classes: int | None) -> Self:
        """Trains on labels by number, or on floats where there are no classes.

        Raises:
            UserError: settings or data are wrong, or a method has no one network to predict by.
        """
        if self.method in NO_ONE_NETWORK:
            raise UserError(
                "method must give each client one network to predict by, which "
                f"{', '.join(NO_ONE_NETWORK)} do not, got {self.method}; choose another"
            )
        if not isinstance(self.settings, Mapping | None):
            raise UserError(f"settings must be a dict of keys, got {self.settings!r}; pass one")
        if self.model is None and self.hidden < 1:
            raise UserError(f"hidden must be at least 1, got {self.hidden}; raise it")
        owners = _owners(client, len(X))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        shape = X.shape[1] if X.ndim == 2 else X.shape[1:]
        task = from_arrays(
            X,
            y,
            client=owners,
            model=lambda: self._network(shape, outputs),
            split=_uses(owners, self.validation_fraction, seed),
            classes=classes,
            seed=seed,
            name=type(self).__name__,
        )
        keys = {
            "rounds": self.rounds,
            "evaluate_every": self.rounds,
            "seed": seed,
            "progress": False,
        }
        if self.validation_fraction and isinstance(self.rounds, int):
            keys["evaluate_every"] = max(1, self.rounds // 10)
        self.run_ = hyperfed.train(self.method, task, **{**keys, **(self.settings or {})})
        self.clients_ = list(dict.fromkeys(owners))
        self._models: dict[Hashable, nn.Module] = {}
        return self

    def _floats(self, X: Any, *y: Any, **options: Any) -> Any:
        """Returns what was given as scikit-learn wants it, rows as floats.

        Raises:
            UserError: images of bytes, of which a network as they are learns nothing.
        """
        if getattr(X, "dtype", None) == np.uint8 and X.ndim > 2:
            raise UserError(
                "X must be floats where rows are images, got uint8, from 0 to 255, of which a "
                "network learns nothing; scale it, such as X / 255"
            )
        anyhow = self.model is not None
        return validate_data(self, X, *y, dtype=np.float32, allow_nd=anyhow, **options)

    def _outputs(self, X: Any, client: Any) -> Tensor:
        """Returns (N, outputs) of the models of the clients whose the rows are."""
        check_is_fitted(self)
        X = self._floats(X, reset=False)
        rows_of: dict[Hashable, list[int]] = {}
        for row, owner in enumerate(self._asked(client, len(X))):
            rows_of.setdefault(owner, []).append(row)
        precision = self.run_.task.x.dtype  # that of ``model``
        with torch.no_grad():
            parts = [
                self._model_of(owner)(torch.from_numpy(X[rows]).to(precision))
                for owner, rows in rows_of.items()
            ]
        order = torch.tensor([row for rows in rows_of.values() for row in rows])
        return torch.cat(parts)[order.argsort()]

    def _with_newcomer(self, X: Any, y: Array | None) -> Self:
        """Returns the same with one client, who took no part in training."""
        check_is_fitted(self)
        X = self._floats(X, reset=False)
        came = copy(self)
        came.clients_ = [ALONE]
        came._models = {ALONE: self.run_.personalize(X, y)}
        return came

    def _network(self, shape: Any, outputs: int) -> nn.Module:
        if self.model is not None:
            return self.model(shape, outputs)
        return nn.Sequential(
            nn.Linear(shape, self.hidden), nn.ReLU(), nn.Linear(self.hidden, outputs)
        )

    def _model_of(self, owner: Hashable) -> nn.Module:
        if owner not in self._models:
            numbers = {client: number for number, client in enumerate(self.clients_)}
            self._models[owner] = self.run_.model(numbers[owner])
        return self._models[owner]

    def _asked(self, client: Any, rows: int) -> list[Hashable]:
        """Returns whose model is used for each row."""
        if client is None and len(self.clients_) > 1:
            raise UserError(
                f"client must say whose model to use, as there are {len(self.clients_)}; pass one "
                "id, or one for each row"
            )
        if client is None:
            client = self.clients_[0]
        if isinstance(client, np.generic):
            (client,) = np.array([client]).tolist()  # as ids were taken
        known = dict.fromkeys(self.clients_)  # by hash: NumPy's equal tuples badly
        of_one = isinstance(client, tuple) and client in known
        single = isinstance(client, str | bytes) or not hasattr(client, "__len__") or of_one
        owners = [client] * rows if single else _owners(client, rows)
        if unknown := [owner for owner in dict.fromkeys(owners) if owner not in known]:
            raise UserError(
                f"client must be one that took part, got {', '.join(map(str, unknown))}; make a "
                "newcomer's model with personalize"
            )
        return owners


class PersonalizedClassifier(ClassifierMixin, Personalized):  # type: ignore[misc]
    """A classifier for each client; arguments and attributes as of :class:`Personalized`.

    Attributes:
        classes_: (K,) labels, in the order of ``predict_proba``.
    """

    def fit(self, X: Any, y: Any, client: Sequence[Hashable] | Array | None = None) -> Self:
        """Trains.

        Args:
            X: (N, ...) rows, floats.
            y: (N,) labels of any type.
            client: (N,) whose each row is; one client's where None.

        Raises:
            UserError: settings or data are wrong. It is a ``ValueError``.
        """
        X, y = self._floats(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        classes = len(self.classes_)
        outputs = max(2, classes)  # of one a hypernetwork would learn nothing
        return self._train(X, labels.astype(np.int64), client, outputs=outputs, classes=classes)

    def predict_proba(self, X: Any, client: Any = None) -> Array:
        """Returns (N, K) probabilities of the classes.

        Args:
            X: (N, ...) rows.
            client: whose model is used: one id for all rows, or (N,) ids. It may be left out
                where there is one client only.

        Raises:
            UserError: a client that took no part.
        """
        logits = self._outputs(X, client)[:, : len(self.classes_)].float()
        found: Array = logits.softmax(dim=1).numpy()
        return found

    def predict(self, X: Any, client: Any = None) -> Array:
        """Returns (N,) labels; arguments as of :meth:`predict_proba`."""
        probabilities = self.predict_proba(X, client=client)
        labels: Array = self.classes_[probabilities.argmax(axis=1)]
        return labels

    def score(self, X: Any, y: Any, sample_weight: Any = None, client: Any = None) -> float:
        """Returns the accuracy of :meth:`predict`, each row weighed by ``sample_weight``."""
        found = self.predict(X, client=client)
        return float(accuracy_score(y, found, sample_weight=sample_weight))

    def personalize(self, X: Any, y: Any = None) -> Self:
        """Returns a classifier with one client, who took no part in training.

        Args:
            X: (m, ...) rows of the newcomer.
            y: (m,) labels, among those of ``fit``; None where the method can do without.

        Raises:
            UserError: labels that nobody else has, or a method that needs them.
        """
        check_is_fitted(self)
        if y is None:
            return self._with_newcomer(X, None)
        y, known = _flat(np.asarray(y)), set(self.classes_.tolist())
        if unknown := sorted({str(label) for label in y.ravel().tolist() if label not in known}):
            raise UserError(
                f"y must have labels that fit was given, {', '.join(map(str, self.classes_))}, "
                f"got {', '.join(unknown)}; leave those rows out, or fit with them"
            )
        return self._with_newcomer(X, np.searchsorted(self.classes_, y).astype(np.int64))


class PersonalizedRegressor(RegressorMixin, Personalized):  # type: ignore[misc]
    """A regressor for each client; arguments and attributes as of :class:`Personalized`.

    Targets have mean 0 and deviation 1 where networks learn them, over the rows of all clients, and
    so has each number of targets of several. What ``predict`` returns is in their own units; models
    of ``run_`` give the former.

    Attributes:
        mean_: of the targets of ``fit``, a scalar, or (K,).
        scale_: their standard deviation, 1 where they are all the same.
    """

    def __sklearn_tags__(self) -> Tags:
        """Returns what scikit-learn is told: a target may have several numbers."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, client: Sequence[Hashable] | Array | None = None) -> Self:
        """Trains on (N,) or (N, K) numbers, as :meth:`PersonalizedClassifier.fit` on labels."""
        X, y = self._floats(X, y, y_numeric=True, multi_output=True)
        y = _flat(y).astype(np.float64)
        self.mean_ = np.mean(y, axis=0)
        with np.errstate(over="ignore"):  # is told
            deviation = np.std(y, axis=0)
        # Of equal numbers it may be nearly 0 only.
        self.scale_ = np.where(np.ptp(y, axis=0), deviation, 1.0)[()]
        if not np.isfinite(self.scale_).all():
            raise UserError("y must have a finite deviation, but is too large; scale it")
        return self._train(X, self._standard(y), client, outputs=self.mean_.size, classes=None)

    def predict(self, X: Any, client: Any = None) -> Array:
        """Returns (N,) or (N, K) numbers, as targets of ``fit`` were.

        Arguments are those of :meth:`PersonalizedClassifier.predict_proba`.
        """
        outputs: Array = self._outputs(X, client).double().numpy()
        found: Array = outputs.reshape(-1, *self.mean_.shape) * self.scale_ + self.mean_
        return found

    def score(self, X: Any, y: Any, sample_weight: Any = None, client: Any = None) -> float:
        """Returns R2 of :meth:`predict`, each row weighed by ``sample_weight``.

        Of targets of several numbers it is the mean of that of each.
        """
        return float(r2_score(y, self.predict(X, client=client), sample_weight=sample_weight))

    def personalize(self, X: Any, y: Any = None) -> Self:
        """Returns a regressor with one client, who took no part in training.

        Args:
            X: (m, ...) rows of the newcomer.
            y: (m,) numbers, or (m, K); None where the method can do without.

        Raises:
            UserError: a method that needs them.
        """
        check_is_fitted(self)
        if y is None:
            return self._with_newcomer(X, None)
        ours = self.mean_.shape
        targets = np.asarray(y) if ours else _flat(np.asarray(y))
        if targets.shape[1:] != ours or targets.dtype.kind not in "buif":
            raise UserError(
                f"y must be numbers of shape {('m', *ours)}, as those of fit are, got "
                f"{targets.shape} {targets.dtype}; convert it"
            )
        return self._with_newcomer(X, self._standard(targets))

    def _standard(self, y: Array) -> Array:
        """Returns targets as networks learn them, float32."""
        found: Array = ((y.astype(np.float64) - self.mean_) / self.scale_).astype(np.float32)
        return found


def _flat(y: Array) -> Array:
    """Returns a column (N, 1) as (N,), of which scikit-learn warns; anything else as it is."""
    if y.ndim != 2 or y.shape[1] != 1:
        return y
    found: Array = column_or_1d(y, warn=True)
    return found


def _uses(owners: list[Hashable], val: float, seed: int) -> Array:
    """Returns (N,) what each row is for: a fraction of each client's validates, none tests."""
    if not partitions.is_number(val) or not 0 <= val < 1:
        raise UserError(
            f"validation_fraction must leave rows to train on, got {val}; give one of 0 to below 1"
        )
    groups = numbered(owners, []).numpy()
    part = partitions.hold_out(
        groups, partitions.random_source(seed, "hold out"), val=float(val), test=0.0
    )
    return np.array(PARTS)[part]


def _owners(client: Any, rows: int) -> list[Hashable]:
    """Returns whose each row is, as plain Python values."""
    if client is None:
        return [ALONE] * rows
    given = client.tolist() if hasattr(client, "tolist") else client
    if not in_order(given):
        raise UserError(
            f"client must be one id for each row, in their order, got {one_line(repr(given), 100)};"
            " pass a list or an array"
        )
    owners: list[Hashable] = list(given)
    if any(isinstance(owner, list) for owner in owners):
        raise UserError("client must be one id for each row, (N,), got rows; flatten it")
    if len(owners) != rows:
        raise UserError(
            f"client must have one id for each row, got {len(owners)} for {rows} rows; align them"
        )
    return owners
