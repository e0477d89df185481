"""pFedHN and pFedHN-PC compute what their authors' published code computes, to 1e-9."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.local import loop
from hyperfed.methods import METHODS
from hyperfed.nets.targets import LeNet
from hyperfed.task import Task
from hyperfed.trees import Tree

TRACES = Path(__file__).parents[1] / "traces"
HEADS = {"c1": "conv1", "c2": "conv2", "l1": "fc1", "l2": "fc2", "l3": "fc3"}


class Trace:
    """One file of the authors' numbers, under our names."""

    def __init__(self, name: str) -> None:
        with safe_open(TRACES / f"{name}.safetensors", "pt") as file:
            self.settings: dict[str, Any] = {
                key: json.loads(value) for key, value in file.metadata().items()
            }
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def under(self, prefix: str) -> dict[str, Tensor]:
        start = len(prefix) + 1
        return {k[start:]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}.")}

    def hypernet(self, when: str) -> Tree:
        """The hypernetwork and the embeddings, as our server's state names them."""
        hyper_net: Tree = {}
        embeddings: Tree = {}
        for name, value in self.under(f"{when}.hypernet").items():
            module, *rest = name.split(".")
            if module == "embeddings":
                embeddings["weight"] = value
            elif module == "mlp":
                hyper_net[".".join(["trunk", *rest])] = value
            else:
                layer, kind = module.split("_")
                target = f"{HEADS[layer]}/{'bias' if kind == 'bias' else 'weight'}"
                hyper_net[f"heads.base/{target}.{rest[0]}"] = value
        return {"hyper_net": hyper_net, "embeddings": embeddings}

    def classifier(self, when: str, client: int) -> Tree:
        own = self.under(f"{when}.classifier.{client}.layer.0")
        return {f"fc3.{name}": value for name, value in own.items()}


def play(trace: Trace, method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Tree]]:
    """Runs our method from the trace's initial weights on the trace's batches."""
    said = trace.settings
    rounds, batch = said["client_per_round"], said["batch"]
    # Every round's batches stand one after the other; the draw below takes them in that order.
    x = torch.cat([trace.tensors[f"round.{r}.x"].flatten(0, 1) for r in range(len(rounds))])
    y = torch.cat([trace.tensors[f"round.{r}.y"].flatten() for r in range(len(rounds))])
    everything = torch.arange(len(x))
    net = LeNet((1, 32, 32), said["classes"], width=said["filters"]).double()
    task = Task(
        name="trace",
        x=x,
        y=y,
        train=[everything] * said["clients"],
        val=[everything] * said["clients"],
        test=[everything] * said["clients"],
        models={"base": net},
        classes=said["classes"],
        transform=lambda raw: raw.double() / 64 - 2,
    )
    kept = {"keep_momentum": True} if method == "pfedhn_pc" else {}
    config = METHODS[method].Config(
        **kept,
        local_steps=said["local_steps"],
        batch_size=batch,
        local_lr=said["local_lr"],
        local_momentum=said["momentum"],
        local_weight_decay=said["local_weight_decay"],
        local_clip=said["clip"],
        lr=said["hypernet_lr"],
        momentum=said["momentum"],
        weight_decay=said["hypernet_weight_decay"],
        clip=said["clip"],
        embedding_size=said["embedding"],
        hidden=said["hidden"],
        hidden_layers=said["hidden_layers"],
    )

    seen: list[Tree] = []
    train_model = METHODS[method].Client.train_model

    def watched(client: Any, model: Tree) -> Tree:
        start = client.round * said["local_steps"] * batch
        client.batches = [
            client.train.batch(slice(start + k * batch, start + (k + 1) * batch))
            for k in range(said["local_steps"])
        ]
        delta: Tree = train_model(client, model)
        seen.append({"sent": model, "trained": trees.subtract(model, delta)})
        return delta

    watched.__dict__.update(train_model.__dict__)
    monkeypatch.setattr(METHODS[method].Client, "train_model", watched)
    server = METHODS[method].Server(task.outline(), config)
    server.load(trace.hypernet("initial"))
    engine = loop.LoopEngine(task, METHODS[method].Client, config, seed=0)
    if method == "pfedhn_pc":
        engine.memory = {
            i: {"head": trace.classifier("initial", i)} for i in range(said["clients"])
        }
    for number, client in enumerate(rounds):
        cohort = engine.cohort([client], number, training=True)
        server.round(cohort)
        engine.commit(cohort)
    return server, engine, seen


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc"])
def test_the_authors_trace_is_met(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(method)
    server, engine, seen = play(trace, method, monkeypatch)
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-9}
    for number, entry in enumerate(seen):
        for what, model in entry.items():
            torch.testing.assert_close(model, trace.under(f"round.{number}.{what}"), **exact)
    final, state = trace.hypernet("final"), server.state()
    torch.testing.assert_close(state["embeddings"], final["embeddings"], **exact)
    torch.testing.assert_close(dict(state["hyper_net"]), final["hyper_net"], **exact)
    if method == "pfedhn_pc":
        for client in range(trace.settings["clients"]):
            theirs = trace.classifier("final", client)
            torch.testing.assert_close(engine.memory[client]["head"], theirs, **exact)
