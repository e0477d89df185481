"""The suite itself: tests that share what is dear to make run in one process."""

import pytest


@pytest.mark.xdist_group("suite")
def test_groups_are_kept_together(request: pytest.FixtureRequest) -> None:
    """Some versions of pytest and pytest-xdist forget them, and everything is made many times."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("NOT TESTED: all tests run in one process, or as they come")
    assert request.node.nodeid.endswith("@suite")
