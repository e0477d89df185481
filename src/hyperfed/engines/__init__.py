"""Engines run the clients of a cohort. Methods never import them.

A new engine is one file and one line in the table below.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from hyperfed.data.roster import RemoteTask
from hyperfed.engines.cohort import Engine, EngineCohort, Exchange
from hyperfed.engines.faults import Faults
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.local.graphs import Graphs, recorder_on
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine, best_engine
from hyperfed.engines.masking import Masking
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError
from hyperfed.federation import Client
from hyperfed.system.devices import find_device
from hyperfed.system.files import absolute
from hyperfed.system.hosts import host_of, is_loopback
from hyperfed.task import Task
from hyperfed.training import Precision

__all__ = ["ENGINES", "Engine", "EngineCohort", "EngineConfig", "Exchange", "Faults", "build"]


def _known(name: str) -> str:
    if name not in ENGINES:
        *others, last = (f"'{engine}'" for engine in ENGINES)
        raise ValueError(f"must be {', '.join(others)} or {last}")
    return name


def _address(superlink: str) -> str:
    host_of(superlink)
    return superlink


def _a_share_or_whole(gpus: float) -> float:
    if gpus > 1 and not gpus.is_integer():
        raise ValueError("must be a fraction of one GPU, or a whole number of them")
    return gpus


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class EngineConfig:
    """Who computes.

    Attributes:
        name: the engine; ``auto`` is ``loop`` on a CPU and ``vmap`` on an accelerator.
        cores: threads of this process, for the server's arithmetic and for all clients that it
            computes; None for as many as PyTorch takes. They change the last bits of the results,
            which grow where training is not stable: a run that others shall repeat says how many.
        workers: clients computed at once; None for as many as keep all cores busy to the end.
        cores_per_client: intra-op threads of each. It changes the last bits of the results, the
            number of workers does not. None for all cores where one client trains alone, or
            several together, else 1.
        chunk: clients that ``vmap`` computes together; None for all that can be.
        graphs: has ``vmap`` record steps as CUDA graphs, also those of single clients.
        superlink: host:port of Flower's SuperLink, for ``flower``.
        root_certificates: file of the certificates that it is known by; None for the system's, or,
            where it is on this host (``localhost`` or an address of the loopback), for a trial
            without encryption.
        sites: how many must be there before a run begins.
        timeout: seconds that a site has to answer a message.
        address: host:port of a Ray cluster's head, or ``auto``, for ``ray``, which has this process
            join it; None for the cluster it is connected to or else a new one on this machine.
        gpus_per_worker: GPUs of each actor of ``ray`` where ``device`` is one; a fraction shares
            one among several.
    """

    name: Annotated[str, AfterValidator(_known)] = "auto"
    cores: PositiveInt | None = None
    workers: PositiveInt | None = None
    cores_per_client: PositiveInt | None = None
    chunk: PositiveInt | None = None
    graphs: bool = False
    superlink: Annotated[str, AfterValidator(_address)] | None = None
    root_certificates: Annotated[str, AfterValidator(absolute)] | None = None
    sites: PositiveInt = 1
    timeout: PositiveFloat = 600.0
    address: str | None = None
    gpus_per_worker: Annotated[NonNegativeFloat, AfterValidator(_a_share_or_whole)] = 0.0

    @property
    def encrypts(self) -> bool:
        """Whether what is said to the SuperLink is encrypted: always, where it leaves this host."""
        if self.superlink is None or self.root_certificates is not None:
            return True
        return not is_loopback(host_of(self.superlink))


def build(
    config: EngineConfig,
    task: Task,
    client: type[Client],
    settings: Any,
    *,
    seed: int,
    faults: Faults | None = None,
    precision: Precision = "float32",
    device: str = "cpu",
    private: PrivateUpdates | None = None,
    masking: Masking | None = None,
) -> Engine:
    """Builds the engine that a configuration names.

    Args:
        config: who computes.
        task: data and target models.
        client: the method's Client.
        settings: the method's settings, handed to each client.
        seed: the run's seed.
        faults: what to inject into training rounds.
        precision: of the clients' arithmetic.
        device: where clients compute, and the server where it is in one process with them.
        private: how the answers of clients are made private.
        masking: how updates are summed, where the server is told nothing but sums.

    Raises:
        UserError: the engine cannot be had as configured.
    """
    if config.graphs and not device.startswith("cuda"):
        raise UserError(
            f"engine.graphs must have a GPU to record on, came device={device}; set device=cuda"
        )
    options: dict[str, Any] = {"seed": seed, "faults": faults, "private": private}
    options |= {"masking": masking, "precision": precision, "device": device}
    return ENGINES[config.name](config, task.on_features(), client, settings, **options)


def _loop(
    config: EngineConfig,
    *arguments: Any,
    make: Callable[..., Engine] = LoopEngine,
    device: str,
    **options: Any,
) -> Engine:
    cores = {"workers": config.workers, "cores_per_client": config.cores_per_client}
    return make(*arguments, device=find_device(device), **cores, **options)


def _vmap(config: EngineConfig, *arguments: Any, device: str, **options: Any) -> Engine:
    graphs = Graphs(recorder_on(find_device(device))) if config.graphs else None
    own = {"chunk": config.chunk, "graphs": graphs}
    return _loop(config, *arguments, make=VmappedEngine, device=device, **own, **options)


def _auto(config: EngineConfig, *arguments: Any, device: str, **options: Any) -> Engine:
    best = _vmap if best_engine(find_device(device)) is VmappedEngine else _loop
    return best(config, *arguments, device=device, **options)


def _flower(
    config: EngineConfig,
    task: Task,
    *arguments: Any,
    device: str,  # of the server; a site has its own
    **options: Any,
) -> Engine:
    if not isinstance(task, RemoteTask):
        raise UserError(
            "engine=flower must be asked for by its app, which knows the sites: use hyperfed run "
            "METHOD engine=flower engine.superlink=HOST:PORT, or flwr run"
        )
    return FlowerEngine(
        task, *arguments, timeout=config.timeout, device=find_device(device), **options
    )


def _ray(config: EngineConfig, *arguments: Any, device: str, **options: Any) -> Engine:
    from hyperfed.engines.ray.engine import RayEngine

    if device not in ("cpu", "cuda"):
        raise UserError(
            f"device must be cpu or cuda where engine=ray, which gives each actor a GPU of its own "
            f"or a share of one, came {device}; take device=cuda"
        )
    if (device == "cpu") != (config.gpus_per_worker == 0):
        raise UserError(
            "actors must have GPUs where they compute on some, and nowhere else, but "
            f"device={device} and engine.gpus_per_worker={config.gpus_per_worker:g} came; "
            "set both or neither"
        )
    return RayEngine(
        *arguments,
        workers=config.workers,
        cores_per_client=config.cores_per_client,
        gpus_per_worker=config.gpus_per_worker,
        device=device,
        address=config.address,
        **options,
    )


ENGINES: Mapping[str, Callable[..., Engine]] = {
    "auto": _auto,
    "loop": _loop,
    "vmap": _vmap,
    "flower": _flower,
    "ray": _ray,
}
"""Name -> what makes the engine; it takes the arguments of :func:`build`."""
