"""kNN-Per (Marfoq et al., ICML 2022): one model for all, mixed with each client's neighbours.

Paper: https://arxiv.org/abs/2111.09360.

The global model is trained by FedAvg. A client then stores the features phi(x_i) (the input of the
global model's last layer) and the label of each of its training examples, and predicts

    p(y | x) = lambda p_kNN(y | x) + (1 - lambda) p_global(y | x)

where p_kNN gives the weight exp(-|phi(x) - phi(x_i)|^2 / (F scale)) to each of the k nearest x_i
(all, where it has fewer) and p_global is the softmax of the global model. The distance is
Euclidean, and as in the authors' code it stands squared in the exponent and is divided by F, the
number of features, and by ``scale``. Each client chooses k and lambda by the accuracy on its own
validation examples, of equally accurate pairs the one with the higher likelihood; where it has no
such examples, by leaving out each of its training examples in turn. Where there is but one, which
has no neighbour, the global model decides, and all pairs are alike: it is the first. (The authors'
code tries all lambda on test data, which no step here can read.)

Sent: the whole global model, batch-norm buffers included, both ways. Kept: nothing; what a client
stores is computed from the model it receives, and never leaves it. Aggregated: the mean of the
trained models, weighted by training examples. Evaluated: the mixture, whose outputs are
log-probabilities; it is not one network, so there is no model to export. A novel client does the
same without any training, but needs labels. A task with several target sizes has a global model for
each. ``zeroed_accuracy`` has the probabilities of absent classes at zero.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH, Cohort, Outline, Split, step
from hyperfed.functional import outputs_and_features
from hyperfed.methods import fedavg
from hyperfed.methods.parts.features import check_classes, check_outputs
from hyperfed.methods.parts.presets import DEFAULT, PEFLL
from hyperfed.nets.anatomy import check_head
from hyperfed.training import LocalConfig, Share, fit
from hyperfed.trees import Model, Tree


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of kNN-Per.

    Attributes:
        neighbours: k to choose from.
        mixing: lambda to choose from; 0 is the global model, 1 the neighbours alone.
        scale: of the kernel; the larger, the more equally the neighbours count.
    """

    neighbours: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (5, 10)
    mixing: Annotated[tuple[Share, ...], Field(min_length=1)] = tuple(i / 10 for i in range(11))
    scale: PositiveFloat = 1.0


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # PeFLL, appendix C.2: 100 was the best of the scales 0.1, 1, 10 and 100.
    "pefll": {**PEFLL, "method.scale": 100.0},
}


class Client(federation.Client):
    """Trains the global model, and mixes it with its neighbours' labels to predict."""

    @property
    def zero(self) -> float:
        """That of log-probabilities, which its outputs are."""
        return -torch.inf

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Returns the trained model."""
        return fit(
            self.objective, model, self.batches, self.config.local, trainable=self.parameters
        ).model

    @step
    def remember(self, model: Model) -> Tree:
        """Stores the training examples, and chooses k and lambda; replies with nothing."""
        outputs, features, labels = self.seen(model, self.train)
        if len(self.val):
            outputs, queries, y = self.seen(model, self.val)
        else:
            queries, y = None, labels  # each training example among the others
        store = {"features": features, "labels": labels}
        votes = {k: self.vote(queries, store, k) for k in self.config.neighbours}

        def quality(pair: tuple[int, float]) -> tuple[float, float]:
            k, share = pair
            log_p = mixture(outputs, votes[k], share)
            likelihood = log_p.gather(1, y[:, None]).sum()
            return float((log_p.argmax(dim=1) == y).sum()), float(likelihood)

        k, share = max(product(self.config.neighbours, self.config.mixing), key=quality)
        self.scratch["model"] = model
        self.scratch["store"] = store
        self.scratch["chosen"] = {
            "neighbours": torch.tensor(k),
            "mixing": torch.tensor(share, dtype=torch.float64),
        }
        return {}

    def seen(self, model: Model, split: Split) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the model's outputs (m, outputs) and features (m, F), and the labels (m,)."""
        outputs, features, labels = [], [], []
        with torch.no_grad():
            for batch in split.chunks(EVALUATION_BATCH):
                output, feature = outputs_and_features(self.module, model, batch.x)
                outputs.append(output)
                features.append(feature)
                labels.append(batch.y)
        return torch.cat(outputs), torch.cat(features), torch.cat(labels)

    def vote(self, queries: Tensor | None, store: Model, k: int) -> Tensor:
        """Returns p_kNN from what the client stored; see :func:`neighbour_vote`."""
        classes, scale = self.classes, self.config.scale
        return neighbour_vote(queries, **store, k=k, classes=classes, scale=scale)

    def personal_model(self, received: Tree) -> Tree:
        """Returns the global model, with what the client stored and chose."""
        return self.scratch

    def finetuned(self, model: Tree) -> Tree:
        """Returns the same of the fine-tuned global model: features, k and lambda made anew."""
        self.remember(super().finetuned(model["model"]))
        return dict(self.scratch)

    def predict(self, model: Tree, x: Tensor) -> Tensor:
        """Returns (B, outputs) log-probabilities of the mixture."""
        output, features = outputs_and_features(self.module, model["model"], x)
        k, share = model["chosen"]["neighbours"], model["chosen"]["mixing"]
        return mixture(output, self.vote(features, model["store"], int(k)), float(share))

    @step
    def export(self, received: Tree) -> Tree:
        """Raises ``UserError``: there is no one network to hand over."""
        raise UserError(
            "a model to hand over must be one network, but kNN-Per mixes the global one with the "
            "labels of a client's own examples; evaluate it, or choose another method"
        )


class Server(fedavg.Server):
    """FedAvg's, from whose model clients make their stores.

    Raises:
        UserError: examples are not of one class each, or a target has no output for each class.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_classes("kNN-Per", outline)
        check_outputs("kNN-Per", outline)
        for module in outline.models.values():
            check_head(module)  # what goes into it are the features

    def personalize(self, clients: Cohort) -> Tree:
        """Sends the global model, from which clients make their stores; nothing more is sent."""
        clients.ask(Client.remember, self.model[clients.size])
        return {}


def mixture(outputs: Tensor, votes: Tensor, share: float) -> Tensor:
    """Returns log(share p_kNN + (1 - share) p_global), at least that of the smallest number.

    Where nobody votes it is log p_global, whatever the share.

    Args:
        outputs: (B, outputs) logits of the global model, those of the classes first.
        votes: (B, classes) p_kNN.
        share: lambda.

    Returns:
        (B, outputs); nobody votes for what is no class.
    """
    votes = F.pad(votes, (0, outputs.shape[1] - votes.shape[1]))
    shares = outputs.new_tensor([share, 1 - share]).log()
    alone = outputs.log_softmax(dim=1)
    mixed = torch.logaddexp(shares[0] + votes.log(), shares[1] + alone)
    log_p = torch.where(votes.any(dim=1, keepdim=True), mixed, alone)
    return log_p.clamp(min=math.log(torch.finfo(log_p.dtype).tiny))  # a loss must be finite


def neighbour_vote(
    queries: Tensor | None, features: Tensor, labels: Tensor, k: int, *, classes: int, scale: float
) -> Tensor:
    """Returns p_kNN.

    Args:
        queries: (B, F) features of what to predict; where None, of the stored examples themselves,
            none of which is its own neighbour.
        features: (m, F) features of the stored examples.
        labels: (m,) their labels.
        k: the nearest so many vote; all, where there are fewer.
        classes: number of labels.
        scale: of the kernel.

    Returns:
        (B, classes), each row of sum 1; of zeros where there is nobody to vote.
    """
    votes = features.new_zeros(len(features if queries is None else queries), classes)
    k = min(k, len(features) - (queries is None))
    if not k:
        return votes
    from sklearn.neighbors import NearestNeighbors  # takes seconds to import

    index = NearestNeighbors(n_neighbors=k).fit(features.cpu().numpy())
    distance, nearest = index.kneighbors(None if queries is None else queries.cpu().numpy())
    exponent = -torch.from_numpy(distance).square() / (features.shape[1] * scale)
    # On the CPU, where votes for one label are added in their order.
    share, voted = exponent.softmax(dim=1).to(votes.dtype), labels.cpu()[nearest]
    return votes.cpu().scatter_add_(1, voted, share).to(features.device)
