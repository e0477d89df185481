"""Where the clients are: the nodes of a federation, and what they say of themselves."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from hyperfed.data.roster import Introduction
from hyperfed.errors import UserError

HELLO, STEP = "query.hello", "train.step"
"""Types of the messages: who are you, and run these calls."""

POLL = 0.5
"""Seconds between two looks for sites."""

_INTRODUCTION = TypeAdapter(Introduction)


def pause(waited: float) -> float:
    """Returns the seconds until the next look for something that one has waited for so long.

    A tenth of those waited: nothing takes more than a tenth longer for it, and a site that waits
    for minutes does not keep the server busy. At least 0.1, at most 3.
    """
    return min(max(waited / 10, 0.1), 3.0)


class Link(Protocol):
    """The way to the sites."""

    def nodes(self) -> list[int]:
        """Returns the nodes that are connected."""

    def exchange(
        self, kind: str, contents: Mapping[int, bytes], timeout: float
    ) -> dict[int, bytes | Exception]:
        """Sends each node a message and waits for the replies.

        Args:
            kind: type of the message.
            contents: node -> what it is sent.
            timeout: seconds to wait.

        Returns:
            Node -> reply, or why there is none.
        """


class Sites:
    """Which client is at which node. A node is asked once, when it connects.

    Args:
        link: the way to the nodes.
        timeout: seconds that one has to introduce itself.
    """

    def __init__(self, link: Link, timeout: float) -> None:
        self._link, self._timeout = link, timeout
        self._known: dict[int, Introduction] = {}

    def introduced(self) -> dict[int, Introduction]:
        """Returns what the connected nodes have said of themselves, {node: introduction}."""
        there = self._link.nodes()
        self._known = {node: said for node, said in self._known.items() if node in there}
        strangers = {node: b"" for node in there if node not in self._known}
        if strangers:
            answers = self._link.exchange(HELLO, strangers, self._timeout)
            self._known |= {
                node: said
                for node, content in answers.items()
                if isinstance(content, bytes) and (said := _introduction(content)) is not None
            }
        return self._known

    def gather(self, count: int) -> list[Introduction]:
        """Waits until so many nodes have introduced themselves.

        Raises:
            UserError: they have not come in time.
        """
        end = time.monotonic() + self._timeout
        while len(found := self.introduced()) < count:
            if time.monotonic() > end:
                raise UserError(
                    f"engine.sites={count} sites must introduce themselves within "
                    f"{self._timeout:g} s, but {len(found)} did; start the others, see their logs, "
                    "or raise engine.timeout"
                )
            time.sleep(POLL)
        return [found[node] for node in sorted(found)]

    def find(self, names: Sequence[str]) -> dict[str, int]:
        """Returns {name: node} of those clients that are connected; waits until one of them is."""
        end = time.monotonic() + self._timeout
        while True:
            here = {
                member.name: node
                for node, said in self.introduced().items()
                for member in said.members
            }
            found = {name: here[name] for name in names if name in here}
            if found or time.monotonic() > end:
                return found
            time.sleep(POLL)

    def forget(self, node: int) -> None:
        """Has a node introduce itself again: what it answers is not what it said."""
        self._known.pop(node, None)


def _introduction(content: bytes) -> Introduction | None:
    try:
        return _INTRODUCTION.validate_json(content)
    except ValidationError:
        return None
