"""The suite itself: what runs together, and what a method must pass."""

import pytest

from check_method import shared_tests


@pytest.mark.xdist_group("suite")
def test_groups_are_kept_together(request: pytest.FixtureRequest) -> None:
    """Some versions of pytest and pytest-xdist forget them, and everything is made many times."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("NOT TESTED: all tests run in one process, or as they come")
    assert request.node.nodeid.endswith("@suite")


def test_what_a_method_must_pass_is_found_without_collecting_everything(
    request: pytest.FixtureRequest,
) -> None:
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    of_methods = {item.path for item in items if "method" in item.callspec.params}
    assert of_methods <= {*shared_tests()}
