"""What clients remember, for an engine whose clients' memories are in this process."""

from collections.abc import Collection
from dataclasses import replace

import torch

from hyperfed.engines.calls import Answer, Call
from hyperfed.system.devices import CPU
from hyperfed.trees import Tree
from hyperfed.trees.packing import moved


class Memories:
    """Memories of clients, and the drafts of cohorts that are not committed.

    Args:
        device: where the clients compute. Drafts are there; of all other clients nothing is.

    Attributes:
        kept: {client: memory} as of the latest commit, on the CPU.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.kept: dict[int, Tree] = {}
        self._device = device
        self._drafts: dict[int, dict[int, Answer]] = {}

    def of(self, call: Call) -> tuple[Tree, Tree]:
        """Returns memory and scratch with which a call begins."""
        draft = self._drafts.get(call.cohort, {}).get(call.client)
        if draft is not None:
            return draft.memory, draft.scratch
        kept = self.kept.get(call.client, {})
        if not kept or self._device == CPU:
            return kept, {}
        self.note(call, Answer({}, kept, {}))  # moved once, however often it is read
        return self.of(call)

    def note(self, call: Call, answer: Answer) -> None:
        """Keeps what a call's client wrote as a draft of its cohort."""
        remembers = answer.remembers or self.remembers(call)
        if self._device != CPU:
            memory = moved(answer.memory, self._device)
            answer = Answer({}, memory, moved(answer.scratch, self._device))
        drafts = self._drafts.setdefault(call.cohort, {})
        drafts[call.client] = replace(answer, tree={}, remembers=remembers)

    def remembers(self, call: Call) -> bool:
        """Returns whether any answer of a call's client in its cohort says that it remembers."""
        draft = self._drafts.get(call.cohort, {}).get(call.client)
        return draft is not None and draft.remembers

    def keep(self, cohort: int, clients: Collection[int]) -> None:
        """Commits the drafts of some clients of a cohort."""
        for client, draft in self._drafts.get(cohort, {}).items():
            if client in clients:
                self.kept[client] = moved(draft.memory, CPU)

    def forget(self, cohort: int) -> None:
        """Drops the drafts of a cohort."""
        self._drafts.pop(cohort, None)
