"""What the clients of a site remember, on the site's own disk.

``<folder>/<run>/<client>/<session>-<cohort>.safetensors`` is what a client remembers after its
latest call in a cohort: its memory, its scratch, what it must know to mask, and its last reply, in
one file that is written whole or not at all. While the cohort is open it is a draft. It becomes a
version of the client's memory when the server names it as what a later cohort begins with, so
nothing has to be committed at the site: a message that is lost, late or repeated cannot commit too
much or too little. Beside these files ``data`` says by a hash which examples the client has.
"""

import json
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from os.path import lexists
from pathlib import Path
from shutil import rmtree
from typing import Any
from urllib.parse import quote

from hyperfed.data.site import READING
from hyperfed.engines.flower.diary import LOG
from hyperfed.engines.flower.policy import RefusedError
from hyperfed.engines.flower.wire import Version
from hyperfed.system.files import (
    PRIVATE,
    atomic_write,
    check_files,
    check_writable,
    refused,
    remove_unfinished,
    sync,
)
from hyperfed.system.locks import alone
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state, save_state

_SUFFIX = ".safetensors"

MODELS = "models"
"""The folder of a site's state with the models of its clients, one folder for each run."""

LONGEST_FILE_NAME = 200
"""Letters; most file systems take 255 bytes, with what we put before and after."""


class LostMemoryError(Exception):
    """The site does not have the memory that a client is to begin with."""


class SupersededError(Exception):
    """The message is older than one that the site has had."""


@dataclass(frozen=True)
class Draft:
    """What a client remembers after a call.

    Attributes:
        serial: of the message that held the call.
        memory: what is to survive rounds.
        scratch: what is to survive the messages of this cohort.
        reply: what it replied.
        masks: between the exchanges of a masked sum, what it must know for the next
            (:mod:`hyperfed.engines.flower.pairwise`).
        remembers: whether the server is to name it later, also where memory is empty
            (:class:`hyperfed.engines.calls.Answer`).
    """

    serial: int
    memory: Tree
    scratch: Tree
    reply: Tree
    masks: Tree = field(default_factory=dict)
    remembers: bool = False


class Store:
    """The memories of one run at one site.

    Args:
        folder: of the site's state; made where it does not exist.
        run: number of the run.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, folder: Path, run: int) -> None:
        self._folder = folder / f"run-{run}"
        try:
            make_private(folder)
            self._folder.mkdir(mode=PRIVATE, exist_ok=True)
        except OSError as error:
            raise refused(self._folder, error) from error

    def alone(self) -> AbstractContextManager[None]:
        """Waits until no other process works with these memories, and keeps others waiting.

        Flower starts a process for each message, and a late one may meet its successor.
        """
        return alone(self._folder)

    def receive(self, session: int, serial: int) -> None:
        """Notes that a message has come.

        Raises:
            SupersededError: a later one came before. Its answer is not wanted any more, and what
                it says may be dropped is not what the server knows now.
        """
        path = self._folder / "latest.json"
        latest = json.loads(path.read_text(encoding="utf-8")) if lexists(path) else [0, 0]
        if [session, serial] < latest:
            raise SupersededError(
                f"message {serial} of session {session} came after message {latest[1]} of session "
                f"{latest[0]}; if the server's clock went back, set it right and start again"
            )
        atomic_write(path, json.dumps([session, serial]).encode())

    def keep_to(self, method: str, targets: Any, settings: Mapping[str, Any]) -> None:
        """Has a run be of one method, its targets and its settings for as long as it lasts.

        What clients keep to themselves by one method is what those of another reply with.

        Args:
            method: its name.
            targets: what the clients' networks are made of; plain data.
            settings: of the method. Of those that another version of hyperfed lacks nothing is
                said.

        Raises:
            RefusedError: it began with others.
        """
        path, run = self._folder / "settings.json", {"method": method, "targets": targets}
        now = json.loads(json.dumps({"run": run, "settings": dict(settings)}, default=str))
        if not lexists(path):
            atomic_write(path, json.dumps(now).encode())
            return
        known = json.loads(path.read_text(encoding="utf-8"))
        for kind, values in now.items():
            common = values.keys() & known[kind].keys()
            if changed := [name for name in sorted(common) if values[name] != known[kind][name]]:
                raise RefusedError(
                    f"a run must go on with the {changed[0]} that it began with at this site; "
                    "start a new run"
                )

    def keep_to_data(self, client: str, digest: str) -> None:
        """Has a client have the same examples in a run for as long as that lasts.

        Of others it could train on what it is tested on, and its server counts with their number.

        Args:
            client: its name.
            digest: a hash of them, and of what each is for.

        Raises:
            RefusedError: it began with others.
            UserError: the disk refuses.
        """
        path = self._folder / file_name(client) / "data"
        if lexists(path):
            if path.read_text(encoding="utf-8") != digest:
                raise RefusedError(
                    f"client {client} must go on with the examples that it began this run with, in "
                    "their order, but has others; put those back, or start a new run"
                )
            return
        path.parent.mkdir(mode=PRIVATE, exist_ok=True)
        atomic_write(path, digest.encode())

    def draft(self, client: str, version: Version) -> Draft | None:
        """Returns what a client remembers after its latest call in a cohort, if it had any."""
        path = self._path(client, version)
        if not path.exists():
            return None
        tree, meta = load_state(path)
        memory, scratch, reply = tree["memory"], tree["scratch"], tree["reply"]
        return Draft(meta["serial"], memory, scratch, reply, tree["masks"], meta["remembers"])

    def memory(self, client: str, version: Version | None) -> Tree:
        """Returns the memory that a client is to begin a cohort with; empty where it has none.

        Raises:
            LostMemoryError: the site does not have it.
        """
        if version is None:
            return {}
        draft = self.draft(client, version)
        if draft is None:
            raise LostMemoryError(
                f"the memory {version[0]}-{version[1]} of client {client} must be in "
                f"{self._folder}, but is not; restore the folder from a copy"
            )
        return draft.memory

    def write(self, client: str, version: Version, draft: Draft, *, lasting: bool = False) -> None:
        """Keeps what a client remembers after a call, in place of what it did before.

        Args:
            client: its name.
            version: of its memory.
            draft: what it remembers.
            lasting: what it did before must not come back, even if the machine dies now.

        Raises:
            UserError: the disk refuses.
        """
        path = self._path(client, version)
        path.parent.mkdir(mode=PRIVATE, exist_ok=True)
        tree = {"memory": draft.memory, "scratch": draft.scratch, "reply": draft.reply}
        tree["masks"] = draft.masks
        save_state(path, tree, {"serial": draft.serial, "remembers": draft.remembers})
        if lasting:
            sync(path.parent)

    def prune(self, client: str, needed: Collection[Version]) -> None:
        """Drops all that a client remembers but some versions and drafts."""
        folder = self._folder / file_name(client)
        remove_unfinished(folder)
        kept = {self._path(client, version) for version in needed}
        for path in {*folder.glob(f"*{_SUFFIX}")} - kept:
            path.unlink(missing_ok=True)

    def _path(self, client: str, version: Version) -> Path:
        session, cohort = version
        return self._folder / file_name(client) / f"{session}-{cohort}{_SUFFIX}"


def file_name(client: str) -> str:
    """Returns how a file or folder of a client is called: by its name, whatever letters it has.

    A name that comes out too long for a file system ends in its hash; no other has a "+".
    """
    name = quote(client, safe="")
    if len(name) > LONGEST_FILE_NAME:
        digest = blake2b(client.encode(), digest_size=16).hexdigest()
        name = f"{name[: LONGEST_FILE_NAME // 2]}+{digest}"
    return f"_{name}"


def place_of_model(folder: Path, run: int, client: str) -> Path:
    """Returns where a client's model is kept for its owner, in a folder that is made.

    Args:
        folder: of the site's state.
        run: its number.
        client: its name.
    """
    place = folder / MODELS / f"run-{run}"
    for each in (place.parent, place):
        make_private(each)
    return place / f"{file_name(client)}{_SUFFIX}"


def models_kept(folder: Path) -> dict[str, int]:
    """Returns of how many clients a site has the model, {run: number}."""
    runs = sorted((folder / MODELS).glob("run-*"))
    return {run.name: len([*run.glob(f"*{_SUFFIX}")]) for run in runs}


def make_private(folder: Path) -> None:
    """Makes a folder that nobody else may look into, or of one that is there such a one."""
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(PRIVATE)


def clean(folder: Path) -> None:
    """Removes what killed processes were about to put in place, in all of a site's state, or read.

    Args:
        folder: the state, which no process works with.

    Raises:
        UserError: the system refuses.
    """
    for place in (
        folder,
        *folder.glob("released"),
        *folder.glob("run-*"),
        *folder.glob("run-*/_*"),
        *folder.glob(f"{MODELS}/run-*"),
    ):
        remove_unfinished(place)
    for place in folder.glob(f"{READING}*"):
        try:
            rmtree(place)
        except OSError as error:
            raise refused(place, error) from error


def check_state(folder: Path) -> None:
    """Finds out whether a site's state can be kept in a folder, which is made, with an empty log.

    Raises:
        UserError: it cannot.
    """
    for place in (folder, folder / "released"):
        check_files(place)
    try:
        make_private(folder)
        check_writable(folder)
        os.close(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        raise refused(folder, error) from error
