"""What a policy lets novel clients answer: with noise, or where a method has none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.flower.policed import HONEST, MODEL, TASK, asked, site_in
from hyperfed.methods import itpfl, pfedhn
from hyperfed.training import Steps
from hyperfed.trees import Tree, model_of


def test_a_reply_that_depends_on_no_example_needs_none_behind_it(tmp_path: Path) -> None:
    start = {"embedding": torch.zeros(4)}
    here = site_in(tmp_path, pfedhn, pfedhn.Config(), methods=("pfedhn",), smallest_reply=10**6)
    assert asked(here, "draw_embedding", 3, start)["embedding"].shape == (4,)
    told = str(asked(here, "train_model", 3, MODEL, serial=2))
    assert "a reply must be of 1000000 examples at least here" in told


def test_a_site_has_a_budget_whatever_a_run_says(tmp_path: Path) -> None:
    settings = itpfl.Config(epsilon=0.3, budget=1e9, embedding_size=6)
    encoder = _encoder(settings)
    answers = []
    for serial in range(1, 4):
        here = site_in(tmp_path, itpfl, settings, epsilon=0.31, delta=0.01, smallest_reply=5)
        model = {name: leaf + serial * 1e-9 for name, leaf in encoder.items()}
        answers.append(asked(here, "describe", 3, model, serial=serial, run=serial))
    assert [isinstance(answer, dict) for answer in answers] == [True, False, False]
    assert "within epsilon 0.31 at delta 0.01" in str(answers[1])


@pytest.mark.parametrize(
    ("step", "batches"),
    [
        ("describe", None),
        ("describe_batch", Steps(1, 12)),
        ("train_encoder", HONEST),
        ("train_model", HONEST),
        ("encoder_gradient", None),
    ],
)
def test_a_novel_client_says_nothing_without_noise_where_a_method_has_some(
    step: str, batches: Any, tmp_path: Path
) -> None:
    settings = itpfl.Config(embedding_size=6)
    here = site_in(tmp_path, itpfl, settings, smallest_reply=5)
    encoder, embedding = _encoder(settings), {"embedding": torch.zeros(6).double()}
    sent: dict[str, tuple[Tree, ...]] = {
        "describe": (encoder,),
        "describe_batch": (encoder,),
        "train_encoder": (encoder, embedding),
        "train_model": (MODEL,),
        "encoder_gradient": ({"descriptor": embedding["embedding"]},),
    }
    told = asked(here, step, 3, payload=sent[step], batches=batches)
    assert isinstance(told, Exception)
    assert f"a novel client must answer {step} with noise; set epsilon" in str(told)
    if step != "encoder_gradient":  # who trains is asked it first of what it is to go back through
        assert isinstance(asked(here, step, 2, payload=sent[step], batches=batches, serial=2), dict)


@pytest.mark.parametrize("step", ["evaluate", "keep"])
def test_a_novel_client_without_noise_is_counted_and_handed_its_model(
    step: str, tmp_path: Path
) -> None:
    here = site_in(tmp_path, itpfl, itpfl.Config(embedding_size=6), smallest_reply=5)
    assert isinstance(asked(here, step, 3), dict)


def test_a_novel_client_of_a_method_that_has_no_noise_is_served(tmp_path: Path) -> None:
    here = site_in(tmp_path, smallest_reply=5)
    assert isinstance(asked(here, "train_model", 3, batches=Steps(2, 9)), dict)


def _encoder(settings: Any) -> Tree:
    return model_of(itpfl.Client.networks(TASK.outline(), settings)["encoder"])
