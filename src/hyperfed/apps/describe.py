"""The command that tells how large a run is before anything is trained."""

from dataclasses import asdict
from typing import Annotated

from typer import Argument

from hyperfed.apps.printing import Json, print_json
from hyperfed.metrics import named
from hyperfed.runs import config
from hyperfed.runs.description import describe as description_of
from hyperfed.runs.remarks import megabytes


def describe(
    source: Annotated[str, Argument(metavar="METHOD|EXPERIMENT.toml", help="What would be run.")],
    settings: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Such as task=cifar10 method.head_rank=4."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell how large a run is and what a round sends. Trains nothing."""
    found = description_of(config.load(source, settings or ()))
    if as_json:
        print_json(asdict(found))
        return
    print(found.task)
    for size, count in found.targets.items():
        print(f"target {size}: {count:,} numbers trained, {found.frozen[size]:,} frozen")
    for part, count in found.server.items():
        print(f"server {part}: {count:,} numbers trained")
    down, up = megabytes(found.bytes_down), megabytes(found.bytes_up)
    print(f"first round: {found.clients} clients, {down} MB down, {up} MB up")
    metric = named(found.metric)
    print(f"judged by: {metric.axis('{}')}, {metric.better}")
