"""PeFLL against a trace of its authors' code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.local import loop
from hyperfed.methods import pefll
from hyperfed.nets import LeNet
from hyperfed.runs import config
from hyperfed.task import Task
from hyperfed.training import Batch
from hyperfed.trees import Model, Tree

TRACE = Path(__file__).parents[2] / "traces" / "pefll.safetensors"


class Trace:
    """The authors' numbers, under our names."""

    def __init__(self) -> None:
        with safe_open(TRACE, "pt") as file:
            self.said: dict[str, Any] = {k: json.loads(v) for k, v in file.metadata().items()}
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def under(self, prefix: str) -> dict[str, Tensor]:
        start = len(prefix) + 1
        return {k[start:]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}.")}

    def networks(self, when: str) -> Tree:
        layers = {"c1": "conv1", "c2": "conv2", "l1": "fc1", "l2": "fc2", "l3": "fc3"}
        hyper: Model = {}
        for name, value in self.under(f"{when}.hypernet").items():
            module, *rest = name.split(".")
            layer, _, kind = module.partition("_")
            target = f"{layers.get(layer)}/{'bias' if kind == 'bias' else 'weight'}"
            ours = "trunk" if module == "mlp" else f"heads.base/{target}"
            hyper[".".join([ours, *rest])] = value
        descriptor = {f"net.{k}": v for k, v in self.under(f"{when}.embednet").items()}
        return {"hyper_net": hyper, "descriptor_net": descriptor}


def play(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Tree]]:
    """Runs the official preset from the trace's initial weights on the trace's batches."""
    said, seen = trace.said, dict[str, Tree]()
    raw = {key: value for key, value in trace.tensors.items() if value.dtype == torch.uint8}
    rows = [torch.arange(said["batch"])] * 3
    task = Task(
        name="trace",
        x=next(iter(raw.values())),
        y=torch.zeros(said["batch"], dtype=torch.int64),
        train=rows,
        val=rows,
        test=rows,
        models={"base": LeNet((1, 32, 32), said["classes"], width=said["filters"]).double()},
        classes=said["classes"],
    )
    official = config.load("pefll", ["preset=official"]).settings
    assert (official.local_lr, official.local_momentum) == (said["local_lr"], said["momentum"])
    assert official.local_weight_decay == said["local_weight_decay"]
    assert official.local_clip == official.clip == said["clip"]
    assert official.hidden_layers == said["hidden_layers"]
    assert (official.optimizer, official.lr, official.weight_decay) == ("adam", 2e-4, 0)
    settings = [f"method.descriptor_size={said['descriptor_size']}"]
    settings += [f"method.{key}={said[key]}" for key in ("hidden", "local_steps")]
    settings += [f"method.batch_size={said['batch']}"]
    settings = config.load("pefll", ["preset=official", *settings]).settings

    def batch(key: str, x: str, y: str, which: int | slice = slice(None)) -> Batch:
        images = trace.tensors[f"{key}.{x}"][which]
        return Batch(images.double() / 64 - 2, trace.tensors[f"{key}.{y}"][which])

    describe, train_model = pefll.Client.describe, pefll.Client.train_model

    def watched_describe(client: Any, descriptor_net: Model) -> Tree:
        key = f"round.{client.round}.client.{client.id}"
        client.batches = [batch(key, "descriptor_x", "descriptor_y")]
        seen[key] = describe(client, descriptor_net)
        return seen[key]

    def watched_train(client: Any, model: Model) -> Tree:
        key = f"round.{client.round}.client.{client.id}"
        client.batches = [batch(key, "x", "y", k) for k in range(said["local_steps"])]
        delta: Model = train_model(client, model)
        seen[key] |= {"sent": model, "trained": trees.subtract(model, delta)}
        return delta

    watched_describe.__dict__.update(describe.__dict__)
    watched_train.__dict__.update(train_model.__dict__)
    monkeypatch.setattr(pefll.Client, "describe", watched_describe)
    monkeypatch.setattr(pefll.Client, "train_model", watched_train)
    server = pefll.Server(task.outline(), settings)
    server.load(trace.networks("initial"))
    engine = loop.LoopEngine(task, pefll.Client, settings, seed=0)
    for number, clients in enumerate(said["clients_per_round"]):
        server.round(engine.cohort(clients, number, training=True))
    return server, seen


def test_the_authors_trace_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace()
    server, seen = play(trace, monkeypatch)
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-9}
    assert len(seen) == 4
    for key, entry in seen.items():
        theirs = trace.tensors[f"{key}.descriptor"]
        torch.testing.assert_close(server.standard(entry["descriptor"]), theirs, **exact)
        for what in ("sent", "trained"):
            torch.testing.assert_close(entry[what], trace.under(f"{key}.{what}"), **exact)
    for network, final in trace.networks("final").items():
        torch.testing.assert_close(dict(server.state()[network]), final, **exact)
    # Their descriptor is a sum over 4 examples divided by 2, which standardising hides, as each
    # client has one full batch.
    for ours, theirs in (("mean", "mean"), ("deviation", "std")):
        number = trace.tensors[f"standardise.{theirs}"] / 2
        torch.testing.assert_close(server.state()["standard"][ours], number, **exact)
