"""What the tests of sites with a policy share: a site, a call to it, its log."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperfed.data.roster import Frame
from hyperfed.engines.calls import Call
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.flower.wire import Request, pack_request, unpack_response
from hyperfed.methods import fedavg
from hyperfed.training import Steps
from hyperfed.trees import Tree
from toys import make_task

TASK = make_task(examples=(12, 7, 20, 9), novel=1)
FRAME = Frame(known=3, novel=1, shape=(5,), dtype="torch.float64", classes=3)
MODEL = TASK.initial("base")
CONSTANT = {name: leaf * name.endswith("bias") for name, leaf in MODEL.items()}


def site_in(
    folder: Path,
    method: Any = fedavg,
    config: Any = None,
    count: Any = (),
    seed: int = 0,
    **changes: Any,
) -> Site:
    policy = replace(Policy(methods=("fedavg", "itpfl"), smallest_batch=4), **changes)
    source, settings = Shard(TASK, range(4)), config or method.Config(local_lr=0.1)
    name = method.__name__.rpartition(".")[2]
    options = {"seed": seed, "method": name, "policy": policy, "metrics": count}
    return Site(source, folder, method.Client, settings, **options)


def asked(
    site: Site,
    step: str = "train_model",
    client: int = 0,
    model: Tree = MODEL,
    batches: Any = None,
    **changes: Any,
) -> Tree | Exception:
    """The answer to one call; ``serial`` is also its cohort."""
    serial, payload = changes.pop("serial", 1), changes.pop("payload", (model,))
    call = Call(serial, 0, client, step, payload, batches)
    made = Request(1, 10, serial, FRAME, {client: f"{client:06d}"}, [call], {}, {}, [serial])
    content = pack_request(replace(made, **changes))
    return unpack_response(site.handle(content)).answers[0]


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


HONEST = Steps(20, 8)
