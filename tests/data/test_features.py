"""Features once: what a frozen beginning makes of examples, against the network in one piece."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import hyperfed
from hyperfed.data import tasks
from hyperfed.data.examples import Normalize
from hyperfed.data.features import Prefix
from hyperfed.data.own import Task
from hyperfed.data.roster import Frame
from hyperfed.errors import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 6))
Y = np.arange(60) % 3
CLIENT = np.arange(60) // 3 % 5
SHORT = {"rounds": 2, "cohort": 3, "evaluate_every": 1, "progress": False}
STEPS = {"local_steps": 2, "batch_size": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


class Net(nn.Module):
    """A frozen body with batch-norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.0))
        self.head = nn.Linear(8, 3)
        self.body[1].running_mean.normal_()
        self.body[1].running_var.uniform_(0.5, 2)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Beside(Net):
    """The head takes examples, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8 + 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.body(x), x], dim=1))


def made(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def a_task(net, prefix=None, **options):
    return Task.from_arrays(X, Y, client=CLIENT, model=net, prefix=prefix, novel=1, **options)


def by_hand(net, x):
    """The body, layer by layer, as in evaluation."""
    linear, norm = net.body[0], net.body[1]
    hidden = torch.as_tensor(x) @ linear.weight.T + linear.bias
    scaled = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    return (scaled * norm.weight + norm.bias).tanh()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("method", ["fedavg", "pefll"])
def test_training_on_features_gives_the_numbers_of_the_network_in_one_piece(method, engine):
    net, found = made(), []
    for prefix in (None, "body"):
        task = a_task(net, prefix)
        run = hyperfed.train(method, task, engine=engine, method=STEPS, **SHORT)
        found.append((task.fingerprint, run.summary["bytes_up"], run.evaluations))
    whole, once = found
    assert whole[:2] == once[:2]
    for a, b in zip(whole[2], once[2], strict=True):
        assert a.client_loss == pytest.approx(b.client_loss, abs=1e-12)
        assert a.client_accuracy == b.client_accuracy


def test_features_are_those_of_an_evaluation_and_the_model_takes_them():
    net = made()
    net.body[3].p = 0.9
    net.train()
    task = a_task(net, "body")
    torch.testing.assert_close(task.features, by_hand(net, X), rtol=0, atol=1e-14)
    assert not task.features.requires_grad
    assert net.body[1].training  # the user's network stays as it is
    run = hyperfed.train("fedavg", task, method=STEPS, **SHORT)
    model = run.model("0")
    assert set(model.state_dict()) == {"head.weight", "head.bias"}
    expected = by_hand(net, X[:4]) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(task.transform(task.x[:4])), expected, rtol=0, atol=1e-13)


def test_images_are_normalised_before():
    pixels = RNG.integers(0, 256, (60, 3, 2, 2), dtype=np.uint8)
    net = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    plain, once = (
        Task.from_arrays(pixels, Y, client=CLIENT, model=net, prefix=prefix)
        for prefix in (None, net[0])
    )
    expected = plain.transform(plain.x).flatten(1) @ net[0][1].weight.T + net[0][1].bias
    torch.testing.assert_close(once.features, expected)
    assert once.x.dtype == torch.uint8


def test_examples_go_through_once_and_a_newcomers_too():
    seen = []

    def double(x: Tensor) -> Tensor:
        seen.append(len(x))
        return 2 * x

    task = a_task(nn.Linear(6, 3).double(), double)
    assert sum(seen) == 2 + 60  # two were a trial
    run = hyperfed.train("fedper", task, method=STEPS | {"novel_steps": 3}, **SHORT)
    assert sum(seen) == 62
    run.personalize(X[:7], Y[:7])
    assert sum(seen) == 62 + 7
    torch.testing.assert_close(task.features, 2 * torch.from_numpy(X), rtol=0, atol=0)


def test_every_example_is_in_its_row_where_there_are_several_batches():
    x = np.arange(1300.0)[:, None]
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 3)).double()
    net[0].requires_grad_(False)
    y, client = np.arange(1300) % 3, np.arange(1300) % 4
    task = Task.from_arrays(x, y, client=client, model=net, prefix="0")
    expected = torch.from_numpy(x) * net[0].weight.item() + net[0].bias.item()
    torch.testing.assert_close(task.features, expected, rtol=0, atol=1e-12)


@pytest.mark.xdist_group("adapters")  # which import it
def test_the_part_of_a_model_of_peft_has_the_name_it_had_before():
    peft = pytest.importorskip("peft", reason="pip install -e '.[peft]'")
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 3)).double()
    lora = peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["2"])
    model = peft.get_peft_model(net, lora)
    plain, once, by_part = (a_task(model, p) for p in (None, "0", net[0]))
    assert list(once.initial("base")) == list(plain.initial("base"))
    assert once.features.shape == by_part.features.shape == (60, 8)
    with pytest.raises(UserError, match=r"frozen, but 1\.lora_A\.default\.weight is trained"):
        a_task(model, "1")


def test_a_network_may_stand_before_models_of_several_sizes_which_it_tells_apart():
    models = {"small": nn.Linear(8, 3).double(), "large": nn.Sequential(nn.Linear(8, 3)).double()}
    bodies = [made(seed=seed).body.requires_grad_(True) for seed in (0, 0, 1)]
    one, same, other = (a_task(models, body) for body in bodies)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert all(body.training and body[0].weight.requires_grad for body in bodies)  # left alone
    torch.testing.assert_close(one.features, by_hand(made(), X))
    functions = [a_task(nn.Linear(6, 3).double(), lambda x, by=by: by * x) for by in (1, 2)]
    assert functions[0].fingerprint != functions[1].fingerprint


@torch.no_grad()
def test_the_fingerprint_follows_all_that_features_follow_however_little_it_changes():
    def fingerprint(mean=0.5, activation=None, weight=0.0, running=0.0, fixed=0.0):
        body = made().body.requires_grad_(True)
        body[0].weight += weight
        body[1].running_mean += running
        body[2] = activation or body[2]
        body.register_buffer("fixed", torch.tensor(fixed), persistent=False)
        return Prefix(Normalize((mean,), (1.0,)), body).fingerprint()

    assert fingerprint() == fingerprint()
    others = [
        {"mean": 0.5 + 1e-6},
        {"activation": nn.ReLU()},
        {"weight": 1e-6},
        {"running": 1e-6},
        {"fixed": 1e-6},
    ]
    assert len({fingerprint(), *(fingerprint(**other) for other in others)}) == 6
    constants = [nn.BatchNorm1d(6, affine=False) for _ in range(2)]  # without any parameter
    constants[1].running_mean += 1e-6
    whole = Normalize((0.5,), (1.0,))
    assert len({Prefix(whole, net).fingerprint() for net in constants}) == 2


def test_no_gradient_reaches_what_a_function_trains():
    layer = nn.Linear(6, 4).double()
    task = a_task(nn.Linear(4, 3).double(), lambda x: layer(x).tanh())
    assert not task.features.requires_grad


def counted(net, seen):
    """Has a network's body tell how many examples it sees."""
    net.body.register_forward_hook(lambda part, inputs, output: seen.append(len(inputs[0])))
    return net


def test_features_are_kept_for_the_same_examples_and_weights_and_for_no_others(cache, monkeypatch):
    monkeypatch.setattr("hyperfed.data.features.EVALUATION_BATCH", 8)
    seen = []
    first = a_task(counted(made(), seen), "body")
    (file,) = cache.iterdir()
    assert sum(seen) == 2 + 2 + 60  # two were a trial, of the whole and of its parts
    again = a_task(counted(made(), seen), "body")
    assert sum(seen) == 64 + 4 + 8  # the first batch says whether they are still right
    assert torch.equal(first.features, again.features)

    a_task(made(seed=1), "body")
    moved = made()
    moved.body[1].running_mean += 1
    torch.testing.assert_close(a_task(moved, "body").features, by_hand(moved, X))
    Task.from_arrays(X + 1, Y, client=CLIENT, model=made(), prefix="body")
    assert len(list(cache.iterdir())) == 4

    file.write_bytes(file.read_bytes()[:-8] + bytes(8))  # a damaged file
    assert torch.equal(a_task(made(), "body").features, first.features)
    stale = {"x": first.features + 0.1}
    header = safetensors.safe_open(file, "pt").metadata()
    safetensors.torch.save_file(stale, file, header)
    assert torch.equal(a_task(made(), "body").features, first.features)


def test_features_of_other_code_with_the_same_weights_are_not_used():
    def task_of(activation):
        net = made()
        net.body[2] = activation
        return a_task(net, "body")

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    before = task_of(Act()).features
    Act.forward = lambda self, x: x.relu()
    assert (task_of(Act()).features >= 0).all()
    assert before.min() < 0


def test_a_function_leaves_nothing_on_disk(cache):
    a_task(nn.Linear(6, 3).double(), lambda x: x)
    assert not cache.exists()


def test_what_a_newcomer_brings_leaves_nothing_on_disk(cache):
    run = hyperfed.train("fedper", a_task(made(), "body"), method=STEPS, **SHORT)
    before = list(cache.iterdir())
    run.personalize(X[:7] + 1, Y[:7])
    assert list(cache.iterdir()) == before


def test_a_disk_that_refuses_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "file"))
    torch.testing.assert_close(a_task(made(), "body").features, by_hand(made(), X))


@pytest.mark.parametrize(
    ("model", "prefix", "problem"),
    [
        (
            made,
            "bodies",
            "a part of the model, got 'bodies'; choose one of body",
        ),
        (made, "", "must name a part of the model, got ''"),
        (made, "head", "frozen, but head.weight is trained"),
        (made, 3, "or a function of a batch, got 3"),
        (lambda: made(Beside), "body", "nothing else of the model may take them"),
        (lambda: {"a": made(), "b": made()}, "body", "must be that of one, got 2 models (a, b)"),
        (made, nn.Linear(5, 8).double(), "shape (2, 6) torch.float64, but fails on it"),
        (made, lambda x: x.sum(), "a row for each of 2 examples, got ()"),
        (made, lambda x: [x], "a row for each of 2 examples, got list"),
        (made, lambda x: x[:, :2], "must take a batch of x, shape (2, 2)"),
    ],
)
def test_what_is_no_beginning_is_told_with_all_else(model, prefix, problem):
    with pytest.raises(UserError) as told:
        a_task(model(), prefix, val=-1)
    assert problem in str(told.value)
    assert "val and test must be 0 or more" in str(told.value)


def test_a_table_and_a_file_of_a_network_take_a_prefix_too(tmp_path):
    pd = pytest.importorskip("pandas")
    columns = {f"x{i}": X[:, i] for i in range(6)}
    frame = pd.DataFrame({**columns, "y": Y, "client": CLIENT})
    framed = Task.from_frame(frame, model=made(), prefix="body")
    torch.testing.assert_close(framed.features, by_hand(made(), X))

    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(6, 4), nn.Linear(4, 3))\n"
        "        self[0].requires_grad_(False)\n"
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    settings = {"name": str(tmp_path / "rows.parquet"), "model": f"{tmp_path}/nets.py:Net"}
    runs = [
        hyperfed.train("fedavg", task=settings | more, method=STEPS, **SHORT)
        for more in ({}, {"prefix": "0"})
    ]
    assert runs[1].task.features.shape == (60, 4)
    whole, once = (run.evaluations[-1].client_loss for run in runs)
    assert once == pytest.approx(whole, abs=1e-6)
    assert runs[0].task.fingerprint == runs[1].task.fingerprint
    with pytest.raises(UserError, match=r"frozen, but 1\.weight is trained"):
        tasks.build(replace(runs[1].config.task, prefix="1"), seed=0)


NETS = """
import torch
from torch import Tensor, nn


class Net(nn.Sequential):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(0.9))
        super().__init__(body.requires_grad_(False), nn.Linear(4, 10))


class Other(Net):
    def __init__(self) -> None:
        super().__init__(seed=1)


class Beside(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.flatten(1).mean(dim=1, keepdim=True)
"""


def test_images_of_a_data_set_are_normalised_before_a_network_of_a_file(tmp_path):
    """What is trained says nothing of the frozen beginning; the fingerprint does."""
    (tmp_path / "nets.py").write_text(NETS)
    built = {}
    for name in ("Net", "Other"):
        settings = {"name": "digits", "clients": 4, "model": f"{tmp_path}/nets.py:{name}"}
        plain, once = (
            tasks.build(tasks.TaskConfig(**settings, **more), seed=0)
            for more in ({}, {"prefix": "0"})
        )
        body = plain.models["base"][0].eval()
        assert not torch.equal(plain.transform(plain.x), plain.x.float())
        expected = body(plain.transform(plain.x))
        torch.testing.assert_close(once.features, expected)
        torch.testing.assert_close(once.transform(plain.x[:9]), expected[:9])
        assert once.fingerprint == plain.fingerprint
        built[name] = once.fingerprint
    assert built["Net"] != built["Other"]  # what is frozen belongs to the task
    beside = tasks.TaskConfig(**settings | {"model": f"{tmp_path}/nets.py:Beside"}, prefix="0")
    with pytest.raises(UserError, match="nothing else of the model may take them"):
        tasks.build(beside, seed=0)


def test_features_of_an_example_do_not_depend_on_which_others_come_with_it():
    net = made()
    net.body[1] = nn.BatchNorm1d(8, track_running_stats=False, dtype=torch.float64)
    net.body.requires_grad_(False)
    told = r"by itself, but its batch-norm {} keeps no statistics"
    for prefix, name in ((net.body, "1"), (nn.Sequential(net.body), r"0\.1")):
        with pytest.raises(UserError, match=told.format(name)):
            a_task(net if prefix is net.body else nn.Linear(8, 3).double(), prefix)
    with pytest.raises(UserError, match=told.format("BatchNorm1d")):
        a_task(nn.Linear(6, 3).double(), nn.BatchNorm1d(6, track_running_stats=False).double())


def test_sites_hold_features_themselves():
    config = tasks.TaskConfig(model="mlp", prefix="features")
    frame = Frame(known=2, novel=0, shape=(6,), dtype="torch.float32", classes=3)
    with pytest.raises(UserError, match="prefix must be left out where clients are at sites"):
        tasks.targets_of(config, frame, seed=0)


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_what_is_exported_takes_raw_examples(tmp_path, ending):
    task = a_task(made(), "body")
    run = hyperfed.train("fedavg", task, method=STEPS, **SHORT)
    model, x = run.model("1"), torch.from_numpy(X[:4])
    path = tmp_path / f"model.{ending}"
    hyperfed.export_model(model, task, path)
    expected = model(by_hand(made(), X[:4]))
    if ending == "pt2":
        torch.testing.assert_close(torch.export.load(path).module()(x), expected)
        return
    weights = safetensors.torch.load_file(path)
    assert torch.equal(weights["normalize.1.0.weight"], made().body[0].weight)
    assert path.stat().st_size < 10_000


def test_what_is_exported_normalises_pixels_before_the_beginning(tmp_path):
    pixels = RNG.integers(0, 256, (60, 1, 2, 3), dtype=np.uint8)
    net = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    task = Task.from_arrays(pixels, Y, client=CLIENT, model=net, prefix="0")
    hyperfed.export_model(task.models["base"], task, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(task.x[:4]), task.models["base"](task.features[:4]))
