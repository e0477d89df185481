"""PyTorch's global generators as a function of what is drawn for."""

from typing import Any

import pytest
import torch

from hyperfed.system.randomness import derive, seeded


def test_draws_are_those_of_the_derived_seed_and_leave_no_trace() -> None:
    before = torch.get_rng_state()
    with seeded(3, "net", 1):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(derive(3, "net", 1))
        assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize(("kind", "all_are"), [(None, False), ("cuda", True), ("mps", True)])
def test_an_accelerator_is_seeded_too_though_it_may_be_asleep(
    kind: str | None, all_are: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    seeds: list[Any] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    with seeded(3, "net"):
        pass
    assert seeds == [derive(3, "net")] * all_are
