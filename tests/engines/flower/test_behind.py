"""What a site counts as the examples behind a reply is no more than what the reply depends on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.flower.sites import DirectLink, remote
from hyperfed import trees
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.policy import COUNTING, Policy
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.flower.sites import STEP
from hyperfed.engines.flower.wire import unpack_response
from hyperfed.methods import METHODS
from hyperfed.task import Task
from hyperfed.trees import Tree
from toys import CLASSES, Federation, make_task, short

TASK = make_task(examples=(9, 7))
NO_VAL = replace(TASK, val=[rows[:0] for rows in TASK.val])
POLICY = Policy(smallest_batch=1, smallest_reply=1, largest_training=10**6)


def with_another(task: Task, row: int) -> Task:
    """The task with other numbers and another label in one row."""
    x, y = task.x.clone(), task.y.clone()
    x[row] += torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)
    y[row] = (y[row] + 1) % CLASSES
    return replace(task, x=x, y=y)


def replies(site: Site, messages: list[bytes]) -> list[Tree]:
    """What the client answers to each message, {} where it fails."""
    answers = [unpack_response(site.handle(content)).answers[0] for content in messages]
    return [{} if isinstance(answer, Exception) else answer for answer in answers]


def alike(ours: Tree, theirs: Tree) -> bool:
    pairs = zip(trees.leaves(ours), trees.leaves(theirs), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


CHOOSING = {*COUNTING, "choose_cluster"}
"""Steps whose reply no single example need change."""

CASES: dict[str, tuple[str, Task, dict[str, Any]]] = {
    **{method: (method, TASK, {}) for method in METHODS},
    "itpfl end to end": ("itpfl", TASK, {"encoder": "end_to_end"}),
    "fedfomo without validation": ("fedfomo", NO_VAL, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_more_examples_are_counted_than_a_reply_depends_on(case: str, tmp_path: Path) -> None:
    """Each example is another one in turn; a reply that no one changes tells of none."""
    method, task, own = CASES[case]
    module, given = METHODS[method], short(method, **own)
    settings = module.Config(**given)

    def site_of(client: int, data: Task, folder: str) -> Site:
        options: dict[str, Any] = {"seed": 0, "method": method, "policy": POLICY}
        return Site(Shard(data, [client]), tmp_path / folder, module.Client, settings, **options)

    link = DirectLink({client: site_of(client, task, str(client)) for client in range(2)})
    federation = Federation(method, task, **given)
    federation.engine = FlowerEngine(
        remote(task, link, link.sites), module.Client, settings, seed=0
    )
    for number in range(2):
        federation.round([0, 1], number)
    messages = [content for kind, node, content in link.sent if (kind, node) == (STEP, 0)]
    notes = [json.loads(line) for line in (tmp_path / "0" / "audit.jsonl").read_text().splitlines()]
    assert len(notes) == len(messages) > 0
    whole = replies(site_of(0, task, "again"), messages)
    assert [trees.count_bytes(reply) for reply in whole] == [note["bytes_out"] for note in notes]
    depends = [0] * len(messages)
    for row in task.train[0].tolist():
        site = site_of(0, with_another(task, row), f"row {row}")
        for place, reply in enumerate(replies(site, messages)):
            depends[place] += not alike(reply, whole[place])
    for note, count in zip(notes, depends, strict=True):
        if note["step"] == "weigh":  # what one weighs was trained on other examples
            assert note["examples"] == (len(task.val[0]) or len(task.train[0]))
        elif note["step"] not in CHOOSING and count:
            assert note["examples"] <= count, (note["step"], depends)
