"""The commands of the ``hyperfed`` command that hosts of a Flower federation run."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from hyperfed.apps.flower import policies, submit
from hyperfed.apps.printing import Json, print_json, print_tables, say, table
from hyperfed.data.arrays import PARTS
from hyperfed.data.roster import Roster
from hyperfed.data.site import SiteData, columns_named, listed
from hyperfed.data.site import read as read_site
from hyperfed.engines.flower.store import check_state, clean
from hyperfed.errors import UserError, one_line
from hyperfed.metrics import named
from hyperfed.runs import config as configuration
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.newcomers import Newcomer, heard
from hyperfed.runs.run import Run
from hyperfed.system.devices import find_device
from hyperfed.system.locks import Lock
from hyperfed.system.toml import literal

WHO_IS_ASKED = tuple(
    f"engine.{key}" for key in ("superlink", "root_certificates", "timeout", "sites")
)
"""What settings of a run may be others when it serves newcomers."""


def node(
    *,
    data: Annotated[
        Path | None, Option(help="An .npz, parquet or CSV file, or a folder: the site's data.")
    ] = None,
    clients: Annotated[
        str, Option(help="For a trial, in place of data: clients of the run's task, such as 0-9.")
    ] = "",
    client: Annotated[str, Option(help="The column that says who holds a row.")] = "",
    target: Annotated[str, Option(help="The column to be learned.")] = "",
    features: Annotated[str, Option(help="The columns it is learned from: A,B,...")] = "",
    split: Annotated[str, Option(help="The column that says what a row is for.")] = "",
    labels: Annotated[
        str, Option(help="Names of the labels in order, A,B,...; default: the run's task.labels.")
    ] = "",
    state: Annotated[
        Path | None, Option(help="Where the site keeps what clients remember.")
    ] = None,
    site: Annotated[str, Option(help="With which the names of its clients begin.")] = "",
    size: Annotated[str, Option(help="Which target they run, where there are several.")] = "",
    novel: Annotated[bool, Option("--novel", help="They join after training.")] = False,
    workers: Annotated[int | None, Option(min=1, help="Clients computed at once.")] = None,
    cores_per_client: Annotated[int | None, Option(min=1, help="Threads of each.")] = None,
    device: Annotated[str, Option(help="Where the site computes: cpu, cuda or cuda:N.")] = "cpu",
    superlink: Annotated[
        str, Option(metavar="HOST:PORT", help="Serve this SuperLink, until a signal.")
    ] = "",
    root_certificates: Annotated[
        Path | None, Option(help="What the SuperLink is known by; default: the system's.")
    ] = None,
    key: Annotated[Path | None, Option(help="The private key that this node is known by.")] = None,
    insecure: Annotated[bool, Option("--insecure", help="Without encryption: a trial.")] = False,
    policy: Annotated[
        Path | None, Option(help="What a server may do here; strict where not given.")
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Check the data, say what a server could learn, do no more.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Be a site: check its data, or serve its clients.

    With --superlink they are served from this machine. Without, or with --check and --state, it
    says what is to be run instead: here, and by the operator of the SuperLink.

    An .npz file holds x, y and client, one row for each example, and may hold split (train, val or
    test) and classes (in the whole federation). A parquet file or a folder of Hugging Face's
    datasets has a column client and an image and a label column, or columns x and y. Of any other
    table, --client, --target, --features and --split name the columns.
    """
    if data is None and (check or not clients):
        raise UserError("a site must have data to check; give --data")
    find_device(device)  # before the data are read, and any message comes
    found = None
    allowed = policies.read(policy)
    if data is not None:
        columns = columns_named(client, target, features, split)
        found = read_site(
            data,
            val=allowed.val,
            test=allowed.test,
            columns=columns,
            labels=listed(labels),
            check=True,
            scratch=None if check else state,
        )
    start: dict[str, str] = {}
    if not check and state is None:
        raise UserError("a site must have a folder for what clients remember; give --state")
    if state is not None:
        if not check:
            check_state(state)
        given = {
            "data": "" if data is None else str(data.resolve()),
            "clients": clients,
            "client": client,
            "target": target,
            "features": features,
            "split": split,
            "labels": labels,
            "state": str(state.resolve()),
            "site": site,
            "size": size,
            "novel": novel,
            "workers": workers,
            "cores_per_client": cores_per_client,
            "device": device,
            "policy": "" if policy is None else str(policy.expanduser().resolve()),
        }
        if superlink and not check:
            with Lock(state):
                clean(state)
                _serve(given, superlink, root_certificates, key, insecure=insecure)
        start = _starts(given, superlink, root_certificates, key, insecure=insecure)
    learns = policies.explain(allowed, found)
    if as_json:
        classes = found.classes if found else None
        named = found.features if found else ()
        told = {"clients": _counts(found), "classes": classes, "features": named, "learns": learns}
        told["labels"] = found.labels if found else ()
        print_json({**told, "start": None, **start})
    else:
        _tell(found, learns if check else [], start, numbered=bool(labels))


def move(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="The folder of a run at sites.")],
    clients: Annotated[
        list[str], Argument(metavar="CLIENT...", help="Names of clients, as in sites.json.")
    ],
    key: Annotated[Path, Option(help="The public key of their site from now on, node.pub.")],
) -> None:
    """Have clients of a run belong to another key. Their site has a new one, or they moved.

    Until then whoever says their names with another key is refused. What they remember is in the
    state folder of their site, which must come along.
    """
    from hyperfed.engines.flower.grid import fingerprint

    try:
        owner = fingerprint(key.expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--key must be a public key, such as node.pub, but {key} is not ({error})"
        ) from error
    place = RunFolder(run_dir)
    known = {**Roster.read(place.sites).numbers}
    if place.newcomers.exists():
        known |= Roster.read(place.newcomers).numbers
    if strange := [name for name in clients if name not in known]:
        raise UserError(
            f"clients to move must be of this run, but {one_line(strange[0], 100)} is not; "
            f"{place.sites} has their names"
        )
    before: dict[str, str] = {}
    with Lock(run_dir):
        for path in filter(Path.exists, (place.sites, place.newcomers)):
            roster = Roster.read(path)  # anew: others may have moved since
            before |= roster.keys
            here = dict.fromkeys((name for name in clients if name in roster.numbers), owner)
            replace(roster, keys={**roster.keys, **here}).save(path)
    for name in clients:
        print(f"{name} belongs to {owner}, before: {before.get(name) or 'nobody'}")


def serve(
    run_dir: Annotated[
        Path, Argument(metavar="RUN_DIR", help="The folder of a run at sites that is done.")
    ],
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[KEY=VALUE]...",
            help="engine.superlink, engine.root_certificates and engine.timeout, as in the run "
            "where not given; engine.sites, how many with newcomers are waited for, 1 if not.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve clients that come when a run at sites is over.

    Their sites keep the models. Clients of the run are left alone, and nothing of it changes. Exit
    code 0 only where all newcomers were served.
    """
    with closing(Run.open(run_dir)) as run:
        run.check_newcomers()
        asked = ["engine.sites=1", *(settings or ())]
        config = configuration.override(run.config, asked, allowed=WHO_IS_ASKED)
    found: dict[str, Newcomer] = {}  # by name: where the log is read anew, its lines come again

    def tell(line: str) -> None:
        if (newcomer := heard(line)) is not None:
            found[newcomer.client] = newcomer

    failed = ""
    try:
        submit.serve(config, run_dir, tell)
    except submit.RunFailedError as error:
        failed = str(error)
    if as_json:
        print_json([asdict(newcomer) for newcomer in found.values()])
    elif found:
        shown = table("client", "of its test examples", "model")
        for it in found.values():
            metric = named(it.metric)
            measured = "–" if it.value is None else f"{metric.label} {metric.told(it.value)}"
            shown.add_row(it.client, measured, f"{it.model}: {it.why}" if it.why else it.model)
        print_tables(shown)
    if failed:
        say(failed)
        raise Exit(1)


def superexec(
    superlink: Annotated[str, Option(metavar="HOST:PORT", help="The SuperLink.")],
    root_certificates: Annotated[
        Path | None, Option(help="What it is known by; default: the system's.")
    ] = None,
    insecure: Annotated[bool, Option("--insecure", help="Without encryption: a trial.")] = False,
) -> None:
    """Start the runs of a SuperLink faster than Flower does.

    Of one with --isolation process, each in seconds less. It runs on the SuperLink's host, until a
    signal, and writes the records.
    """
    import hyperfed.apps.flower.app  # noqa: F401 (first: it says so where Flower is missing)
    from hyperfed.apps.flower.node import SuperLink
    from hyperfed.apps.flower.superexec import serve

    serve(SuperLink.of(superlink, root_certificates, None, insecure=insecure), say)
    os._exit(0)  # at once: a thread may still try to reach a SuperLink that is gone


def _counts(found: SiteData | None) -> dict[str, dict[str, int]]:
    """Returns client -> part -> how many examples it has for it."""
    return {
        name: dict(zip(PARTS, map(len, rows), strict=True))
        for name, rows in (found.rows if found else {}).items()
    }


def _tell(
    found: SiteData | None, learns: Sequence[str], start: Mapping[str, str], *, numbered: bool
) -> None:
    """Prints whose data of what a site has, what a server could learn, and what is to be run.

    Args:
        found: what the site has.
        learns: a line for each thing that a server could learn.
        start: what is to be run, by where.
        numbered: whether somebody has said in which order labels are.
    """
    if found is not None:
        shown = table("client", *PARTS)
        for name, of in _counts(found).items():
            shown.add_row(name, *(str(of[part]) for part in PARTS))
        print_tables(shown)
        if found.features:
            print(f"features: {', '.join(found.features)}")
        if found.labels:
            order = "" if numbered else " (of words --labels or the run's task.labels is the order)"
            print(f"labels: {', '.join(found.labels)}{order}")
    for line in learns:
        print(line)
    said = {"start": "here", "supernode": "or here", "register": "before, at the operator's"}
    for name, line in start.items():
        print(f"{said[name]}:\n{line}")


def _serve(
    given: Mapping[str, Any],
    address: str,
    root_certificates: Path | None,
    key: Path | None,
    *,
    insecure: bool,
) -> None:
    """Serves a SuperLink until a signal."""
    from hyperfed.apps.flower.app import node_settings  # first: it says so where Flower is missing
    from hyperfed.apps.flower.node import SuperLink, serve

    settings = node_settings(given)
    serve(SuperLink.of(address, root_certificates, key, insecure=insecure), settings, say)
    os._exit(0)  # at once: a thread may still try to reach a SuperLink that is gone


def _starts(
    given: Mapping[str, Any],
    superlink: str,
    root_certificates: Path | None,
    key: Path | None,
    *,
    insecure: bool,
) -> dict[str, str]:
    """Returns what is to be run: two ways to start a site, and before it, with the operator.

    What is not known yet stands in capitals.
    """
    address, root, known = superlink or "HOST:PORT", "CA.CRT", "KEY"
    if root_certificates is not None:
        root = str(root_certificates.expanduser().resolve())
    if key is not None:
        known = str(key.expanduser().resolve())
    if superlink:
        from hyperfed.apps.flower.node import SuperLink

        SuperLink.of(superlink, root_certificates, key, insecure=insecure)
    unsaid: tuple[Any, ...] = ("", False, None, "cpu")
    said = {name: value for name, value in given.items() if value not in unsaid}
    ours = ["hyperfed", "node"]
    for name, value in said.items():
        ours += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    config = " ".join(f"{name}={literal(value)}" for name, value in said.items())
    safe = ["--insecure"] if insecure else ["--root-certificates", root, "--key", known]
    theirs = [*safe[:2], "--auth-supernode-private-key", known] if not insecure else safe
    register = "" if insecure else f"flwr supernode register {shlex.quote(known + '.pub')}"
    return {
        "start": shlex.join([*ours, "--superlink", address, *safe]),
        "supernode": shlex.join(
            ["flower-supernode", "--superlink", address, *theirs, "--node-config", config]
        ),
        **({"register": register} if register else {}),
    }
