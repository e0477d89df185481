"""Clients with made-up examples, to find out what a method does without asking anybody."""

import torch

from hyperfed.task import Task

EXAMPLES = 8
"""Of a made-up client: more than one, for batch-norm."""


def made_up(task: Task, *, novel: int | None = None) -> Task:
    """Returns a task in which all clients have the same few examples, drawn from nobody's.

    Args:
        task: whose targets and clients; none of its examples is read.
        novel: novel clients beside the known ones; as many as in ``task`` where None.
    """
    x, y = task.made_up(EXAMPLES)
    novel = task.novel if novel is None else novel
    rows = [torch.arange(EXAMPLES)] * (len(task.known) + novel)
    first = next(iter(task.models))
    sizes = [task.size_of(client) for client in task.known]
    return Task(
        name=task.name,
        x=x,
        y=y,
        train=rows,
        val=rows,
        test=rows,
        models=task.models,
        classes=task.classes,
        sizes=task.sizes if novel == task.novel else [*sizes, *[first] * novel],
        novel=novel,
        newcomers=novel - task.novel + task.newcomers,  # a server knows of as many as before
        unlabelled=task.unlabelled,
        transform=task.transform,
        loss=task.loss,
        score=task.score,
        metrics=task.metrics,
    )
