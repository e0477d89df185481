"""What clients have let out, in files of a run's folder: there before it is told to anybody.

A checkpoint has what was let out up to its round. What a trusted server tells between two of them,
and what clients let out when they are served, is in two files beside it. Accounts only grow:
whichever checkpoint a run goes on from, what was told stays told.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import lexists

from hyperfed import trees
from hyperfed.engines import Engine
from hyperfed.runs.folder import RunFolder
from hyperfed.system.files import sync
from hyperfed.system.locks import Lock
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state, save_state

CLIENTS = "novel"
"""How the run's clients are called among newcomers, by a hash of their data each, in one file.

The word is of when the file had no known ones.
"""


@dataclass(frozen=True)
class Accounts:
    """Those of one run.

    Attributes:
        folder: the run's.
        engine: its ``released`` are the accounts of the run's clients.
        newcomers: of each who came later, by the hash of its data: {0: its account}.
    """

    folder: RunFolder
    engine: Engine
    newcomers: dict[str, dict[int, Tree]]

    def told(self) -> None:
        """Writes what clients at sites have paid for what the trusted server is about to tell."""
        save_state(self.folder.released, keyed(self.engine.released), {})
        sync(self.folder.released.parent)

    def read(self) -> None:
        """Takes from the disk what was told beside the checkpoint, or before there was any."""
        if lexists(self.folder.released):
            grow(self.engine.released, load_state(self.folder.released)[0])
        self._read_served()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Has on the disk, at the end of the block, what is let out within.

        Other processes that serve clients of this run wait, and go on from there.
        """
        served = self.folder.served
        with Lock(served.parent, wait=True):
            self._read_served()
            before = self._of_those_served()
            try:
                yield
            finally:
                now = self._of_those_served()
                if trees.structure(now) != trees.structure(before):
                    save_state(served, now, {})
                    sync(served.parent)

    def _of_those_served(self) -> Tree:
        """Returns what the run's clients and newcomers have let out."""
        every = {CLIENTS: self.engine.released} | self.newcomers
        return {who: keyed(held) for who, held in every.items()}

    def _read_served(self) -> None:
        """Takes what other processes have written."""
        kept = load_state(self.folder.served)[0] if lexists(self.folder.served) else {}
        for who, held in kept.items():
            ours = who == CLIENTS
            grow(self.engine.released if ours else self.newcomers.setdefault(who, {}), held)


def grow(ours: dict[int, Tree], written: Mapping[str, Tree]) -> None:
    """Takes into accounts what was written of them where that is more than is known here."""
    for client, theirs in numbered(written).items():
        if len(theirs["multipliers"]) > len(ours.get(client, {}).get("multipliers", ())):
            ours[client] = theirs


def keyed(held: Mapping[int, Tree]) -> Tree:
    """Returns what clients hold, by their number, as a checkpoint has it."""
    return {str(client): tree for client, tree in held.items()}


def numbered(held: Mapping[str, Tree]) -> dict[int, Tree]:
    """Returns what :func:`keyed` was given."""
    return {int(client): tree for client, tree in held.items()}
