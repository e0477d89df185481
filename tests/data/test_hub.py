"""The way to the hub: none is known at once, and what the library shows is ours to show."""

from io import StringIO
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from hyperfed.data import hub


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def library(monkeypatch) -> list[tuple[Any, ...]]:
    """What ``load_dataset`` was asked for: (source, offline, offline, bars are off)."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    asked: list[tuple[Any, ...]] = []

    def load(source: str, config: str | None, cache_dir: str | None) -> str:
        offline = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        asked.append((source, *offline, datasets.are_progress_bars_disabled()))
        if source == "nowhere/to_be_found":
            raise ConnectionError("no way")
        return f"{source} {config} {cache_dir}"

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def answering(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> list[tuple[str, float]]:
    """Lets the hub answer, or not; returns the requests that it will have had."""
    requests: list[tuple[str, float]] = []

    def head(url: str, timeout: float) -> None:
        requests.append((url, timeout))
        if answer is not None:
            raise answer

    session = SimpleNamespace(head=head)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    return requests


def test_a_hub_that_does_not_answer_is_asked_once_and_then_left_alone(library, monkeypatch):
    requests = answering(monkeypatch, OSError("no route"))
    with pytest.raises(ConnectionError):
        hub.load("nowhere/to_be_found", None, None, local=False)
    assert requests == [(constants.ENDPOINT, hub.PATIENCE)]
    assert library == [("nowhere/to_be_found", True, True, True)]
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE
    assert not datasets.are_progress_bars_disabled()


def test_a_hub_that_answers_is_loaded_from_and_a_folder_asks_nobody(library, monkeypatch):
    requests = answering(monkeypatch, None)
    assert hub.load("some/where", "writers", None, local=False) == "some/where writers None"
    assert hub.load("/here", None, "/scratch", local=True) == "/here None /scratch"
    assert len(requests) == 1
    assert library == [("some/where", False, False, True), ("/here", True, True, True)]


def test_the_bar_is_for_terminals_alone(monkeypatch):
    for place in (StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", place)
        with hub.bar("decoding pictures", 4) as advance:
            advance(3)
        assert ("decoding pictures" in place.getvalue()) == place.isatty()
        assert ("3/4" in place.getvalue()) == place.isatty()
