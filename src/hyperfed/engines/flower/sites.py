"""Where the clients are: the nodes of a federation, and what they say of themselves."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hyperfed.data.roster import Introduction
from hyperfed.engines.flower.wire import MOST_INTRODUCED, WireError, read_introduction
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError, one_line

log = logging.getLogger(__name__)

HELLO, STEP = "query.hello", "train.step"
"""Types of the messages: who are you, and run these calls."""

POLL = 0.5
"""Seconds between two looks for sites."""

MOST_TOLD = 3
"""Of those that do not count, named in an error."""

LONGEST_PAUSE, LARGEST_SHARE = 600.0, 1 / 20
"""Seconds until a node that does not say who it is is asked again, at most, since it may have been
mended. But where that keeps the others waiting, it may cost them so much of their time alone."""


def pause(waited: float) -> float:
    """Returns the seconds until the next look for something that one has waited for so long.

    A tenth of those waited: nothing takes more than a tenth longer for it, and a site that waits
    for minutes does not keep the server busy. At least 0.1, at most 3.
    """
    return min(max(waited / 10, 0.1), 3.0)


class Link(Protocol):
    """The way to the sites."""

    def nodes(self) -> Mapping[int, str]:
        """Returns the nodes that are connected, those that were registered first in front.

        Returns:
            Node -> fingerprint of the key that it has proven to have; empty where nodes have none.
        """

    def exchange(
        self,
        kind: str,
        contents: Mapping[int, bytes],
        timeout: float,
        most: Mapping[int, int],
    ) -> dict[int, bytes | Exception]:
        """Sends each node a message and waits for the replies.

        Args:
            kind: type of the message.
            contents: node -> what it is sent.
            timeout: seconds to wait.
            most: node -> bytes that are taken of its reply; absent where nobody can tell.

        Returns:
            Node -> reply, or why there is none.
        """


@dataclass(frozen=True)
class _Silent:
    """A node that did not say who it is.

    Attributes:
        why: what became of it.
        pause: seconds that it is not asked for.
        until: when they are over.
    """

    why: str
    pause: float
    until: float


class Sites:
    """Which client is at which node. A node is asked once, when it is needed.

    A client's name belongs to the key of the node that introduced it first. What another node says
    of it is refused, and told in the log.

    Args:
        link: the way to the nodes.
        timeout: seconds that one has to introduce itself.
        keys: whose name is whose already, {name: key}.
        names: of the clients of a run that has begun; all that come before it.

    Attributes:
        keys: the same, with what was introduced since. Empty keys own nothing.
        refused: {name: why what a node said of it does not count}.
    """

    def __init__(
        self,
        link: Link,
        timeout: float,
        keys: Mapping[str, str] | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self._link, self._timeout, self._names = link, timeout, names
        self._known: dict[int, Introduction] = {}
        self._silent: dict[int, _Silent] = {}
        self._there: Mapping[int, str] = {}
        self.keys: dict[str, str] = dict(keys or {})
        self.refused: dict[str, str] = {}

    @property
    def connected(self) -> frozenset[int]:
        """The nodes that were there when somebody looked last."""
        return frozenset(self._there)

    def known(self) -> dict[int, Introduction]:
        """Returns what the connected nodes have said of themselves, {node: introduction}."""
        self._there = there = self._link.nodes()
        self._known = {node: said for node, said in self._known.items() if node in there}
        # One that was away may have been mended.
        self._silent = {node: it for node, it in self._silent.items() if node in there}
        return self._known

    def introduced(self) -> dict[int, Introduction]:
        """Returns the same of all that are connected: those that have said nothing are asked."""
        known, there, begin = self.known(), self._there, time.monotonic()
        silent = {node for node, it in self._silent.items() if it.until > begin}
        strangers = [node for node in there if node not in known and node not in silent]
        if not strangers:
            return known
        most = dict.fromkeys(strangers, MOST_INTRODUCED)
        answers = self._link.exchange(HELLO, dict.fromkeys(strangers, b""), self._timeout, most)
        waited = time.monotonic() - begin
        for node in strangers:
            try:
                said = _introduction(answers.get(node))
            except (NoAnswerError, WireError) as error:
                # Each time it takes twice as long, so that nobody can keep the others waiting.
                before = self._silent[node].pause if node in self._silent else 0.0
                wait = min(max(waited, 2 * before), max(LONGEST_PAUSE, waited / LARGEST_SHARE))
                why = one_line(f"not asked: {error}")
                self._silent[node] = _Silent(why, wait, time.monotonic() + wait)
                log.warning("node %d is %s", node, why)
            else:
                self._silent.pop(node, None)
                known[node] = self._own(node, there[node], said)
        return known

    def gather(self, count: int, besides: Collection[str] = ()) -> list[Introduction]:
        """Waits until so many nodes with clients have introduced themselves.

        Args:
            count: of nodes.
            besides: names of clients that make no node one of them.

        Raises:
            UserError: they have not come in time.
        """
        end = time.monotonic() + self._timeout
        while True:
            # Before the look, which one silent node can have last until the end: who came
            # meanwhile is there.
            late = time.monotonic() > end
            if len(found := _with_others(self.introduced().values(), besides)) >= count:
                return found
            if late:
                whose = " with clients that have no model of the run yet" if besides else ""
                raise UserError(
                    f"engine.sites={count} sites{whose} must introduce themselves within "
                    f"{self._timeout:g} s, but {len(found)} did; start the others, see their logs "
                    f"and this one, or raise engine.timeout{self._without()}"
                )
            time.sleep(POLL)

    def find(self, names: Sequence[str]) -> dict[str, int]:
        """Returns {name: node} of those clients that are connected; waits until one of them is.

        Nobody else is asked who it is while all of them are there.
        """
        end, wanted = time.monotonic() + self._timeout, set(names)
        found = _places(self.known(), wanted)
        while len(found) < len(wanted):
            late = time.monotonic() > end  # before the look, as in gather
            found = _places(self.introduced(), wanted)
            if found or late:
                break
            time.sleep(POLL)
        return found

    def left_out(self) -> list[str]:
        """Returns who is there and does not count, and why."""
        nodes = (f"node {node}, which is {it.why}" for node, it in self._silent.items())
        # Of another key: the client itself may well be there.
        return [*(f"a second client {name}: {why}" for name, why in self.refused.items()), *nodes]

    def _without(self) -> str:
        some = self.left_out()
        more = [f"{len(some) - MOST_TOLD} more"] if len(some) > MOST_TOLD else []
        return "".join(f"\n- not counted: {who}" for who in [*some[:MOST_TOLD], *more])

    def why_not(self, name: str) -> str:
        """Returns why a client that was not found is not asked."""
        if name in self.refused:
            return self.refused[name]
        owner = self.keys.get(name)
        for node in (node for node, key in self._there.items() if key and key == owner):
            if node in self._silent:
                return f"its site is {self._silent[node].why}"
            if node in self._known:
                return "its site does not name it any more"
        return "its site is not connected"

    def forget(self, node: int) -> None:
        """Has a node introduce itself again: what it answers is not what it said."""
        self._known.pop(node, None)

    def _own(self, node: int, key: str, said: Introduction) -> Introduction:
        """Returns what of an introduction is the node's to say, which then is its own."""
        own = []
        for member in said.members:
            # A site may say others whenever it is asked, and nobody keeps all of them.
            if self._names is not None and member.name not in self._names:
                continue
            owner = self.keys.setdefault(member.name, key)
            if owner and owner != key:
                why = (
                    f"another key, {key or 'none'}, says that it is its site, but it belongs to "
                    f"{owner}; if its site has a new key, see hyperfed move"
                )
                if self.refused.get(member.name) != why:  # once: it says so again and again
                    log.warning("client %s: node %d: %s", member.name, node, why)
                self.refused[member.name] = why
            else:
                self.refused.pop(member.name, None)
                own.append(member)
        return replace(said, members=tuple(own))


def _with_others(said: Iterable[Introduction], besides: Collection[str]) -> list[Introduction]:
    """Returns those introductions in which there is a client besides some."""
    return [site for site in said if any(m.name not in besides for m in site.members)]


def _places(known: Mapping[int, Introduction], names: Collection[str]) -> dict[str, int]:
    return {
        member.name: node
        for node, said in known.items()
        for member in said.members
        if member.name in names
    }


def _introduction(answer: bytes | Exception | None) -> Introduction:
    if isinstance(answer, bytes):
        return read_introduction(answer)
    raise NoAnswerError(f"it did not introduce itself ({answer or 'no answer'})")
