"""FedPHP (Li et al., ECML-PKDD 2021): a client's average of its models teaches the global one.

Sent: the whole global model w, batch-norm buffers included, both ways. Kept by the client: its
inherited private model h and in how many rounds it took part; h never travels. Aggregated: the mean
of the trained models, weighted by training examples, as in FedAvg. Evaluated: h; a known client
that was never asked has none and uses w. A novel client, of which the paper has none, fine-tunes w
for ``novel_steps`` steps without a teacher, and that is its h; nothing is sent back.

In a round w is trained from where the server left it on

    (1 - lambda) * supervised loss + lambda * transfer from h to w

with h a constant in evaluation mode, and then h becomes the running average

    h <- mu h + (1 - mu) w,   mu = momentum * min(z / Z, 1)

over parameters and buffers alike (step counters are rounded back). z counts the rounds in which the
client took part before, Z those in which it is expected to in the whole run: cohort share times
rounds. So its first w is inherited whole, and h moves ever more slowly. The transfer is either

- ``kd``: KL(softmax(h(x) / T) || softmax(w(x))), softened at the teacher's side alone, or
- ``mmd``: the maximum mean discrepancy of the two models' features of a batch (``contrast.py``),
  which are what goes into the last layer.

We had no text of the paper: transfers, average, schedule and numbers are those of the authors'
code. In it h is the random initial model until the client first takes part, and teaches even then;
here the first round has no teacher and the supervised loss counts in full.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.federation import Outline, step
from hyperfed.functional import apply, forward, forward_with_features, outputs_and_features
from hyperfed.methods import fedavg
from hyperfed.methods.parts.contrast import (
    check_logits,
    distances,
    mean_counted,
    mean_discrepancy,
)
from hyperfed.methods.parts.presets import DEFAULT, PFEDKT
from hyperfed.nets.anatomy import check_head
from hyperfed.training import Batch, LocalConfig, Objective, Share, fit
from hyperfed.trees import Model, Tree, interpolate


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of FedPHP.

    Attributes:
        transfer: how the inherited model teaches: through its outputs or through its features.
        transfer_weight: lambda, the weight of the transfer; the supervised loss has 1 - lambda.
        temperature: T, by which ``kd`` divides the teacher's logits.
        momentum: what mu grows to: the weight of the old h in the new one.
        expected_rounds: Z, after how many rounds of a client it has grown to that.
        novel_steps: steps in which a novel client fine-tunes the global model.
    """

    transfer: Literal["kd", "mmd"] = "kd"
    transfer_weight: Share = 0.05
    temperature: PositiveFloat = 4.0
    momentum: Share = 0.9
    expected_rounds: PositiveInt = 100
    novel_steps: NonNegativeInt = 500


_OFFICIAL: Mapping[str, Any] = {
    "rounds": 1000,
    "cohort": 0.1,
    "evaluate_every": 10,
    "task.clients": 100,
    "task.novel": 0.0,
    "method.expected_rounds": 100,
    "method.local_epochs": 2,
    "method.local_lr": 0.03,
    "method.local_weight_decay": 1e-5,
    "method.local_clip": 100.0,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # 5 of 18 clients take part in a round: 8 of 30 rounds for each. A step runs two models.
    "default": {**DEFAULT, "method.local_steps": 30, "method.expected_rounds": 8},
    # The authors' script for CIFAR-10 with two classes a client; it runs 2 and 5 local epochs.
    "official": _OFFICIAL,
    "official_mmd": {**_OFFICIAL, "method.transfer": "mmd", "method.transfer_weight": 0.1},
    "pfedkt": {**PFEDKT, "method.expected_rounds": 50},
}


class Client(federation.Client):
    """Keeps a running average of the models it trained, which teaches the next one."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Returns the trained global model; the inherited one takes it in."""
        inherited: Model | None = self.memory.get("inherited")
        trained = fit(
            self.objective if inherited is None else self.taught_by(inherited),
            model,
            self.batches,
            self.config.local,
            trainable=self.parameters,
        ).model
        self.inherit(trained)
        return trained

    @step
    def join(self, model: Model) -> Tree:
        """Does the same and replies with nothing."""
        self.train_model(model)
        return {}

    def taught_by(self, teacher: Model) -> Objective:
        """Returns (1 - lambda) * supervised loss + lambda * transfer from the teacher."""
        config = self.config

        def by_outputs(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Model]:
            output, buffers = forward(self.module, model, x)
            taught = apply(self.module, teacher, x) / config.temperature
            return output, mean_counted(distances(output, taught, "kl"), y), buffers

        def by_features(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Model]:
            output, features, buffers = forward_with_features(self.module, model, x, y)
            _, shown = outputs_and_features(self.module, teacher, x, y)
            return output, mean_discrepancy(features, shown), buffers

        transferred = by_outputs if config.transfer == "kd" else by_features

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            output, transfer, buffers = transferred(model, batch.x, batch.y)
            loss = torch.lerp(self.loss(output, batch.y), transfer, config.transfer_weight)
            return loss, buffers

        return objective

    def inherit(self, trained: Model) -> None:
        """Moves the inherited model towards one that has just been trained."""
        never = torch.zeros((), dtype=torch.int64, device=self.device)
        rounds: Tensor = self.memory.get("rounds", never)
        inherited: Model = self.memory.get("inherited", trained)
        mu = self.config.momentum * (rounds.double() / self.config.expected_rounds).clamp(max=1)
        self.memory["inherited"] = interpolate(trained, inherited, mu)
        self.memory["rounds"] = rounds + 1

    def personal_model(self, received: Model) -> Model:
        """Returns the inherited private model, or the global one if there is none."""
        inherited: Model = self.memory.get("inherited", received)
        return inherited


class Server(fedavg.Server):
    """FedAvg's; what a client inherits stays with it.

    Raises:
        UserError: the outputs are no logits of classes, and so have no divergence; or the features
            are to teach, and a target has no head that is trained whole.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        if config.transfer == "kd":
            check_logits('fedphp with transfer "kd"', outline)
        else:
            for module in outline.models.values():
                check_head(module)  # what goes into it are the features
