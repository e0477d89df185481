"""PartialFed (Sun et al., NeurIPS 2021): a client loads some layers of the global model only.

At the start of a round each layer either loads the received global one or keeps the client's own,
as it was last trained. Then all layers train.

Sent: the whole global model, batch-norm buffers included, both ways: unlike in FedPer, kept layers
travel and are averaged too, they are just not loaded. Kept by the client: its last trained model
and, with ``strategy="adaptive"``, the logits of its strategy. Aggregated: the mean of the trained
models, weighted by training examples, as in FedAvg. Evaluated: the client's own model as last
trained; a known client that was never asked has none and uses the global model. A novel client
loads the whole global model and trains it for ``novel_steps`` steps; nothing is sent back.

A layer is a module with parameters; its batch-norm buffers go with it. Where a client has no model
of its own yet it loads all layers, whatever its strategy.

- ``strategy="fixed"`` (PartialFed-Fix): the last ``head_layers`` and those named in
  ``kept_layers`` are kept in every round. Without any this is FedAvg's training; with all of them
  every client trains alone.
- ``strategy="adaptive"`` (PartialFed-Adaptive): each client learns logits a[l] = (load, keep) of
  every layer l, at first zero. A round has two stages.
  A. For ``strategy_steps`` steps the logits descend the supervised loss of the mixture
  v[l, 0] * global[l] + v[l, 1] * own[l] of two constant models, with v[l] = softmax((a[l] + g) /
  tau) and g fresh standard Gumbel noise in each step.
  B. A hard choice argmax(a[l] + g), with probabilities softmax(a[l]), says what is loaded.

We had no text of the paper but its abstract: that a strategy is given or learned by each client is
the paper's, stages A and B are a reconstruction (for linear and convolutional layers, to mix their
parameters is to mix their outputs), and all defaults are ours.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import Outline, step
from hyperfed.methods import fedavg
from hyperfed.methods.parts.presets import DEFAULT, PFEDKT
from hyperfed.nets.anatomy import layers_of
from hyperfed.training import Batch, PersonalConfig, Sgd, Steps, fit
from hyperfed.trees import Model, Tree, partition

KEEP = 1
"""The column of a strategy's logits that stands for the client's own layer; 0 loads."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of PartialFed.

    Attributes:
        strategy: which layers are kept: fixed ones, or what each client learned.
        head_layers: how many of the last layers the fixed strategy keeps.
        kept_layers: names of further layers that it keeps, such as those of batch-norm.
        strategy_steps: steps in which the adaptive strategy is learned in a round.
        strategy_lr: learning rate of its logits.
        temperature: tau of the Gumbel-softmax.
        novel_steps: steps in which a novel client trains the global model.
    """

    strategy: Literal["fixed", "adaptive"] = "adaptive"
    head_layers: NonNegativeInt = 1
    kept_layers: tuple[str, ...] = ()
    strategy_steps: PositiveInt = 5
    strategy_lr: PositiveFloat = 0.2
    temperature: PositiveFloat = 1.0
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    "pfedkt": PFEDKT,
}


def fixed_layers(module: nn.Module, config: Config) -> list[str]:
    """Names the layers of a target that the fixed strategy keeps, in the order of definition.

    Raises:
        UserError: the target has no such layers.
    """
    layers = list(layers_of(module))
    if config.head_layers > len(layers) or not set(config.kept_layers) <= set(layers):
        raise UserError(
            f"head_layers must be 0 to {len(layers)} and kept_layers among the target's layers "
            f"(modules with parameters: {', '.join(layers)}), got {config.head_layers} and "
            f"{', '.join(config.kept_layers) or 'none'}; keep others"
        )
    head = layers[len(layers) - config.head_layers :]
    return [layer for layer in layers if layer in head or layer in config.kept_layers]


def gumbel_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws standard Gumbel noise of the shape and dtype of a tensor."""
    drawn = torch.empty_like(like, device="cpu").exponential_(generator=generator)
    return -drawn.log().to(like.device)


class Client(federation.Client):
    """Keeps a model of its own, of which it loads only some layers anew."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Loads some layers of the global model, trains all, and keeps and returns the result."""
        own: Model | None = self.memory.get("model")
        start = model if own is None else self.load(model, own)
        trained = self.train_own(
            self.objective,
            start,
            self.batches,
            trainable=self.parameters,
            own=self.parameters,
            anew={name for name in model if start[name] is model[name]},  # what it loaded
        )
        self.memory["model"] = trained
        return trained

    @step
    def join(self, model: Model) -> Tree:
        """Does the same and replies with nothing."""
        self.train_model(model)
        return {}

    def load(self, model: Model, own: Model) -> Model:
        """Returns the global model with the client's own layers where its strategy keeps them."""
        layers = layers_of(self.module)
        if self.config.strategy == "fixed":
            kept = fixed_layers(self.module, self.config)
        else:
            strategy = self.learn_strategy(model, own)
            choice = (strategy + gumbel_noise(strategy, self.generator)).argmax(dim=-1)  # (L,)
            kept = [layer for layer, chosen in zip(layers, choice, strict=True) if chosen == KEEP]
        return model | partition(own, {name for layer in kept for name in layers[layer]})[0]

    def learn_strategy(self, model: Model, own: Model) -> Tensor:
        """Returns the logits (L, 2) of the client's strategy after a round's stage A."""
        layers = layers_of(self.module).values()
        rows = {name: row for row, names in enumerate(layers) for name in names}
        rows, _ = partition(rows, self.parameters)  # a loss in training mode needs no buffers
        logits: Tensor | None = self.memory.get("strategy")
        if logits is None:
            logits = next(iter(model.values())).new_zeros(len(layers), 2)

        def objective(learned: Model, batch: Batch) -> tuple[Tensor, Model]:
            noise = gumbel_noise(logits, self.generator)
            soft = ((learned["strategy"] + noise) / self.config.temperature).softmax(dim=-1)
            mixture = model | {
                name: torch.lerp(model[name], own[name], soft[row, KEEP])
                for name, row in rows.items()
            }
            loss, _ = self.objective(mixture, batch)
            return loss, {}

        batches = self.draw_batches(Steps(self.config.strategy_steps, self.config.batch_size))
        settings = Sgd(self.config.strategy_lr)
        kept = {"strategy": logits}
        self.memory |= (kept := fit(objective, kept, batches, settings, trainable=kept).model)
        return kept["strategy"]

    def personal_model(self, received: Model) -> Model:
        """Returns the client's own model, or the global one if there is none."""
        model: Model = self.memory.get("model", received)
        return model


class Server(fedavg.Server):
    """FedAvg's: all layers are averaged, loaded or kept.

    Raises:
        UserError: a target lacks layers that the fixed strategy keeps.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        if config.strategy == "fixed":
            for target in outline.models.values():  # complain before anything is trained
                fixed_layers(target, config)
