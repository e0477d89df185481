"""``hyperfed personalize``: the model of a client never seen, from its examples."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from apps.cli.checks import SMALL, Outcome, failure
from hyperfed.runs.run import Run
from own_data import pictures

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


@pytest.fixture(scope="module")
def client_data(trained) -> dict[str, np.ndarray]:
    """Raw examples of the task's novel client."""
    task = Run.open(trained).task
    index = task.train[task.novel_ids[0]]
    return {"x": task.x[index].numpy(), "y": task.y[index].numpy()}


class TestPersonalize:
    @pytest.fixture
    def ask_for_a_model(self, cli, trained, tmp_path) -> Callable[..., Outcome]:
        """Asks for a model with the data that a function writes; checks that there is none."""

        def ask(write: Callable[[Path], None]) -> Outcome:
            data, out = tmp_path / "mine.npz", tmp_path / "model.safetensors"
            write(data)
            outcome: Outcome = cli("personalize", trained, "--data", data, "--out", out)
            assert not out.exists()
            return outcome

        return ask

    @pytest.mark.parametrize("method", ["pfedhn", "fedavg"])
    def test_writes_the_model_of_a_client_never_seen(self, cli, tmp_path, client_data, method):
        folder = cli("run", method, *SMALL, "--out", tmp_path, "--quiet").out.rstrip("\n")
        data, out = tmp_path / "mine.npz", tmp_path / "model.safetensors"
        np.savez(data, **client_data)
        outcome = cli("personalize", folder, "--data", data, "--out", out)
        assert outcome == (0, f"{out}\n", "")
        expected = Run.open(Path(folder)).personalize(**client_data).state_dict()
        written = safetensors.torch.load_file(out)
        weights = {f"model.{name}": value for name, value in expected.items()}
        assert written.keys() == {*weights, "normalize.scale", "normalize.shift"}
        assert all(torch.equal(written[name], weights[name]) for name in weights)

    def test_takes_the_target_that_was_asked_for(self, cli, tmp_path):
        data, own = tmp_path / "mine.npz", tmp_path / "all.npz"
        images, labels = np.zeros((80, 1, 16, 16), dtype=np.uint8), np.arange(80) % 4
        np.savez(own, x=images, y=labels, client=np.arange(80) // 10)
        np.savez(data, x=images[:10], y=labels[:10])
        options = (f"task={own}", "task.model=lenet", "task.widths=[4,8]", "method.local_steps=1")
        run = ("run", "fedavg", *options, "rounds=1", "--out", tmp_path / "runs", "--quiet")
        folder = cli(*run).out.rstrip("\n")
        for size, width in (("width4", 4), ("width8", 8)):
            out = tmp_path / f"{size}.safetensors"
            asked = ("personalize", folder, "--data", data, "--size", size, "--out", out)
            assert cli(*asked).code == 0
            assert len(safetensors.torch.load_file(out)["model.conv1.weight"]) == width

    def test_needs_no_labels_where_the_method_does_not(self, cli, tmp_path, client_data):
        folder = cli("run", "fedavg", *SMALL, "--out", tmp_path, "--quiet").out.rstrip("\n")
        data, out = tmp_path / "mine.npz", tmp_path / "model.safetensors"
        np.savez(data, x=client_data["x"])
        outcome = cli("personalize", folder, "--data", data, "--out", out, "--json")
        assert json.loads(outcome.out) == {
            "model": str(out),
            "examples": len(client_data["x"]),
            "labelled": False,
        }
        assert outcome.err == f"{data} has no y, so its client was taken for one without labels\n"
        assert out.exists()

    @pytest.mark.parametrize(("place", "labelled"), [("ann", True), ("ann/dog", False)])
    def test_takes_a_folder_of_images(self, cli, tmp_path, place, labelled):
        options = (f"task={pictures(tmp_path / 'all')}", "task.novel=0", "method.local_steps=1")
        run = ("run", "fedavg", *options, "rounds=1", "--out", tmp_path / "runs", "--quiet")
        folder, data = cli(*run).out.rstrip("\n"), Path(pictures(tmp_path / "new")) / place
        out = tmp_path / "model.safetensors"
        outcome = cli("personalize", folder, "--data", data, "--out", out, "--json")
        told = {"model": str(out), "examples": 8 if labelled else 4, "labelled": labelled}
        assert json.loads(outcome.out) == told
        without = f"{data} has no label, so its client was taken for one without labels\n"
        assert outcome.err == ("" if labelled else without)
        found = [np.asarray(Image.open(file)) for file in sorted(data.rglob("*.png"))]
        x, y = np.stack(found)[:, None], ["cat"] * 4 + ["dog"] * 4 if labelled else None
        expected = Run.open(Path(folder)).personalize(x, y).state_dict()
        written = safetensors.torch.load_file(out)
        assert all(torch.equal(written[f"model.{name}"], v) for name, v in expected.items())

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda x, y: {"x": x, "y": y + 5}, "labels must lie in 0..9"),
            (lambda x, y: {"x": np.full(x.shape, np.nan), "y": y}, "finite"),
            (lambda x, y: {"x": x[..., :-1], "y": y}, "x must hold examples like the task's"),
            (lambda x, y: {"x": x, "y": y[:-1]}, "same number of rows"),
            (lambda x, y: {"x": x}, "labels"),
            (
                lambda x, y: {"images": x, "y": y},
                "are images, y:\n- features must be some of them, got 'x'",
            ),
        ],
        ids=["labels out of range", "NaN", "wrong shape", "lengths", "unlabelled", "no x"],
    )
    def test_refuses_data_that_do_not_fit(self, ask_for_a_model, client_data, change, told):
        def write(data: Path) -> None:
            np.savez(data, **change(**client_data))

        assert told in failure(ask_for_a_model(write))

    @pytest.mark.parametrize("content", [None, b"not an archive", b"PK\x03\x04 cut short"])
    def test_refuses_what_is_no_archive(self, ask_for_a_model, content):
        def write(data: Path) -> None:
            if content is not None:
                data.write_bytes(content)

        assert "mine.npz" in failure(ask_for_a_model(write))

    def test_refuses_a_file_of_no_format_before_anything_is_made(self, cli, trained):
        told = failure(cli("personalize", trained, "--data", "mine.npz", "--out", "model.bin"))
        assert "the file end in one of .safetensors, .onnx, .pt2; came 'model.bin'" in told

    def test_refuses_a_file_that_cannot_be_written(self, cli, trained, tmp_path, client_data):
        data, out = tmp_path / "mine.npz", tmp_path / "missing" / "model.safetensors"
        np.savez(data, **client_data)
        assert "writable" in failure(cli("personalize", trained, "--data", data, "--out", out))
