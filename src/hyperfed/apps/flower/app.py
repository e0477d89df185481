"""The Flower app: a run at the server, and a site at each node.

``flwr run`` starts it (:mod:`hyperfed.apps.flower.submit` does that for ``hyperfed run``). Its run
config has

- ``settings``, all settings of a run as TOML; or ``method``, ``preset``, ``task``, ``rounds``,
  ``cohort``, ``evaluate_every``, ``checkpoint_every`` and ``seed``, and ``keys``, any other
  settings as on the command line: ``keys="task.model=lenet method.local_steps=5"``;
- ``folder``, where the records go on the SuperLink's host. A run whose folder holds a roster is
  resumed, by the same settings alone.

``hyperfed serve`` starts the app with another server, which serves the newcomers of a run that is
done; ``folder`` has its records.

A node's config says what is there: :class:`NodeConfig`.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hyperfed.apps.flower import policies
from hyperfed.data import datasets, model_files, tasks
from hyperfed.data import site as sitedata
from hyperfed.data.roster import Introduction, Roster, enrol, joined
from hyperfed.data.settings import TaskConfig
from hyperfed.data.tables import Columns
from hyperfed.engines.flower.grid import GridLink, bytes_of, record_of
from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.engines.flower.site import Shard, Site, Source
from hyperfed.engines.flower.sites import HELLO, STEP, Sites
from hyperfed.engines.flower.store import check_state
from hyperfed.engines.flower.wire import read_introduction
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.runs import config as configuration
from hyperfed.runs import experiments
from hyperfed.runs.export import export_model
from hyperfed.runs.settings import RunConfig, check_clients
from hyperfed.system import toml
from hyperfed.system.devices import find_device
from hyperfed.system.extras import how_to_install
from hyperfed.system.files import PRIVATE
from hyperfed.system.locks import Lock, is_held

if TYPE_CHECKING:
    from hyperfed.runs.newcomers import Newcomer
    from hyperfed.runs.run import Run

try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ModuleNotFoundError as error:
    raise UserError(
        f"engine=flower must have Flower, which is not installed; {how_to_install('flower')}"
    ) from error

server = ServerApp()
newcomers = ServerApp()
client = ClientApp()

_INTRODUCTION = TypeAdapter(Introduction)


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class NodeConfig:
    """What the options of ``hyperfed node``, or a SuperNode's ``--node-config``, say.

    Attributes:
        state: folder for what clients remember; it must outlive the node's process.
        data: file or folder of the site's data (:mod:`hyperfed.data.site`).
        clients: instead of ``data``, for a trial: which clients of the run's own task are here,
            such as "0-9,12".
        client: the column of a table that says who holds a row; as the other columns, where it is
            not called as it is by default (:mod:`hyperfed.data.tables`). It is the site's to say.
        target: the column to be learned.
        features: the columns that it is learned from, with commas between them.
        split: the column that says what a row is for.
        labels: names of the labels 0, 1, ..., with commas between them, where they are words; those
            of the run's ``task.labels`` where empty.
        site: with which the names of its clients begin; needed where two sites use the same names.
        size: which target its clients run, where the task has several.
        novel: its clients join after training.
        workers: clients computed at once.
        cores_per_client: intra-op threads of each.
        device: where the site computes: ``cpu``, ``cuda`` or ``cuda:N``.
        policy: file that says what a server may do here (:mod:`hyperfed.apps.flower.policies`);
            the strict default where empty.
    """

    state: Annotated[str, Field(min_length=1)]
    data: str = ""
    clients: str = ""
    client: str = ""
    target: str = ""
    features: str = ""
    split: str = ""
    labels: str = ""
    site: str = ""
    size: str = ""
    novel: bool = False
    workers: PositiveInt | None = None
    cores_per_client: PositiveInt | None = None
    device: str = "cpu"
    policy: str = ""

    @property
    def columns(self) -> Columns:
        """Which column of the site's table is what."""
        return sitedata.columns_named(self.client, self.target, self.features, self.split)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, as the site says them."""
        return sitedata.listed(self.labels)

    def allowed(self) -> Policy:
        """Returns what a server may do here, as the policy's file says now.

        Raises:
            UserError: there is none, or it is wrong.
        """
        return policies.read(Path(self.policy) if self.policy else None)


def run_settings(run_config: Mapping[str, Any]) -> RunConfig:
    """Returns the settings of a run, which the server and all sites validate for themselves.

    Raises:
        UserError: lists all that is wrong with them.
    """
    given = {key: value for key, value in run_config.items() if value != "" and key != "folder"}
    text, keys = given.pop("settings", None), given.pop("keys", "")
    if text is not None:
        table = toml.loads(str(text))
        return configuration.from_keys(table.get("method", {}).get("name", ""), table)
    overrides = [f"{key}={toml.literal(value)}" for key, value in given.items() if key != "method"]
    method = str(given.get("method", ""))
    if experiments.split(method) is not None:  # a server does not decide which files a site reads
        raise UserError(
            f"method must be the name of a method where clients are at sites, got {method}; "
            "what a file says is sent as settings"
        )
    return configuration.load(method, [*overrides, *shlex.split(str(keys)), "engine=flower"])


def node_settings(node_config: Mapping[str, Any]) -> NodeConfig:
    """Returns what a node's config says.

    Raises:
        UserError: lists all that is wrong with it.
    """
    try:
        node = NodeConfig(**node_config)
    except ValidationError as error:
        told = [
            f"- {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()
        ]
        raise UserError("the node's config must be right, but\n" + "\n".join(told)) from error
    if bool(node.data) == bool(node.clients):
        raise UserError("the node's config must have either data or clients; give one of them")
    return node


def source_of(node: NodeConfig, config: RunConfig, policy: Policy) -> Source:
    """Opens the data of a node.

    Raises:
        UserError: they are not there, or wrong, or the run would have them divided otherwise.
    """
    if node.clients:
        _check_named(config.task)
        task = tasks.build(config.task, config.seed)
        return Shard(task, _numbers(node.clients, task.clients))
    policy.check_division(config.task.val, config.task.test)
    declared, own = config.task.labels or (), node.label_names
    if declared and own and declared != own:
        raise UserError(
            f"the labels must be named alike by the run, {', '.join(declared)}, and by the site, "
            f"got {', '.join(own)}; leave out those of the site, or correct one of them"
        )
    read = partial(
        sitedata.read,
        node.data,
        val=policy.val,
        test=policy.test,
        columns=node.columns,
        scratch=Path(node.state),
    )
    try:
        data = read(labels=declared or own)
    except UserError as error:
        if not declared or own:
            raise
        read(check=True)  # raises what else is wrong with them, which the site must be told
        # What it says of the first label that is another, a server could ask for label by label.
        raise RefusedError(
            f"the site's data must have no labels but the run's, {', '.join(declared)}; at the "
            "site, hyperfed node --check --labels says which others there are"
        ) from error
    return data.at(
        site=node.site,
        size=node.size,
        novel=node.novel,
        unlabelled=config.task.unlabelled,
        models=lambda frame: tasks.targets_of(config.task, frame, config.seed),
    )


def _check_named(task: TaskConfig) -> None:
    """Finds out whether a task is one that a site without data of its own makes for a server.

    A server does not decide which files of a site's disk are read there, or run.

    Raises:
        UserError: one of its settings names a file.
    """
    files: Mapping[str, object] = {
        "task": None if task.name in datasets.NAMES else task.name,
        "task.data_dir": task.data_dir,
        "task.partition_file": task.partition_file,
        "task.model": task.model if task.model and model_files.is_file(task.model) else None,
    }
    if wrong := [f"{key}={value}" for key, value in files.items() if value is not None]:
        raise UserError(
            f"a node with clients in place of data must be given no files, got {wrong[0]}; choose "
            f"a data set of {', '.join(datasets.NAMES)}, which HYPERFED_DATA at the site may hold"
        )


def site_of(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Site:
    """Builds the site of a node, for one message."""
    config, node = run_settings(run_config), node_settings(node_config)
    policy = node.allowed()
    return Site(
        source_of(node, config, policy),
        Path(node.state),
        METHODS[config.method].Client,
        config.settings,
        seed=config.seed,
        workers=node.workers,
        cores_per_client=node.cores_per_client,
        precision=config.precision,
        device=find_device(node.device),
        method=config.method,
        policy=policy,
        private=config.privacy.updates(),
        masking=config.privacy.sums(),
        metrics=config.metrics,
        write=export_model,
    )


def respond(
    kind: str, content: bytes, run_config: Mapping[str, Any], node_config: Mapping[str, Any]
) -> bytes:
    """Answers a message to a node.

    Args:
        kind: the message's type.
        content: what it holds.
        run_config: of the run that it belongs to.
        node_config: of the node.

    Raises:
        UserError: the message or a configuration is wrong.
    """
    if kind not in (HELLO, STEP):
        raise UserError(f"a message to a site must be {HELLO} or {STEP}, got {kind}")
    site = site_of(run_config, node_config)
    if kind == STEP:
        return site.handle(content)
    check_state(site.state)
    content = _INTRODUCTION.dump_json(site.source.introduce())
    read_introduction(content)  # what the server would refuse is told here too
    return content


def respond_within(
    kind: str, content: bytes, run_config: Mapping[str, Any], node_config: Mapping[str, Any]
) -> bytes:
    """Does what :func:`respond` does, in a process that has no more memory than the site allows."""
    bound_memory(node_settings(node_config).allowed().largest_memory)
    return respond(kind, content, run_config, node_config)


def bound_memory(most: int | None) -> None:
    """Has this process take so many bytes at most, and raise where it would take more."""
    if most is not None and sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


@client.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Says who the clients of this site are."""
    return _answered(message, context)


@client.train("step")
def step(message: Message, context: Context) -> Message:
    """Runs the calls of a request."""
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    kind, content = message.metadata.message_type, bytes_of(message.content)
    reply = respond(kind, content, context.run_config, context.node_config)
    return Message(record_of(reply), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Trains: the run's loop, with its clients at sites."""
    # With all that a server needs, and a site does not.
    from hyperfed.runs.folder import RunFolder
    from hyperfed.runs.progress import note, spoken, watch

    folder = str(context.run_config.get("folder", ""))
    with _failing_aloud():
        config = run_settings(context.run_config)
        try:
            run = begin(config, _link(grid, config), folder)
        except UserError as error:
            if folder and not is_held(Path(folder)):  # else it is another's, who trains
                note(RunFolder(Path(folder)), f"error before training: {error}")
            raise
        assert run.folder is not None, "a run of the app has a folder"
        print(f"the records are in {run.folder.path.resolve()}", flush=True)
        watch(run, show=False, told=lambda progress: print(spoken(progress), flush=True))


@contextmanager
def _failing_aloud() -> Iterator[None]:
    """Says why a run failed where who waits for it reads: in its log, the standard output."""
    from hyperfed.runs.progress import spoken_failure

    try:
        yield
    except Exception as error:
        print(spoken_failure(error), flush=True)
        raise


def _link(grid: Grid, config: RunConfig) -> GridLink:
    # Of a SuperLink that does not encrypt, nodes have a new key whenever they start.
    return GridLink(grid, keyed=config.engine.encrypts)


@newcomers.main()
def serve_newcomers(grid: Grid, context: Context) -> None:
    """Serves clients that came when a run was over, and says of each in a line how it went."""
    from hyperfed.runs.newcomers import spoken

    with _failing_aloud():
        config = run_settings(context.run_config)
        found = welcome(config, _link(grid, config), str(context.run_config["folder"]))
        for newcomer in found:
            print(spoken(newcomer), flush=True)
        if lost := [newcomer.client for newcomer in found if newcomer.model == "not kept"]:
            raise UserError(
                f"all newcomers must be served, but {len(lost)} of {len(found)} were not, "
                f"{lost[0]} among them; the lines above say why"
            )


def begin(config: RunConfig, link: GridLink, folder: str) -> "Run":
    """Starts or resumes a run at the connected sites.

    Args:
        config: all settings.
        link: the way to the sites.
        folder: of the records; a new one below ``runs`` where empty.

    Raises:
        UserError: too few sites came, or they do not fit together, or the settings not to them or
            to those of the run in the folder; or another process has begun it.
    """
    from hyperfed.runs import trackers
    from hyperfed.runs.folder import RunFolder
    from hyperfed.runs.identity import check_submitted
    from hyperfed.runs.progress import note
    from hyperfed.runs.run import Run

    place = RunFolder(Path(folder))
    if folder and place.sites.exists():
        roster = Roster.read(place.sites)
        task = tasks.remote(config.task, roster, config.seed, link)
        check_submitted(configuration.load(str(place.config)), config)
        asked = configuration.flat(configuration.to_dict(config))
        where = [key for key in asked if key.startswith(configuration.GOES_ON) and key != "rounds"]
        return Run.resume(place.path, task, {key: asked[key] for key in where})
    sites = Sites(link, config.engine.timeout)
    introductions, sizes = sites.gather(config.engine.sites), tasks.target_sizes(config.task)
    roster = enrol(
        introductions,
        run=time.time_ns(),
        sizes=sizes,
        keys=sites.keys,
        labels=config.task.labels or (),
        robust=config.robust.aggregation != "mean",
    )
    task = tasks.remote(config.task, roster, config.seed, link)
    if folder:
        trackers.check(config.track)
        check_clients(config, len(task.known))
        run = Run(config, task, place)
        place.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        run.take()
        if place.sites.exists():  # sites know that run by the number that is there
            run.close()
            raise UserError(
                f"{folder} must be begun by one process, but another one did while this one waited "
                "for the sites; go on with: hyperfed resume"
            )
        place.state.parent.mkdir(exist_ok=True)
        configuration.dump(config, place.config)
    else:
        run = Run.start(config, Path("runs"), task)
    assert run.folder is not None
    roster.save(run.folder.sites)
    for who in sites.left_out():
        note(run.folder, f"warning: begins without {who}")
    return run


def welcome(config: RunConfig, link: GridLink, folder: str) -> "list[Newcomer]":
    """Serves those at the connected sites who are no clients of a run that is done.

    Who has been served is in the run's folder, and is left alone from then on.

    Args:
        config: all settings; but for those of the engine they are the run's.
        link: the way to the sites.
        folder: of the run's records.

    Returns:
        What became of each client that is there, also of those that the run has already.

    Raises:
        UserError: there is no such run, it has other settings, it serves no newcomers, too few
            sites came, or another process is at it.
    """
    from hyperfed.runs.folder import RunFolder
    from hyperfed.runs.identity import check_submitted
    from hyperfed.runs.newcomers import Newcomer
    from hyperfed.runs.run import Run

    place = RunFolder(Path(folder))
    with closing(Run.open(place.path)) as run, Lock(place.path):
        check_submitted(run.config, config)
        roster = Roster.read(place.newcomers if place.newcomers.exists() else place.sites)
        sites = Sites(link, config.engine.timeout, roster.keys)
        sites.gather(config.engine.sites, besides=roster.numbers)
        introductions = list(sites.known().values())
        everyone, refused = joined(
            roster,
            introductions,
            run=time.time_ns(),
            sizes=tasks.target_sizes(run.config.task),
            keys=sites.keys,
        )
        here = {member.name for said in introductions for member in said.members}
        found = [Newcomer(name, "known") for name in roster.numbers if name in here]
        found += [Newcomer(name, "not kept", why) for name, why in sorted(refused.items())]
        if ids := range(len(roster.members), len(everyone.members)):
            task = tasks.remote(run.config.task, everyone, run.config.seed, link)
            served = run.serve_newcomers(task, ids, config.engine)
            lost = {newcomer.client for newcomer in served if newcomer.model == "not kept"}
            everyone.without(lost).save(place.newcomers)
            found += served
    return found


def _numbers(text: str, clients: int) -> list[int]:
    """Returns the numbers in a text such as "0-9,12"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal():
            raise UserError(f"clients of a node must be numbers such as 0-9,12, got {text}")
        found += range(int(first), int(last or first) + 1)
    if max(found, default=clients) >= clients:
        raise UserError(
            f"clients of a node must be among the task's {clients}, numbered from 0, got {text}; "
            "change clients, or raise task.clients"
        )
    return found
