"""The commands about papers' tables: make them again, and set them beside what was published."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from hyperfed.analysis.seeds import of_option
from hyperfed.apps import completion
from hyperfed.apps.guard import STOPPED
from hyperfed.apps.printing import Json, print_json, print_made, say
from hyperfed.errors import UserError
from hyperfed.papers import computed, pages, reproduction, side_by_side
from hyperfed.papers.report import of_papers
from hyperfed.papers.side_by_side import Outcome
from hyperfed.runs import experiments as tables
from hyperfed.system.devices import is_cpu
from hyperfed.system.files import check_suffix, check_writable

Experiments = Annotated[
    Path,
    Option(
        default_factory=tables.home,
        show_default="experiments, or those of the package",
        help="The folder of the tables.",
    ),
]


def reproduce(
    table: Annotated[
        str,
        Argument(
            metavar="PAPER/TABLE",
            help="Such as pfedhn/table1; see: list experiments.",
            autocompletion=completion.tables,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE]...",
            help="Where and how: device, engine.*, checkpoint_every.",
            autocompletion=completion.where,
        ),
    ] = None,
    *,
    cells: Annotated[str, Option(metavar="GLOB", help="Which cells, such as '*-pfedhn'.")] = "*",
    seeds: Annotated[
        str | None,
        Option(
            metavar="N|A..B",
            help="How many, from 0, or which, as 1..2; default: as many as the table says.",
        ),
    ] = None,
    scale: Annotated[
        float, Option(help="The part of the rounds to run. A scaled record gets no verdict.")
    ] = 1.0,
    jobs: Annotated[
        int | None, Option(help="Processes at once; default: cores, 1 with another device.")
    ] = None,
    out: Annotated[Path, Option(help="Where records are and go.")] = Path("results"),
    experiments: Experiments,
    as_json: Json = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run a paper's table, all cells or some. Side by side, resumed where half done.

    Each process computes on one core, or where settings such as device=cuda say. A run that is half
    done goes on as it was begun, but for these.

    A table that is computed and not trained, such as pfedkt/table12, is computed.
    """
    if (counted := computed.find(table, experiments)) is not None:
        if settings:
            raise UserError(
                f"{table} is computed at once and takes no settings, came {settings[0]}"
            )
        _tell([computed.write(counted, out)], Outcome(), as_json)
        return
    experiment, chosen = reproduction.find(table, experiments, cells)
    wanted = range(experiment.table.seeds) if seeds is None else of_option(seeds)
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, came {jobs}")
    planned = reproduction.plan(
        experiment, chosen, seeds=wanted, scale=scale, out=out, where=settings or ()
    )
    todo = [job for job in planned if not job.done]
    if todo:
        check_writable(out)  # once, and not in each process
    if jobs is None:  # an accelerator is one, and what does not fit into its memory is lost
        jobs = side_by_side.cores() if all(is_cpu(it.config.device) for it in planned) else 1
    found = side_by_side.run(todo, jobs, show=not quiet, say=say)
    _tell([job.folder for job in planned if job.done], found, as_json)
    for job, why in found.failed:
        say(f"error: {job.name}: {why}")
    if found.stopped:
        say(f"stopped, {len(found.stopped)} left; go on with the same command")
        raise typer.Exit(STOPPED)
    if found.failed:
        raise typer.Exit(1 if found.ours else 2)


def _tell(records: Sequence[Path], found: Outcome, as_json: bool) -> None:
    """Prints where records are; as JSON with what there is no record of."""
    if as_json:
        print_json(
            {
                "records": [str(folder) for folder in records],
                "stopped": [str(job.folder) for job in found.stopped],
                "failed": {str(job.folder): why for job, why in found.failed},
            }
        )
    else:
        for folder in records:
            print(folder)


def report(
    *,
    out: Annotated[Path, Option(help="The .html or .md file to write.")],
    paper: Annotated[str | None, Option(help="Of whose tables alone, such as pfedhn.")] = None,
    records: Annotated[Path, Option(help="The folder of the records.")] = Path("results"),
    experiments: Experiments,
    as_json: Json = False,
) -> None:
    """Set records beside what papers published. Spread, verdict, budgets, cost, figures."""
    check_suffix(out, pages.SUFFIXES, "report")
    found = tables.find_all(experiments)
    known = sorted({experiment.id.split("/")[0] for experiment in found})
    if not found or (paper is not None and paper not in known):
        raise tables.unknown("a paper", known, experiments, paper)
    if not records.is_dir():
        raise UserError(f"the records must be in a folder, but {records} is none; give --records")
    counted = computed.find_all(experiments)
    made = of_papers(records, found, paper, figures=out.suffix != ".md", computed=counted)
    pages.write(made, "Measured" if paper is None else f"Measured: {paper}", out)
    print_made("report", out, as_json, figures=len(made.figures))
