"""Adapters of PEFT and models of transformers as targets: what travels, what is handed out."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperfed
from hyperfed import trees
from hyperfed.apps.cli import main
from hyperfed.data import own
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.errors import UserError
from hyperfed.functional import outputs_and_features
from hyperfed.nets.anatomy import head_names
from hyperfed.nets.deepsets import DeepSet
from hyperfed.nets.descriptors import LabelledTarget
from hyperfed.system.randomness import seeded
from toys import Federation, close

pytestmark = [
    pytest.mark.xdist_group("adapters"),  # which share what takes seconds to import
    pytest.mark.skipif(
        find_spec("peft") is None or find_spec("transformers") is None,
        reason="NOT TESTED: pip install -e '.[peft]'",
    ),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


class Late:
    """A library that is imported when it is used, since every worker imports this file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest asks whatever it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


peft, transformers = Late("peft"), Late("transformers")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 8)).astype(np.float32)
Y, CLIENT = RNG.integers(3, size=90), np.arange(90) % 5
TOKENS = RNG.integers(1, 20, size=(40, 6))
TOKENS[::2, 4:] = 0  # padding


def backbone() -> nn.Module:
    with seeded(0, "backbone"):
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )


def lora(head: bool = True) -> nn.Module:
    with seeded(1, "adapter"):
        settings = peft.LoraConfig(
            r=2, target_modules=["2"], modules_to_save=["4"] if head else None
        )
        return peft.get_peft_model(backbone(), settings)


def task_of(model: nn.Module, **options: Any) -> own.Task:
    return own.from_arrays(X, Y, client=CLIENT, model=model, **options)


def trained_on(model: nn.Module, name: str = "pfedhn", **keys: Any) -> Any:
    short = {"rounds": 2, "evaluate_every": 2, "cohort": 3, "progress": False}
    settings = {"local_steps": 3, "local_lr": 0.1} | keys.pop("method", {})
    return hyperfed.train(name, task_of(model), **short | keys, method=settings)


# What travels


@pytest.mark.parametrize("method", ["pfedhn", "fedavg"])
def test_bytes_are_the_adapters_exactly(method: str, tmp_path: Path) -> None:
    run = trained_on(lora(), method)
    run.adapter(1, tmp_path / "adapter")
    written = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    numbers = sum(tensor.numel() for tensor in written.values())
    assert numbers == 2 * 16 + 16 * 2 + 16 * 3 + 3
    assert run.summary["bytes_down"] == run.summary["bytes_up"] == 2 * 3 * 4 * numbers


@pytest.mark.parametrize("method", ["pfedhn", "pefll", "itpfl"])
def test_a_new_adapter_changes_nothing_where_models_start_at_the_target(method: str) -> None:
    ours = Federation(method, task_of(lora().double()), start="target", batch_size=4)
    net, x = backbone().double().eval(), torch.from_numpy(X).double()
    for client in (0, 3):
        model = trees.fill(ours.task.models["base"], ours.personal(client))
        torch.testing.assert_close(model.eval()(x), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["pefll", "itpfl", "fedper", "moon"])
def test_methods_train_the_adapter_and_leave_the_backbone(method: str) -> None:
    ours = Federation(method, task_of(lora()), batch_size=4, local_steps=2, local_lr=0.1)
    frozen = trees.clone(trees.frozen_of(ours.task.models["base"]))
    assert ours.round([0, 1, 2]).state.lost == {}
    for client in range(3):
        assert set(ours.personal(client)) == set(trees.parameters_of(ours.task.models["base"]))
    torch.testing.assert_close(trees.frozen_of(ours.task.models["base"]), frozen, rtol=0, atol=0)


def test_the_backbone_of_an_adapter_may_be_of_half_precision() -> None:
    with seeded(1):
        settings = peft.LoraConfig(r=2, target_modules=["2"])
        net = peft.get_peft_model(backbone().to(torch.bfloat16), settings)
    assert {value.dtype for value in trees.frozen_of(net).values()} == {torch.bfloat16}
    ours = Federation("pfedhn", task_of(net), start="target", local_steps=2, local_lr=0.1)
    x = torch.from_numpy(X)
    task_net = ours.task.models["base"]
    expected = backbone().to(torch.bfloat16)(x.to(torch.bfloat16)).float()
    torch.testing.assert_close(task_net(x), expected, rtol=0.03, atol=0.01)
    assert ours.round([0, 1, 2]).state.lost == {}
    assert {value.dtype for value in ours.personal(0).values()} == {torch.float32}


def test_vmap_trains_adapters_as_the_loop_does() -> None:
    loop, vmap = (Federation("fedavg", task_of(lora().double()), local_steps=3) for _ in range(2))
    vmap.engine = VmappedEngine(vmap.task, vmap.method.Client, vmap.config, seed=0)
    for ours in (loop, vmap):
        ours.round([0, 1, 2])
    close(loop.personal(0), vmap.personal(0))


# What is handed out


RELOAD = """
import sys
import safetensors.torch
import torch
from torch import nn
from peft import PeftModel

given = safetensors.torch.load_file(sys.argv[1])
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict({name: value for name, value in given.items() if name not in ("x", "logits")})
model = PeftModel.from_pretrained(net, sys.argv[2]).eval()
gap = (model(given["x"]) - given["logits"]).abs().max().item()
print(gap, "hyperfed" in sys.modules)
"""


@pytest.mark.slow
def test_a_fresh_process_without_hyperfed_opens_it_to_the_same_logits(tmp_path: Path) -> None:
    run = trained_on(lora(), "pfedhn")
    run.adapter(2, tmp_path / "adapter")
    x = torch.from_numpy(X)
    model = run.model(2).eval()
    with torch.no_grad():
        logits, plain = model(x), backbone()(x)
    assert (logits - plain).abs().max() > 1e-2  # it has learned something
    given = tmp_path / "given.safetensors"
    safetensors.torch.save_file(backbone().state_dict() | {"x": x, "logits": logits}, given)
    said = subprocess.run(
        [sys.executable, "-c", RELOAD, str(given), str(tmp_path / "adapter")],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    ).stdout
    gap, ours = said.split()
    assert float(gap) < 1e-6
    assert ours == "False"


@pytest.mark.parametrize(
    "settings",
    [
        lambda: peft.IA3Config(target_modules=["2"], feedforward_modules=[], modules_to_save=["4"]),
        lambda: peft.LoHaConfig(r=2, target_modules=["0", "2"]),
    ],
)
def test_other_adapters_are_handed_out_too(settings: Callable[[], Any], tmp_path: Path) -> None:
    run = trained_on(peft.get_peft_model(backbone(), settings()), "fedavg")
    run.adapter(0, tmp_path / "adapter")
    opened = peft.PeftModel.from_pretrained(backbone(), str(tmp_path / "adapter")).eval()
    x = torch.from_numpy(X)
    torch.testing.assert_close(opened(x), run.model(0).eval()(x), rtol=0, atol=1e-6)


def make_task() -> own.Task:
    """For the command."""
    return task_of(lora())


def make_no_task() -> own.Task:
    """Whoever makes a task wrongly is told what is wrong with it."""
    return own.from_arrays(X, Y[:-1], client=Y, model=lora())


def test_the_command_writes_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained_on(lora(), out=tmp_path / "runs")
    (tmp_path / "mine.py").write_text("from test_adapters_made import make_no_task, make_task\n")
    made = type(sys)("test_adapters_made")
    vars(made).update(make_task=make_task, make_no_task=make_no_task)
    monkeypatch.setitem(sys.modules, "test_adapters_made", made)
    monkeypatch.chdir(tmp_path)
    command = ["export", str(run.folder.path), "--client", "4", "--adapter", "out"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--task", "mine:make_task", "--json"])
    assert not left.value.code
    assert json.loads(capsys.readouterr().out) == {"adapter": "out", "client": "4"}
    run.adapter(4, tmp_path / "python")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "python" / name).read_bytes()
    for wrong in ("mine:other", "nothing:make_task", "json:dumps", "mine"):
        with pytest.raises(SystemExit) as left:
            main([*command, "--task", wrong])
        assert left.value.code == 2
        assert "task must be a module and its function" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--task", "mine:make_no_task"])
    assert "error: these arguments do not make a task" in capsys.readouterr().err


# What cannot be


def test_what_is_no_adapter_is_not_saved_as_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be one of peft, got a Sequential"):
        trained_on(backbone(), "fedavg").adapter(0, tmp_path / "adapter")
    freed = lora()
    freed.get_parameter("base_model.model.0.bias").requires_grad_(True)
    with pytest.raises(UserError, match=r"but base_model.model.0.bias is not in it"):
        trained_on(freed, "fedavg").adapter(0, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_written_over(tmp_path: Path) -> None:
    run = trained_on(lora(), "fedavg")
    with pytest.raises(UserError, match="must be new"):
        run.adapter(0, tmp_path)
    with pytest.raises(UserError, match="must be below 5"):
        run.adapter(7, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_method_that_needs_a_head_says_that_there_is_none(tmp_path: Path) -> None:
    of_heads = ("fedper", "pfedhn_pc", "lg_fedavg", "moon", "knn_per", "pefll", "itpfl")
    for method in of_heads:
        settings = {"phase_one_rounds": 1} if method == "itpfl" else {}
        with pytest.raises(UserError, match="modules_to_save"):
            trained_on(lora(head=False), method, out=tmp_path, method=settings)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="modules_to_save"):
        outputs_and_features(lora(head=False), {}, torch.zeros(1, 8))
    assert len(head_names(lora(), 1)) == 2
    trained_on(lora(head=False), "pefll", method={"descriptor_net": "linear"})


def test_an_inherited_model_teaches_an_adapter_by_its_outputs_and_not_by_features() -> None:
    run = trained_on(lora(head=False), "fedphp", cohort=1.0, rounds=3)
    assert run.summary["void_rounds"] == 0
    assert not any(evaluation.lost for evaluation in run.evaluations)
    with pytest.raises(UserError, match="modules_to_save"):
        trained_on(lora(head=False), "fedphp", method={"transfer": "mmd"})


def test_a_frozen_head_behind_a_layer_that_is_trained_whole_is_told_before_training() -> None:
    """The frozen originals of what is trained whole are no layers: they never run."""

    def adapted(*whole: str) -> nn.Module:
        settings = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=[*whole])
        return peft.get_peft_model(backbone(), settings)

    for method in ("pefll", "headstart", "itpfl"):
        settings = {"phase_one_rounds": 1} if method == "itpfl" else {}
        with pytest.raises(UserError, match=r"model.4 behind it could not take, as it is frozen"):
            trained_on(adapted("2"), method, method=settings)
    assert DeepSet(adapted("2", "4"), 5, units=6)(torch.from_numpy(X[:4])).shape == (5,)


def test_networks_that_describe_clients_keep_the_adapter_beside_its_layer() -> None:
    """A new adapter is nothing: what it is beside must still be seen, label or not."""
    x, y = torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])
    net = LabelledTarget(lora(), 3, 5).eval()
    head = net.net.base_model.model[4].modules_to_save["default"]
    hidden = torch.cat([backbone()[:4](x), F.one_hot(y, 3)], dim=1)
    torch.testing.assert_close(net(x, y), head.out(head.hidden(hidden).relu()))
    deep = DeepSet(lora(), 5, units=6).eval()
    layer = deep.features[0].base_model.model[4].modules_to_save["default"]
    torch.testing.assert_close(deep.features(x), layer(backbone()[:4](x)))


# Models of transformers

SMALL = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 1.0,
}


def bert(kind: str) -> nn.Module:
    with seeded(2, kind):
        net: nn.Module = getattr(transformers, kind)(transformers.BertConfig(**SMALL, num_labels=3))
    return net.eval()


def counted(task: own.Task, method: str = "fedavg", **settings: Any) -> tuple[float, float]:
    """Loss and accuracy of client 0's test examples before training."""
    ours = Federation(method, task, batch_size=4, **settings)
    cohort = ours.engine.cohort([0], 0, training=False)
    counts = cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort))["test"]
    return (counts["loss"] / counts["count"]).item(), (counts["correct"] / counts["count"]).item()


def test_sequences_are_classified_with_their_padding_masked() -> None:
    net, labels = bert("BertForSequenceClassification"), RNG.integers(3, size=40)
    task = own.from_arrays(TOKENS, labels, client=np.arange(40) % 2, model=net)
    x, y = task.x[task.test[0]], task.y[task.test[0]]
    logits = net(x, attention_mask=(x != 0).long()).logits
    assert not torch.allclose(logits, net(x).logits, atol=1e-5)
    loss, accuracy = counted(task)
    assert loss == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == y).float().mean().item())
    run = hyperfed.train("fedavg", task, rounds=1, progress=False, method={"local_steps": 2})
    assert isinstance(run.model(0)(x), Tensor)
    assert not isinstance(net(x), Tensor)  # the caller's own stays as it is


def test_tokens_are_classified_and_those_that_do_not_count_do_not() -> None:
    net, labels = bert("BertForTokenClassification"), RNG.integers(3, size=(40, 6))
    labels[TOKENS == 0] = -100
    task = own.from_arrays(TOKENS, labels, client=np.arange(40) % 2, model=net)
    x, y = task.x[task.test[0]], task.y[task.test[0]]
    logits, there = net(x, attention_mask=(x != 0).long()).logits, y != -100
    loss, accuracy = counted(task)
    assert loss == pytest.approx(F.cross_entropy(logits[there], y[there]).item(), rel=1e-5)
    right = [
        (row.argmax(1) == own_y)[seen].float().mean().item()
        for row, own_y, seen in zip(logits, y, there, strict=True)
    ]
    assert accuracy == pytest.approx(np.mean(right))
    for method in ("pefll", "pfedhn"):
        ours = Federation(method, task, batch_size=4, local_steps=1)
        assert ours.round([0, 1]).state.lost == {}
    linear = Federation("pefll", task, batch_size=4, local_steps=1, descriptor_net="linear")
    assert linear.round([0, 1]).state.lost == {}


def test_the_next_token_is_told_with_a_low_rank_adapter() -> None:
    small = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with seeded(3):
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **drop)).eval()
        settings = peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(net, settings)
    texts = RNG.integers(20, size=(40, 7))
    owner = np.arange(40) % 2
    task = own.from_arrays(texts[:, :-1], texts[:, 1:], client=owner, model=adapted, classes=20)
    x, y = task.x[task.test[0]], task.y[task.test[0]]
    expected = F.cross_entropy(net(x).logits.flatten(0, 1), y.flatten())
    loss, _ = counted(task, "pfedhn", start="target")
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    ours = Federation("pfedhn", task, start="target", local_steps=2, batch_size=4)
    assert ours.round([0, 1]).state.lost == {}
