"""Who works alone with a folder tidies up what others have left, and nothing they are at."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from hyperfed.system.locks import alone


def test_what_another_process_is_about_to_put_in_place_is_left_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, flock = Event(), fcntl.flock
    unfinished = tmp_path / ".answers.aa.tmp"

    def noted(file: int, how: int) -> None:
        asked.set()
        flock(file, how)

    def enter() -> bool:
        with alone(tmp_path):
            return unfinished.exists()

    with ThreadPoolExecutor(1) as pool:
        with alone(tmp_path):
            unfinished.touch()
            monkeypatch.setattr(fcntl, "flock", noted)
            waiting = pool.submit(enter)
            assert asked.wait(60)
            assert unfinished.exists()
        assert not waiting.result(60)
