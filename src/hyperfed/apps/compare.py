"""``hyperfed compare``: runs that are done, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hyperfed.analysis import (
    budgets,
    comparison,
    differences,
    figures,
    page,
    paired,
    seeds,
    table_file,
)
from hyperfed.analysis.comparison import Row
from hyperfed.analysis.paired import Paired
from hyperfed.apps.printing import Json, print_json, print_tables, say
from hyperfed.errors import UserError
from hyperfed.papers import agreement
from hyperfed.runs.folder import RunRecord
from hyperfed.runs.records import FinishedRun
from hyperfed.runs.remarks import without
from hyperfed.system.files import check_suffix


def compare(
    run_dirs: Annotated[
        list[Path],
        Argument(metavar="RUN_DIR...", help="Folders of runs, or folders that hold some."),
    ],
    *,
    figure: Annotated[Path | None, Option(help="Also draw the results to this file.")] = None,
    html: Annotated[
        Path | None, Option(help="Also write a page with table, curves and clients to this file.")
    ] = None,
    table: Annotated[
        Path | None,
        Option(help="Also write the table to this file: .csv, a line for each run, or .tex."),
    ] = None,
    x: Annotated[str, Option(help=f"What curves go along: {', '.join(budgets.AXES)}.")] = "rounds",
    at: Annotated[
        str | None,
        Option(
            metavar="AXIS[=MOST]",
            help="Compare as of when each had spent so much, such as mb=300 (or rounds, "
            "client-visits, seconds); without a number as much as the one that spent least.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs that are done, and their settings."""
    if table is not None:
        check_suffix(table, table_file.SUFFIXES, "table")
    if x != "rounds" and figure is None and html is None:
        raise UserError(
            f"--x must come with --figure or --html, whose curves go along it, got --x {x} alone; "
            f"name a file, or compare as of when as much was spent: --at {x}"
        )
    done = _done(run_dirs)
    runs: Sequence[FinishedRun] = done
    if at is not None:
        budget = budgets.budget_of(at, done)
        runs = [budgets.within(run, budget) for run in done]
        say(f"as of {budget} at most; who joins afterwards is served at the end of a run only")
    rows = comparison.compare(runs)
    _warn(runs, rows)
    pairs, of_seeds = paired.pair(runs, rows), paired.pair_groups(runs, rows)
    if figure is not None:
        figures.draw_accuracy(runs, figure, x)
    if html is not None:
        page.write_page(runs, html, x)
    if table is not None:
        table_file.write_table(rows, table)
    if as_json:
        own = {(pair.label, pair.metric.name): pair.by_name for pair in of_seeds}
        print_json(
            [
                {
                    "folder": str(record.path),
                    **row.by_name,
                    **{
                        key: (run.summary or {}).get(key)
                        for key in ("evaluated", "novel_evaluated")
                    },
                    "settings": comparison.settings_of(record),
                    "paired": pair.by_name,
                    "paired_over_seeds": own[row.group, row.metric.name],
                }
                for record, run, row, pair in zip(done, runs, rows, pairs, strict=True)
            ]
        )
        return
    _print_tables(done, rows, pairs, of_seeds)
    for written in filter(None, (figure, html, table)):
        print(written)


def _done(paths: Sequence[Path]) -> list[RunRecord]:
    """Reads the runs that paths name or hold, each once, and says which are left out, not done."""
    found = agreement.read_runs(paths)
    for unfinished in (record for record in found if record.summary is None):
        say(f"warning: left out, not done: {unfinished.path}")
    done = [record for record in found if record.summary is not None]
    if not done:
        raise UserError("a run to compare must be done, but none of these is; resume one")
    return done


def _warn(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> None:
    """Says where numbers do not compare, or lack clients."""
    if not comparison.saw_the_same(rows):
        say("warning: these runs saw different data, so their numbers do not compare")
    for run, row in zip(runs, rows, strict=True):
        if (missing := without(run.summary or {})) is not None:
            say(f"warning: {row.label}: {missing}")


def _print_tables(
    done: Sequence[RunRecord],
    rows: Sequence[Row],
    pairs: Sequence[Paired],
    of_seeds: Sequence[Paired],
) -> None:
    """Prints in what runs differ, what they came to, and what clients gain."""
    if found := differences.differences(done, rows):
        print_tables(differences.table(found))
        print()
    print_tables(*comparison.tables(rows))
    of_groups = seeds.over_seeds(rows)
    several = len(of_groups) < len(rows)
    if several:
        print_tables(*seeds.tables(of_groups))
    if any(pair.to_best is not None for pair in pairs):
        print_tables(*paired.tables(pairs))
        if several:
            print_tables(*paired.tables(of_seeds))
        for metric in dict.fromkeys(pair.metric for pair in pairs):
            say(paired.told_of(metric))
        for told in paired.told_of_local(of_seeds):
            say(told)
