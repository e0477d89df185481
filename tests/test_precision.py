"""precision=bf16: local steps in bfloat16, everything that is kept or sent in float32."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperfed
from hyperfed import trees
from hyperfed.engines.calls import Answer, Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.nets import LeNet
from hyperfed.runs import watched as watched_rounds
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator, seeded
from hyperfed.training import Batch, Sgd, arithmetic, fit, supervised
from toys import short

SETTINGS = Sgd(0.05, momentum=0.9, weight_decay=1e-3)


def net_and_batches() -> tuple[nn.Module, list[Batch]]:
    draw = generator(0, "batches")
    with seeded(0, "net"):
        net = LeNet((1, 16, 16), 3, width=2, hidden=(8, 8))
    batches = [
        Batch(torch.randn(8, 1, 16, 16, generator=draw), torch.randint(3, (8,), generator=draw))
        for _ in range(10)
    ]
    return net, batches


def test_local_steps_are_those_of_pytorchs_autocast() -> None:
    """With ten steps: the weights that are cast must be the latest ones."""
    net, batches = net_and_batches()
    model = trees.model_of(net)
    with arithmetic("bf16"):
        objective = supervised(net, F.cross_entropy)
        ours = fit(objective, model, batches, SETTINGS, trainable=list(model)).model
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=SETTINGS.lr,
        momentum=SETTINGS.momentum,
        weight_decay=SETTINGS.weight_decay,
    )
    net.train()
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(batch.x), batch.y)
        loss.backward()
        optimizer.step()
    assert all(value.dtype == torch.float32 for value in ours.values())
    torch.testing.assert_close(ours, trees.model_of(net), rtol=1e-3, atol=1e-4)
    in_float32 = fit(objective, model, batches, SETTINGS, trainable=list(model)).model
    moved = trees.subtract(in_float32, ours)
    assert max(value.abs().max() for value in moved.values()) > 1e-4


def test_no_step_keeps_the_weights_of_those_before_it() -> None:
    """PyTorch's cache of weights in bfloat16 is emptied only at the end of a whole call."""
    with arithmetic("bf16"):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()


def trained(precision: str, engine: str) -> Any:
    keys = {"name": "digits", "clients": 6, "novel": 0.0}
    return hyperfed.train(
        "fedavg",
        rounds=2,
        cohort=6,
        evaluate_every=2,
        precision=precision,
        engine=engine,
        task=keys,
        method={"local_steps": 3, "batch_size": 8},
        progress=False,
    )


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_run_computes_and_evaluates_in_it_and_keeps_float32(engine: str) -> None:
    usual, lower = (trained(precision, engine) for precision in ("float32", "bf16"))
    model, other = (run.server.state()["model"]["base"] for run in (usual, lower))
    assert all(value.dtype == torch.float32 for value in other.values())
    torch.testing.assert_close(model, other, rtol=0.05, atol=0.01)
    assert any(not torch.equal(model[name], other[name]) for name in model)
    assert lower.config.precision == "bf16"
    assert usual.evaluations[-1].loss != lower.evaluations[-1].loss


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_computes_in_it_and_loses_nobody(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lower: set[tuple[str, str]] = set()  # what a client sent or remembered in bfloat16
    run_call = LoopEngine._run

    def watched(self: LoopEngine, call: Call) -> Answer | Exception:
        answer = run_call(self, call)
        if isinstance(answer, Answer):
            held = (answer.tree, answer.memory, answer.scratch)
            found = [each for tree in held for each in trees.leaves(tree)]
            lower.update((call.step, name) for name, v in found if v.dtype is torch.bfloat16)
        return answer

    monkeypatch.setattr(LoopEngine, "_run", watched)
    run = hyperfed.train(
        method,
        rounds=2,
        cohort=3,
        evaluate_every=2,
        precision="bf16",
        engine="loop",
        task={"name": "digits", "clients": 4, "novel": 0.25},
        method=short(method),
        progress=False,
    )
    assert not [part.missed for part in [*run.evaluations, run.evaluate_novel()] if part.missed]
    assert run.summary["always_lost"] is None
    assert not lower
    # Nor does it change what checkpoints leave out, or draw what no seed decides.
    assert [record for record in caplog.records if record.name == watched_rounds.__name__] == []
    held = trees.leaves(run.server.state(optimizers=False))
    assert not [name for name, value in held if value.dtype is torch.bfloat16]


@pytest.mark.parametrize("own", [{"standardize": False}, {"encoder": "end_to_end"}])
def test_what_itpfl_s_encoder_tells_is_sent_in_float32(own: dict[str, Any]) -> None:
    """In which the server's hypernetwork computes."""
    run = hyperfed.train(
        "itpfl",
        rounds=2,
        cohort=3,
        evaluate_every=2,
        precision="bf16",
        task={"name": "digits", "clients": 6, "novel": 0.34, "unlabelled": True},
        method={"phase_one_rounds": 1, "local_steps": 2} | own,
        progress=False,
    )
    assert run.evaluate_novel().missed == ()


def test_another_precision_is_refused() -> None:
    with pytest.raises(UserError, match="precision"):
        from_keys("fedavg", {"precision": "float16"})
