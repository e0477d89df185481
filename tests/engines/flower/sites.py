"""Sites of the toy task in this process, reached as Flower would reach them or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperfed.data.roster import Introduction, RemoteTask, enrol
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.flower.sites import HELLO
from hyperfed.engines.replies import NoAnswerError
from hyperfed.task import Task


def hello(site: Site) -> bytes:
    return TypeAdapter(Introduction).dump_json(site.source.introduce())


class DirectLink:
    """Calls the sites; what a test puts in ``broken`` answers in a site's place."""

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self.sites = dict(sites)
        self.broken: dict[int, Any] = {}
        self.keys: dict[int, str] = {}
        self.sent: list[tuple[str, int, bytes]] = []

    def nodes(self) -> dict[int, str]:
        return {node: self.keys.get(node, "") for node in sorted(self.sites)}

    def exchange(
        self, kind: str, contents: Mapping[int, bytes], timeout: float, most: Mapping[int, int]
    ) -> dict[int, bytes | Exception]:
        answers: dict[int, bytes | Exception] = {}
        for node, content in reversed(contents.items()):
            self.sent.append((kind, node, content))
            site = self.sites.get(node)
            if site is None:
                answers[node] = NoAnswerError("its site is gone")
            elif kind == HELLO:
                answers[node] = hello(site)
            elif node in self.broken:
                answers[node] = self.broken[node](site, content)
            else:
                answers[node] = site.handle(content)
        return answers


def sites_of(task: Task, method: Any, config: Any, state: Path, shares: Any) -> dict[int, Site]:
    """Sites of a task's clients; the state of node n is in ``state/n``."""
    return {
        node: Site(
            Shard(task, clients),
            state / str(node),
            method.Client,
            config,
            seed=0,
            metrics=task.metrics,
        )
        for node, clients in shares.items()
    }


def remote(task: Task, link: Any, sites: Mapping[int, Site]) -> RemoteTask:
    """The task as the server knows it."""
    introductions = [site.source.introduce() for site in sites.values()]
    roster = enrol(introductions, run=1, sizes=task.models)
    return RemoteTask.of(roster, task.models, task.name, link)
