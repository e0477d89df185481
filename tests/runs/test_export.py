"""A model out of the library predicts what it predicts inside, from raw examples."""

import json
import runpy
import socket
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import hyperfed
from hyperfed.data.own import Task, from_arrays
from hyperfed.errors import UserError
from hyperfed.nets.targets import build_target
from hyperfed.runs.export import export_model
from toys import make_task

ROOT = Path(__file__).parents[2]


def images(net: Callable[[], nn.Module] | None = None) -> Task:
    """Images whose two channels have means and deviations of their own."""
    rng = np.random.default_rng(0)
    dark, light = rng.integers(0, 60, (12, 5, 5)), rng.integers(90, 256, (12, 5, 5))
    x = np.stack([dark, light], 1).astype(np.uint8)
    made = net or (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 3)))
    return from_arrays(x, rng.integers(3, size=12), client=np.arange(12) % 2, model=made)


def expected(model: nn.Module, task: Task) -> Tensor:
    """What a network says of all images, normalised here by constants of four decimals."""
    x = task.x.double() / 255
    known = x[torch.cat(list(task.train))]
    mean = known.mean((0, 2, 3), keepdim=True)
    std = (known - mean).square().mean((0, 2, 3), keepdim=True).sqrt()
    mean, std = ((constant * 1e4).round() / 1e4 for constant in (mean, std))
    with torch.no_grad():
        output: Tensor = model(((x - mean) / std).float())
    return output


def test_a_program_predicts_though_its_network_was_left_training(tmp_path: Path) -> None:
    task = images(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(50, 3)))
    net = task.models["base"]
    path = tmp_path / "model.pt2"
    export_model(net.train(), task, path)
    program = of_program(path)
    torch.testing.assert_close(program(task.x), expected(net.eval(), task))


def of_program(path: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(path).module()


def of_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    runtime = pytest.importorskip(
        "onnxruntime", reason="NOT TESTED: ONNX, as onnxruntime is not installed"
    )
    session = runtime.InferenceSession(str(path))
    assert json.loads(session.get_modelmeta().custom_metadata_map["hyperfed"])["classes"] == 3
    return lambda x: torch.from_numpy(session.run(["output"], {"x": x.numpy()})[0])


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "read"), [("pt2", of_program), ("onnx", of_onnx)])
@pytest.mark.filterwarnings("ignore")  # of the readers
def test_a_program_takes_raw_images_in_batches_of_any_size(tmp_path, ending, read):
    if ending == "onnx":
        pytest.importorskip("onnxscript", reason="NOT TESTED: ONNX, as it is not installed")
    task, path = images(), tmp_path / f"model.{ending}"
    model = task.models["base"].train()
    export_model(model, task, path)
    predict = read(path)
    for rows in (slice(0, 1), slice(0, 12), slice(3, 6)):
        torch.testing.assert_close(
            predict(task.x[rows]).detach(), expected(model, task)[rows], rtol=1e-4, atol=1e-5
        )
    assert model.training  # a copy was written


def test_weights_come_with_the_constants_of_their_normalisation(tmp_path):
    task, path = images(), tmp_path / "model.safetensors"
    model = task.models["base"]
    export_model(model, task, path)
    tensors = load_file(path)
    x = task.x.float() * tensors.pop("normalize.scale") + tensors.pop("normalize.shift")
    assert {name: value.tolist() for name, value in tensors.items()} == {
        f"model.{name}": value.tolist() for name, value in model.state_dict().items()
    }
    torch.testing.assert_close(model(x), expected(model, task), rtol=1e-4, atol=1e-5)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["hyperfed"])
    assert about["input"] == {
        "name": "x",
        "shape": ["batch", 2, 5, 5],
        "dtype": "uint8",
        "meaning": "pixels from 0 to 255, which the model normalises itself",
    }
    assert about["output"]["meaning"].startswith("logits of the classes, from 0; of fewer")
    assert about["classes"] == 3


@pytest.mark.filterwarnings("ignore")
def test_a_program_has_no_example_of_a_client_in_it(tmp_path):
    task, path = images(), tmp_path / "model.pt2"
    export_model(task.models["base"], task, path)
    (example,), _ = torch.export.load(path).example_inputs
    assert example.dtype == torch.uint8
    assert not example.any()


def test_floats_pass_as_they_are(tmp_path):
    task = make_task()
    export_model(task.models["base"], task, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == {
        f"model.{name}" for name in task.models["base"].state_dict()
    }


@pytest.mark.filterwarnings("ignore")
def test_a_transform_that_is_a_function_is_part_of_a_program_and_no_part_of_weights(tmp_path):
    task = make_task(transform=lambda x: 2 * x - 1)
    model = task.models["base"]
    export_model(model, task, tmp_path / "model.pt2")
    found = of_program(tmp_path / "model.pt2")(task.x[:7])
    torch.testing.assert_close(found, model(2 * task.x[:7] - 1))
    with pytest.raises(UserError, match="whose transform is a function must be exported as a prog"):
        export_model(model, task, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore")
def test_texts_too_in_batches_of_any_size(tmp_path):
    model = build_target("char_lstm", input_shape=(6,), classes=3)
    x = torch.randint(3, (5, 6))
    task = replace(make_task(), x=x, models={"base": model})
    export_model(model, task, tmp_path / "model.pt2")
    torch.testing.assert_close(of_program(tmp_path / "model.pt2")(x), model.eval()(x))


class Choosing(nn.Module):
    """What it computes depends on what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.one(x.flatten(1))
        return output if output.sum().item() > 0 else -output


class ByExample(nn.Module):
    """Goes through the examples of a batch one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(row.flatten()) for row in x])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("net", "told"),
    [
        (ByExample, "onnx, but PyTorch says: it takes 2 examples alone, and no other number;"),
        (Choosing, "onnx, but PyTorch says: Could not guard on data-dependent expression"),
    ],
)
def test_a_program_for_onnx_takes_batches_of_any_size_or_none_is_written(
    net: type[nn.Module], told: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript", reason="NOT TESTED: pip install 'hyperfed[onnx]'")
    task = images(net)
    with pytest.raises(UserError, match=told):
        export_model(task.models["base"], task, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.pt2", "must be traceable for format=torch-export"),
        ("model.bin", "must be one of safetensors, onnx, torch-export"),
        ("model", "came 'model'"),
        ("missing/model.safetensors", "must be writable"),
    ],
)
def test_what_cannot_be_written_is_told(tmp_path, name, told):
    task = images(Choosing)
    with pytest.raises(UserError, match=told):
        export_model(task.models["base"], task, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_onnx_needs_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    pytest.importorskip("onnx", reason="NOT TESTED: what to install, as onnx is not there")
    task = images()
    with pytest.raises(UserError, match=r"not installed \(onnxscript\); pip install 'onnx>="):
        export_model(task.models["base"], task, tmp_path / "model.onnx")


def served(path: Path, rows: Tensor | str, monkeypatch: pytest.MonkeyPatch, **headers: str) -> Any:
    """What the example answers to raw rows, or to what is written, while another is half done."""
    answers: list[Any] = []
    body = (rows if isinstance(rows, str) else json.dumps(rows.tolist())).encode()

    def ask(url: str) -> None:
        try:
            asked = urllib.request.Request(url, data=body, headers=headers)
            with urllib.request.urlopen(asked, timeout=60) as reply:
                answers.append(json.loads(reply.read()))
        except urllib.error.HTTPError as refused:
            answers.append((refused.code, json.loads(refused.read())["error"]))

    def serve_once(server: HTTPServer) -> None:
        asking = Thread(target=ask, args=[f"http://127.0.0.1:{server.server_port}"])
        with socket.create_connection(("127.0.0.1", server.server_port)) as half:
            half.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n[")
            server.handle_request()
            asking.start()
            server.handle_request()
            asking.join()
            half.setblocking(False)
            with pytest.raises(BlockingIOError):  # nobody has waited until it was given up
                half.recv(1)
            half.setblocking(True)
            half.sendall(b"        ")
            assert half.recv(12) == b"HTTP/1.0 400"
        server.server_close()

    monkeypatch.setattr(HTTPServer, "serve_forever", serve_once)
    monkeypatch.setattr(sys, "argv", ["serve.py", str(path), "0"])
    runpy.run_path(str(ROOT / "examples" / "serve.py"))
    (answer,) = answers
    return answer


@pytest.mark.filterwarnings("ignore")
def test_the_example_serves_what_was_exported(tmp_path, monkeypatch):
    task, path = images(), tmp_path / "model.pt2"
    hyperfed.export_model(task.models["base"], task, path)
    found = expected(task.models["base"], task).argmax(1).tolist()
    assert served(path, task.x, monkeypatch) == found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('"x"', "invalid data type"),
        ("[]", "must have shape (examples, 2, 5, 5), came (0,)"),
        ("[[1, 2]]", "must have shape (examples, 2, 5, 5), came (1, 2)"),
        (json.dumps([[[[0.5] * 5] * 5] * 2]), "must be whole, as torch.uint8 has them"),
        (json.dumps([[[[-1] * 5] * 5] * 2]), "must be whole, as torch.uint8 has them"),
        (json.dumps([[[[256] * 5] * 5] * 2]), "must be whole, as torch.uint8 has them"),
    ],
)
def test_the_example_says_what_is_wrong_with_a_request(body, told, tmp_path, monkeypatch):
    task, path = images(), tmp_path / "model.pt2"
    hyperfed.export_model(task.models["base"], task, path)
    status, error = served(path, body, monkeypatch)
    assert (status, told in error) == (400, True), error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", ["[[NaN, 1]]", "[[1, -Infinity]]", "[[1e39, 0]]"])
def test_the_example_refuses_numbers_that_are_not_finite(body, tmp_path, monkeypatch):
    x, client = np.random.default_rng(0).normal(size=(12, 2)), np.arange(12) % 2
    net, path = nn.Linear(2, 2), tmp_path / "model.pt2"
    task = from_arrays(x, np.arange(12) // 2 % 2, client=client, model=lambda: net)
    hyperfed.export_model(net, task, path)
    told = (400, "numbers must be finite as torch.float32, came others")
    assert served(path, body, monkeypatch) == told
    status, error = served(path, "", monkeypatch, **{"Content-Length": "x"})
    assert (status, "invalid literal" in error) == (400, True)


@pytest.mark.filterwarnings("ignore")
def test_the_example_calls_labels_as_the_task_does_and_leaves_numbers(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, client, path = rng.normal(size=(12, 4)), np.arange(12) % 2, tmp_path / "model.pt2"
    net = nn.Linear(4, 5)  # with more outputs than there are classes
    words = from_arrays(x, np.array(["fall", "sit", "walk"] * 4), client=client, model=lambda: net)
    hyperfed.export_model(net, words, path)
    numbers = net(words.x)[:, :3].argmax(1).tolist()
    assert served(path, words.x, monkeypatch) == [words.labels[number] for number in numbers]

    one = nn.Linear(4, 1)
    values = from_arrays(x, rng.normal(size=12), client=client, model=lambda: one)
    hyperfed.export_model(one, values, path)
    torch.testing.assert_close(
        torch.tensor(served(path, values.x, monkeypatch)), one(values.x).detach()
    )


@pytest.mark.filterwarnings("ignore")
def test_the_example_labels_every_token_and_no_output_that_is_no_class(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, client, path = rng.integers(5, size=(12, 4)), np.arange(12) % 2, tmp_path / "model.pt2"
    y, net = x % 3, nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3))
    tagged = from_arrays(x, y, client=client, model=lambda: net, labels=["a", "b", "c"])
    hyperfed.export_model(net, tagged, path)
    numbers = net(tagged.x).argmax(-1).tolist()
    called = [[tagged.labels[number] for number in row] for row in numbers]
    assert served(path, tagged.x, monkeypatch) == called

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output[:, 0], y.float())

    def score(output: Tensor, y: Tensor) -> Tensor:
        return ((output[:, 0] > 0) == y).float()

    one, of_two = nn.Linear(4, 1), np.arange(12) // 2 % 2
    own = {"model": lambda: one, "loss": loss, "score": score}
    signs = from_arrays(rng.normal(size=(12, 4)), of_two, client=client, **own)
    hyperfed.export_model(one, signs, path)
    torch.testing.assert_close(
        torch.tensor(served(path, signs.x, monkeypatch)), one(signs.x).detach()
    )


def test_format_and_ending_say_the_same_or_one_of_them_does(tmp_path: Path) -> None:
    task = images()
    with pytest.raises(UserError, match=r"onnx and 'a.pt2'; call the file a.onnx, or choose torch"):
        export_model(task.models["base"], task, tmp_path / "a.pt2", "onnx")
    export_model(task.models["base"], task, tmp_path / "weights", "safetensors")
    assert load_file(tmp_path / "weights")
