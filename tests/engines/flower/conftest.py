"""What tests of messages of Flower's have in common."""

import pytest


@pytest.fixture
def inside_a_flower_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made only where Flower has said who we are."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(identity, name, value)
