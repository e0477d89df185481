"""The table of engines."""

import pytest

from hyperfed.engines import ENGINES, EngineConfig, Faults, build
from hyperfed.engines.local.loop import LoopEngine
from probe import Client, Config
from toys import make_task


@pytest.mark.parametrize("name", ["auto", "loop", "vmap"])
def test_an_engine_is_built_by_its_name(name: str) -> None:
    task, settings, faults = make_task(), Config(), Faults(drop=0.5)
    engine = build(EngineConfig(name), task, Client, settings, seed=3, faults=faults)
    assert engine.name == {"auto": "loop"}.get(name, name)  # on a CPU
    assert (engine.task, engine.client, engine.seed) == (task, Client, 3)
    assert (engine.faults, engine.home, engine.memory) == (faults, None, {})
    cohort = engine.cohort([1, 0], 0, training=False)
    assert cohort.ask(Client.remember)["memory"].tolist() == [1, 1]
    engine.close()


def test_the_loop_engine_gets_its_settings_and_records_them() -> None:
    config = EngineConfig("loop", workers=2, cores_per_client=3)
    engine = build(config, make_task(), Client, Config(), seed=0)
    assert isinstance(engine, LoopEngine)
    assert (engine.workers, engine.resources(1)["cores_per_client"]) == (2, 3)
    default = LoopEngine(make_task(), Client, Config(), seed=0)
    cores = default.cores
    assert default.resources(1) == {"cores": cores, "cores_per_client": cores}
    assert default.resources(2) == {"cores": cores, "cores_per_client": 1}


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'auto', ") as caught:
        EngineConfig("loup")
    assert all(f"'{name}'" in str(caught.value) for name in ENGINES)
