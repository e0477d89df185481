"""What the clients of a site have let out with noise, of all runs, on the site's own disk.

Nothing that a server can say changes it: neither a new run or session, nor a message that names no
memory, or an old one. What was let out is on the disk before it leaves.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from os.path import lexists
from pathlib import Path

from hyperfed.engines.flower.store import file_name, make_private
from hyperfed.system.files import refused, sync
from hyperfed.system.locks import alone
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state, save_state


class KeptReleases:
    """One file for each client, ``<state>/released/_<client>.safetensors``.

    Args:
        state: folder of the site's state; made where it does not exist.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state / "released"
        try:
            make_private(self._folder)
        except OSError as error:
            raise refused(self._folder, error) from error

    def alone(self) -> AbstractContextManager[None]:
        """Waits until no other process answers with noise, and keeps others waiting."""
        return alone(self._folder)

    def read(self, client: str) -> Tree:
        """Returns what a client has let out; {} where that is nothing.

        Raises:
            UserError: its file is damaged. Nothing may be let out then.
        """
        path = self._path(client)
        return load_state(path)[0] if lexists(path) else {}  # a link to what is gone says more

    def multipliers(self, client: str) -> Mapping[float, int]:
        """Returns {noise multiplier: how many answers a client has let out with it}."""
        released = self.read(client)
        return Counter(map(float, released["multipliers"])) if released else {}

    def write(self, client: str, released: Tree) -> None:
        """Keeps what a client has let out, whatever becomes of the machine from here on.

        Raises:
            UserError: the disk refuses. What was to be let out must not leave then.
        """
        path = self._path(client)
        save_state(path, released, {"client": client})
        sync(self._folder)  # the file's name, beside its content

    def _path(self, client: str) -> Path:
        return self._folder / f"{file_name(client)}.safetensors"
