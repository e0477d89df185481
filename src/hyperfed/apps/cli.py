"""The ``hyperfed`` command.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 2 the input is
wrong, 3 stopped and resumable, also where what computed was lost, 1 our fault, or all clients were
lost all the time, or newcomers were not served; of ``hyperfed status``, what the run comes to.
"""

import errno
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
import typer.core
from typer import Argument, Option

import hyperfed
from hyperfed.analysis import seeds, tried
from hyperfed.apps import catalogue, completion
from hyperfed.apps import tables as papers
from hyperfed.apps.catalogue import Kind
from hyperfed.apps.compare import compare
from hyperfed.apps.describe import describe
from hyperfed.apps.export import export
from hyperfed.apps.flower import submit
from hyperfed.apps.flower.commands import move, node, serve, superexec
from hyperfed.apps.printing import Json, print_json, print_made, print_tables, say, table
from hyperfed.apps.status import show_status
from hyperfed.apps.training import ALL, own_process, submit_run, tell_of_data, train, train_all
from hyperfed.data import partition_files, tasks
from hyperfed.data.newcomer import read_like
from hyperfed.errors import LostEverybodyError, UserError, one_line
from hyperfed.metrics import named
from hyperfed.runs import clients, config, experiments, records
from hyperfed.runs.export import export_model, format_of
from hyperfed.runs.run import Run
from hyperfed.runs.serving import Served
from hyperfed.system.files import at_home

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # our own faults are to be reported whole
    rich_markup_mode=None,  # which would take [KEY=VALUE] for a style
    suggest_commands=False,  # click does
)
typer.core.HAS_RICH = False  # or "[required]" gets a backslash, which nobody takes away

RunDir = Annotated[Path, Argument(metavar="RUN_DIR", help="The folder of a run.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show neither progress nor numbers.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and leaves with its exit code, by ``SystemExit``.

    Args:
        arguments: of the command line; this process's own where None.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # nothing is lost for want of a ±
    try:
        app([_at_home(each) for each in (sys.argv[1:] if arguments is None else arguments)])
    except UserError as error:
        say(f"error: {error}")
        sys.exit(1 if isinstance(error, LostEverybodyError) else 2)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        say(f"error: {one_line(str(error.filename), 100)} must be a path, but is too long for one")
        sys.exit(2)


def _at_home(argument: str) -> str:
    """Puts the home directory into ``NAME=~/...``, which shells leave as it is."""
    name, equals, value = argument.partition("=")
    return f"{name}{equals}{at_home(value)}"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hyperfed {hyperfed.__version__}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Personalised federated learning with hypernetworks."""


@app.command()
def run(
    source: Annotated[
        str,
        Argument(
            metavar="METHOD|all|EXPERIMENT.toml[:CELL]",
            help="See: hyperfed list methods, experiments. all: every method, one after another.",
            autocompletion=completion.sources,
        ),
    ],
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE]...",
            help="Such as rounds=9 task=cifar10 method.lr=0.1 seed=0..2; see: hyperfed list keys.",
            autocompletion=completion.settings,
        ),
    ] = None,
    *,
    grid: Annotated[
        list[str] | None,
        Option(
            "--try",
            metavar="KEY=VALUE,VALUE",
            autocompletion=completion.settings,
            help="Train with each of these, and say which is the best by validation data; several "
            "of them: all with all.",
        ),
    ] = None,
    out: Annotated[Path, Option(help="Where the run gets a folder of its own.")] = Path("runs"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a method on a task, or every method. With seed=0..2 once for each seed."""
    each = seeds.asked_for(settings or ())
    points = tried.points(grid or (), each)
    if source == ALL or len(each) * len(points) > 1:
        train_all(source, each, points, out, as_json=as_json, quiet=quiet)
        return
    experiment = experiments.name(source)
    loaded = config.load(source, each[0])
    if loaded.engine.name == "flower":
        folder = submit.folder_for(loaded, out, experiment)
        try:
            submit_run(loaded, folder, as_json=as_json, quiet=quiet)
        except UserError:
            submit.discard(folder)
            raise
        return
    tell = own_process([loaded], as_json=as_json)
    with closing(Run.start(loaded, out, experiment=experiment)) as started:
        tell_of_data(started, quiet=quiet)
        train(started, tell, as_json=as_json, quiet=quiet)


@app.command()
def resume(
    run_dir: RunDir,
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE]...",
            help="Go on otherwise: device, engine.*, checkpoint_every, track; or to more rounds, "
            "also with a run that is done.",
            autocompletion=completion.going_on,
        ),
    ] = None,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed."""
    changed = config.parse(settings or ())
    loaded = submit.resumable(run_dir, done="rounds" in changed)
    if loaded is not None:
        loaded = config.continued(loaded, changed)
        if loaded.engine.name == "flower":  # device is the server's; each site says its own
            submit_run(loaded, run_dir, as_json=as_json, quiet=quiet)
            return
    tell = own_process([loaded] if loaded else [], as_json=as_json)
    with closing(Run.resume(run_dir, changed=changed)) as resumed:
        train(resumed, tell, as_json=as_json, quiet=quiet)


@app.command()
def evaluate(
    run_dir: RunDir,
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE]...",
            help="Serve clients otherwise: serve.finetune_steps; method.* and engine.*, where what "
            "was trained fits; metrics; task.unlabelled, task.novel_alpha, task.novel_corruption.",
        ),
    ] = None,
    *,
    samples: Annotated[
        int | None, Option(help="Training examples that each novel client has; default: all.")
    ] = None,
    novel: Annotated[bool, Option("--novel", help="Evaluate novel clients only.")] = False,
    draws: Annotated[
        int,
        Option(help="Times that novel clients are served, each with noise and batches of its own."),
    ] = 1,
    each: Annotated[bool, Option("--clients", help="Show each client by its name.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate the models of a run on every client's data. They are those of its best round."""
    with ExitStack() as opened:
        served: Served = opened.enter_context(closing(Run.open(run_dir)))
        if settings or samples is not None:
            otherwise = served.served_otherwise(settings or (), samples=samples)
            served = opened.enter_context(closing(otherwise))
        found = {"novel": served.evaluate_novel(draws)} if novel else served.evaluate_best(draws)
        names = served.task.names
    if as_json:
        said = {split: records.as_written(evaluation) for split, evaluation in found.items()}
        print_json({"names": list(names) or None, **said} if each else said)
        return
    first = next(iter(found.values()))
    metric, others = first.judged_by, [named(name) for name in first.others]
    headers = [it.header for it in others]
    if each:
        of_each = table("client", "split", "examples", metric.header, "loss", *headers)
        for row in clients.rows(found.values(), names):
            loss = "–" if row["loss"] is None else f"{row['loss']:.3f}"
            beside = (it.shown(row[it.name]) for it in others)
            own = (str(row["examples"]), metric.shown(row[metric.name]), loss, *beside)
            of_each.add_row(row["client"], row["split"], *own)
        print_tables(of_each)
    tested = (metric.header, f"per client {metric.short}", f"worst decile {metric.short}")
    shown = table("split", "clients", *tested, "loss", *headers)
    for split, e in found.items():
        shown.add_row(
            split,
            e.evaluated if e.missed else str(len(e.clients)),
            metric.shown(e.main.value),
            metric.spread(e.main.client_mean, e.main.client_std),
            metric.shown(e.main.worst_decile),
            "–" if e.loss is None else f"{e.loss:.3f}",
            *(it.shown(e.others[it.name].value) for it in others),
        )
    print_tables(shown)


@app.command()
def personalize(
    run_dir: RunDir,
    data: Annotated[
        Path,
        Option(
            help="An .npz file: x (m, ...), of a table its features in their order, and, where "
            "labelled, y (m,), or (m, K) of K numbers; a parquet or CSV file with the columns of "
            "the run's, whose rows with val or test in the column split are left out; or a folder "
            "of images, CLASS/*.png or, without labels, *.png."
        ),
    ],
    out: Annotated[Path, Option(help="The .safetensors, .onnx or .pt2 file to write.")],
    size: Annotated[str | None, Option(help="Which target, where the task has several.")] = None,
    as_json: Json = False,
) -> None:
    """Make the model of a client that was never seen. Its own data are all that it takes."""
    kind = format_of(out)  # before anything is trained for it
    with closing(Run.open(run_dir)) as run:
        rows = read_like(run.task, data)
        model = run.personalize(rows.x, rows.y, size=size)
        export_model(model, run.task, out, kind)
        if rows.y is None:
            usual = "label" if data.is_dir() else "y"
            named = (run.task.columns and run.task.columns.target) or (usual,)
            target = ", ".join(named)
            say(f"{data} has no {target}, so its client was taken for one without labels")
        if rows.left_out:
            say(f"{rows.left_out} rows of {data} are for validation or testing, and were left out")
    print_made("model", out, as_json, examples=len(rows.x), labelled=rows.y is not None)


@app.command("export-partition")
def export_partition(
    source: Annotated[
        str,
        Argument(
            metavar="METHOD|EXPERIMENT.toml[:CELL]",
            help="What would be run; or a run's config.toml.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Such as task=cifar10 task.clients=50 seed=1."),
    ] = None,
    *,
    out: Annotated[Path, Option(help="The .npz or .csv file to write.")],
    as_json: Json = False,
) -> None:
    """Write down which client holds which example. Read by task.partition=file."""
    loaded = config.load(source, settings or ())
    if loaded.engine.name == "flower":
        raise UserError(
            "a partition to export must be of data that are here, got engine=flower, whose sites "
            "keep theirs; leave the engine out"
        )
    examples = tasks.load(loaded.task)
    partition = tasks.divide(loaded.task, examples, loaded.seed)
    partition_files.write(out, partition, examples.y.numpy())
    sides = {"train": partition.train, "val": partition.val, "test": partition.test}
    counts = {side: sum(map(len, held)) for side, held in sides.items()}
    print_made("partition", out, as_json, clients=len(partition.train), examples=counts)


app.command()(compare)
app.command()(describe)
app.command()(export)
app.command()(node)
app.command()(move)
app.command()(serve)
app.command("status")(show_status)
app.command()(superexec)
app.command()(papers.reproduce)
app.command("report")(papers.report)


@app.command("list")
def list_known(
    kind: Annotated[Kind | None, Argument(help="What to list; default: all.")] = None,
    of: Annotated[
        str | None,
        Argument(
            help="A method, whose keys, or a paper's table, whose cells.",
            autocompletion=completion.listed,
        ),
    ] = None,
    *,
    experiments: papers.Experiments,
    as_json: Json = False,
) -> None:
    """List what a run can be made of. List keys METHOD has all that can be set.

    List experiments has the papers' tables, list experiments PAPER/TABLE the cells of one.
    """
    kinds = [kind] if kind else list(Kind)
    found = {each: catalogue.entries(each, experiments, of) for each in kinds}
    if as_json:
        print_json(found[kind] if kind else {str(each): rows for each, rows in found.items()})
        return
    for each, rows in found.items():
        if kind is None:
            print(f"\n{each}\n")
        if not rows:
            say(f"no {each} in {experiments.resolve()}")
            continue
        shown = table(*rows[0])
        for row in rows:
            texts = (", ".join(v) if isinstance(v, list) else v for v in row.values())
            shown.add_row(*texts)
        print_tables(shown)
