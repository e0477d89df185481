"""Presets and defaults are what papers, and where there is any their authors' code, publish.

One row for each place: the method, the preset (several share a row where all have it), where it is
published, and what it says under our keys. ``OneOf`` is a grid that was searched and whose choice
is not told. What no row names is ours; each method's docstring and presets say so.
"""

from functools import reduce
from typing import Any

import pytest

from hyperfed.methods import METHODS
from hyperfed.methods.pefll import Config as PefllConfig
from hyperfed.runs import config
from hyperfed.runs.settings import RunConfig
from hyperfed.system.randomness import seeded
from hyperfed.task import Outline
from toys import CLASSES, TwoLayers


class OneOf(tuple[Any, ...]):
    """Values of which one was chosen."""


RATES = OneOf((1e-1, 5e-2, 1e-2, 5e-3, 1e-3))
DECAYS = OneOf((1e-3, 1e-4, 1e-5))

PFEDHN = "pFedHN, "
PFEDHN_CODE = "pFedHN's code, trainer.py, "
PEFLL = "PeFLL, "
PEFLL_CODE = "PeFLL's code, train.py, "
ITPFL = "IT-PFL-HN, "
PFEDLA = "pFedLA, "
PFEDKT = "pFedKT, "

# fmt: off
PUBLISHED: list[tuple[str, str, str, dict[str, Any]]] = [
    # pFedHN and what it is compared to.
    ("pfedhn pfedhn_pc", "paper official", PFEDHN + "algorithm 1", {"cohort": 1}),
    ("pfedhn pfedhn_pc", "paper official", PFEDHN + "section 5, training strategies", {
        "rounds": 5000, "method.local_steps": 50, "method.descriptor": "embedding",
        "method.embedding_size": None,  # the rule: see below
    }),
    ("pfedhn pfedhn_pc", "paper official", PFEDHN + "appendix B", {
        "method.hidden_layers": 3, "method.hidden": 100,
        "method.lr": OneOf((1e-1, 5e-2, 1e-2, 5e-3)),
        "method.local_lr": OneOf((5e-2, 1e-2, 5e-3, 1e-3)),
    }),
    ("pfedhn pfedhn_pc", "paper", PFEDHN + "section 5.1", {"task.shares": "paper"}),
    ("pfedhn pfedhn_pc", "official", "pFedHN's code, dataset.py, gen_classes_per_node", {
        "task.shares": "official",
    }),
    ("pfedhn", "paper official", PFEDHN + "sections 3.1 and 3.3", {"method.head_layers": 0}),
    ("pfedhn_pc", "paper official", PFEDHN + "section 3.3", {"method.head_layers": 1}),
    ("pfedhn pfedhn_pc", "paper official", PFEDHN + "section 5: C.3 adds it", {
        "method.spectral_norm": False,
    }),
    ("pfedhn pfedhn_pc", "paper official", PFEDHN_CODE + "main", {
        "rounds": 5000, "evaluate_every": 30, "method.batch_size": 64, "method.local_steps": 50,
        "method.local_epochs": None, "method.hidden_layers": 3, "method.hidden": 100,
        "method.local_lr": 5e-3, "method.local_weight_decay": 5e-5, "method.weight_decay": 1e-3,
        "method.embedding_lr": None, "method.embedding_size": None,
    }),
    ("pfedhn pfedhn_pc", "paper official", PFEDHN_CODE + "train", {
        "cohort": 1, "method.local_momentum": 0.9, "method.momentum": 0.9,
        "method.local_clip": 50.0, "method.clip": 50.0,
    }),
    ("pfedhn", "paper official", PFEDHN_CODE + "main", {"method.lr": 1e-2}),
    ("pfedhn_pc", "paper official", "pFedHN-PC's code, trainer.py, main", {"method.lr": 5e-2}),
    ("pfedhn", "pefll", PEFLL + "appendix C.2, as its own objective is a mean over clients", {
        "method.cohort_reduction": "mean",
    }),
    ("local", "pfedhn", PFEDHN + "section 5: 2,000 steps on each client", {
        "rounds": 40, "cohort": 1.0, "method.local_steps": 50,
    }),
    ("fedavg fedper per_fedavg pfedme", "pfedhn", PFEDHN + "section 5 and appendix B", {
        "rounds": 5000, "cohort": 5,
    }),
    ("lg_fedavg", "pfedhn", PFEDHN + "section 5 and appendix B: 1,000 steps more", {
        "rounds": 6000, "cohort": 5, "method.pretrain_rounds": 5000,
    }),
    ("pfedme", "default pfedhn pefll", "pFedMe, whose inner steps are plain gradient steps", {
        "method.local_momentum": 0.0, "method.local_weight_decay": 0.0,
    }),
    ("pfedme", "pfedhn", PFEDHN + "appendix B: K = 3, 60 local steps", {
        "method.inner_steps": 3, "method.local_steps": 20,
    }),
    # PeFLL and what it is compared to.
    ("pefll", "paper", PEFLL + "section 5, training details", {
        "rounds": 5000, "cohort": 0.05, "method.batch_size": 32, "method.local_momentum": 0.9,
    }),
    ("pefll", "paper", PEFLL + "section 5, models, and tables 2 and 3", {
        "method.descriptor_net": "target",  # on CIFAR-10 and FEMNIST
    }),
    ("pefll", "paper", PEFLL + "table 4", {
        "method.hyper_net": "single", "method.hidden": 100, "method.hidden_layers": 1,
    }),
    ("pefll", "paper", PEFLL + "appendix C.2", {
        "method.prediction": "batch", "method.batch_size": 32, "method.descriptor_size": "n/4",
        "method.local_steps": 50, "method.local_epochs": None,
        "method.weight_decay": 2 * 1e-3,  # the gradient of lambda |eta|^2
        "method.local_weight_decay": 2 * 5e-5,
    }),
    ("pefll", "paper", PEFLL + "appendix C.2: the values recommended by pFedHN", {
        "method.optimizer": "sgd", "method.lr": 1e-2, "method.momentum": 0.9,
    }),
    ("pefll", "paper", PEFLL + "algorithm 2, which has no such thing", {
        "method.clip": None, "method.local_clip": None, "method.standardize": False,
        "method.delayed_gradient": False,
    }),
    ("pefll", "official", PEFLL_CODE + "main", {
        "rounds": 5000, "cohort": 5, "evaluate_every": 30, "best": "zeroed_accuracy",
        "method.optimizer": "adam", "method.lr": 2e-4, "method.batch_size": 32,
        "method.local_steps": 50, "method.local_lr": 2e-3, "method.local_weight_decay": 5e-5,
        "method.descriptor_size": "1+n/4", "method.descriptor_net": "target",
        "method.hidden": 100, "method.hidden_layers": 3,
    }),
    ("pefll", "official", PEFLL_CODE + "train", {
        "method.weight_decay": 0.0,  # a setting that its Adam is not given
        "method.local_momentum": 0.9, "method.local_clip": 50.0, "method.clip": 50.0,
        "method.standardize": True, "method.hyper_net": "heads",
    }),
    ("pefll", "official", PEFLL_CODE + "evaluate", {"method.prediction": "all"}),
    ("fedavg per_fedavg fedrep pfedme knn_per pfedhn", "pefll", PEFLL + "section 5", {
        "rounds": 5000, "cohort": 0.05, "method.batch_size": 32,
    }),
    # pFedMe's inner steps are plain gradient steps, as its own paper recommends.
    ("fedavg per_fedavg fedrep knn_per pfedhn", "pefll", PEFLL + "section 5", {
        "method.local_momentum": 0.9,
    }),
    ("local", "pefll", PEFLL + "section 5: 200 epochs on each client", {
        "rounds": 200, "cohort": 1.0, "method.local_epochs": 1, "method.batch_size": 32,
        "method.local_momentum": 0.9,
    }),
    ("per_fedavg", "pefll", PEFLL + "appendix C.2", {
        "method.variant": "first_order", "method.local_epochs": 1,
    }),
    ("fedrep", "pefll", PEFLL + "appendix C.2", {
        "method.head_epochs": 5, "method.local_epochs": 1, "method.novel_epochs": 20,
    }),
    ("pfedme", "pefll", PEFLL + "appendix C.2", {
        "method.proximity": 15.0, "method.inner_steps": 3, "method.server_lr": 1.0,
        "method.novel_epochs": 20,
    }),
    ("knn_per", "pefll", PEFLL + "appendix C.2", {
        "method.scale": 100.0, "method.neighbours": (5, 10),
        "method.mixing": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    }),
    ("pfedhn", "pefll", PEFLL + "appendix C.2", {
        "method.novel_start": "random", "method.novel_rounds": 20, "method.novel_models": "fit",
    }),
    # IT-PFL-HN.
    ("itpfl", "paper", ITPFL + "section 6.1 and appendix C", {"rounds": 500, "cohort": 0.1}),
    ("itpfl", "paper", ITPFL + "appendix C", {
        "method.hidden_layers": 3, "method.hidden": 100, "method.local_momentum": 0.9,
        "method.encoder_units": 200, "task.val": 0.15,
    }),
    ("itpfl", "paper", ITPFL + "appendix C, what was searched", {
        "method.lr": RATES, "method.embedding_lr": RATES, "method.local_lr": RATES,
        "method.encoder_lr": RATES, "method.weight_decay": DECAYS,
        "method.embedding_weight_decay": DECAYS, "method.local_weight_decay": DECAYS,
        "method.local_epochs": OneOf((1, 2, 5, 10)), "method.batch_size": OneOf((32, 64)),
    }),
    ("itpfl", "paper", ITPFL + "equations 7 to 9", {
        "method.cohort_reduction": "sum", "method.encoder_reduction": "sum",
        "method.encoder": "regression", "method.standardize": False,
    }),
    ("itpfl", "paper", ITPFL + "appendix B: changes of the encoder are aggregated as FedAvg's", {
        "method.encoder_optimizer": "average",
    }),
    ("itpfl", "paper", ITPFL + "section 7: privacy is a variant", {
        "method.private": False, "method.epsilon": None,
    }),
    # pFedLA. Batch size, epochs and rates are missing in some copies of its text.
    ("pfedla heurpfedla", "paper", PFEDLA + "section 4.1", {
        "rounds": 600, "cohort": 1.0, "task.clients": 10,
    }),
    ("pfedla heurpfedla", "paper_100", PFEDLA + "section 4.1", {
        "rounds": 2500, "cohort": 0.1, "task.clients": 100,
    }),
    ("pfedla heurpfedla", "paper paper_100", PFEDLA + "section 4.1, the first division", {
        "task.partition": "equal_classes", "task.classes_per_client": 4, "task.novel": 0.0,
    }),
    ("pfedla heurpfedla", "paper paper_100", PFEDLA + "section 4.2", {
        "method.batch_size": 32, "method.local_lr": 1e-2, "method.lr": 1e-2,
        "method.local_momentum": 0.0, "method.local_weight_decay": 0.0, "method.local_clip": None,
    }),
    ("pfedla heurpfedla", "paper", PFEDLA + "section 4.2", {"method.local_epochs": 10}),
    ("pfedla heurpfedla", "paper_100", PFEDLA + "section 4.2", {"method.local_epochs": 20}),
    ("pfedla", "paper paper_100", PFEDLA + "section 3.2", {"method.retain": 0}),
    ("heurpfedla", "paper paper_100", PFEDLA + "tables 1 and 2", {"method.retain": 1}),
    # pFedKT and what it is compared to.
    ("pfedkt", "paper paper_cifar100", PFEDKT + "section 6.1", {
        "rounds": 500, "cohort": 0.1, "task.val": 0.1, "task.test": 0.1, "method.local_lr": 1e-2,
        "method.local_momentum": 0.9, "method.local_weight_decay": 5e-5, "method.batch_size": 64,
        "method.local_epochs": OneOf((10, 50, 100)), "method.lr": 5e-3,
    }),
    ("pfedkt", "paper paper_cifar100", PFEDKT + "table 2", {
        "method.hidden": 100, "method.chunk": 400,
    }),
    ("pfedkt", "paper", PFEDKT + "table 3", {
        "method.embedding_size": 13, "method.hidden_layers": 1, "method.contrast_weight": 1e-3,
        "method.margin": 0.1,
    }),
    ("pfedkt", "paper_cifar100", PFEDKT + "tables 3, 6 and 8", {
        "method.embedding_size": 51, "method.hidden_layers": 2, "method.contrast_weight": 1e-4,
        "method.margin": 5.0,
    }),
    ("pfedkt", "paper paper_cifar100", PFEDKT + "table 3: the best of tables 10 and 11", {
        "method.contrast": "triplet", "method.distance": "kl", "method.hypernetwork": True,
    }),
    ("pfedkt", "paper paper_cifar100", "MOON, section 4.1", {"method.temperature": 0.5}),
    ("lg_fedavg mapper fedphp fed_rod partialfed fml moon", "pfedkt", PFEDKT + "section 6.1", {
        "rounds": 500, "cohort": 0.1, "task.val": 0.1, "task.test": 0.1, "method.local_lr": 1e-2,
        "method.local_momentum": 0.9, "method.local_weight_decay": 5e-5, "method.batch_size": 64,
        "method.local_epochs": OneOf((10, 50, 100)),
    }),
    ("fed_rod", "pfedkt", PFEDKT + "section 6.1, baselines", {"method.head": "hypernetwork"}),

    # Baselines beyond those of the five papers, by their authors' code.
    ("fedphp", "official official_mmd", "FedPHP's code, train_lab.py and config.py", {
        "rounds": 1000, "cohort": 0.1, "task.clients": 100, "task.novel": 0.0,
        "method.local_epochs": 2, "method.batch_size": 64, "method.local_lr": 3e-2,
        "method.local_momentum": 0.9, "method.local_weight_decay": 1e-5, "method.local_clip": 100.0,
        "method.momentum": 0.9, "method.temperature": 4.0,
    }),
    ("fedphp", "official", "FedPHP's code, train_lab.py", {
        "method.transfer": "kd", "method.transfer_weight": 0.05,
    }),
    ("fedphp", "official_mmd", "FedPHP's code, train_lab.py", {
        "method.transfer": "mmd", "method.transfer_weight": 0.1,
    }),
    ("fedproto", "official", "FedProto's code, README.md (CIFAR-10), options.py and update.py", {
        "rounds": 110, "cohort": 1.0, "task.clients": 20, "task.novel": 0.0,
        "method.local_epochs": 1, "method.batch_size": 4, "method.local_lr": 1e-2,
        "method.local_momentum": 0.5, "method.local_weight_decay": 0.0,
        "method.prototype_weight": 0.1,
    }),
    ("fedpac", "official", "FedPAC's code, options.py, federated_main.py and fedpac.py", {
        "rounds": 200, "cohort": 1.0, "task.clients": 20, "task.novel": 0.0,
        "method.local_epochs": 5, "method.head_epochs": 1, "method.batch_size": 50,
        "method.local_lr": 2e-2, "method.head_lr": 0.1, "method.local_momentum": 0.5,
        "method.local_weight_decay": 5e-4, "method.alignment_weight": 1.0,
    }),
    ("fedas", "official", "FedAS's code, examples.sh and main.py", {
        "rounds": 40, "cohort": 0.1, "task.clients": 20, "task.novel": 0.0,
        "method.local_epochs": 5, "method.batch_size": 16, "method.local_lr": 5e-3,
        "method.local_momentum": 0.0, "method.local_weight_decay": 0.0,
    }),
    ("fedprox", "paper", "FedProx's code, run_fedprox.sh and its README's mu", {
        "cohort": 10, "evaluate_every": 1, "method.local_epochs": 20, "method.batch_size": 10,
        "method.local_momentum": 0.0, "method.local_weight_decay": 0.0, "method.proximity": 1.0,
    }),
    ("fedala gpfl feddbe", "official", "their code, run_me.sh and main.py", {
        "cohort": 1.0, "task.clients": 20, "task.novel": 0.0,
        "method.local_epochs": 1, "method.batch_size": 10, "method.local_lr": 5e-3,
        "method.local_momentum": 0.0, "method.local_weight_decay": 0.0,
    }),
    ("fedala", "official", "FedALA's code, run_me.sh and main.py", {
        "rounds": 1000, "method.weight_share": 0.8, "method.higher_layers": 1,
    }),
    ("fedala", "official", "FedALA's code, main.py (eta) and ALA.py", {
        "method.weight_lr": 1.0, "method.loss_threshold": 0.1, "method.loss_window": 10,
    }),
    ("fml", "default pfedkt", "FML's code, alpha and beta", {
        "method.label_weight": 0.5, "method.meme_label_weight": 0.5,
    }),
    ("gpfl", "official", "GPFL's code, run_me.sh, main.py and clientgp.py", {
        "rounds": 1000, "method.magnitude_weight": 0.01, "method.guidance_weight_decay": 0.1,
    }),
    ("feddbe", "official", "FedDBE's code, run_me.sh and main.py", {
        "rounds": 2000, "method.mean_weight": 50.0, "method.mean_momentum": 1.0,
    }),
]
# fmt: on

RUNS = sorted(
    {
        (method, preset)
        for methods, presets, *_ in PUBLISHED
        for method in methods.split()
        for preset in presets.split()
    }
)


def value_of(chosen: RunConfig, key: str) -> Any:
    path = key.replace("method.", "settings.").split(".")
    return reduce(lambda part, name: getattr(part, name, "no such key"), path, chosen)


@pytest.mark.parametrize(("method", "preset"), RUNS)
def test_a_preset_is_what_was_published(method: str, preset: str) -> None:
    chosen = config.load(method, [f"preset={preset}"])
    wrong = [
        f"{key} must be {'one of ' * isinstance(said, OneOf)}{said} ({place}), is {ours}"
        for methods, presets, place, settings in PUBLISHED
        if method in methods.split() and preset in presets.split()
        for key, said in settings.items()
        for ours in [value_of(chosen, key)]
        if ours not in (said if isinstance(said, OneOf) else [said])
    ]
    assert wrong == []


def test_of_the_clients_that_were_published_all_are_trained() -> None:
    joining = {
        (method, preset): config.load(method, [f"preset={preset}"]).task.novel_clients
        for method, module in METHODS.items()
        for preset, keys in module.PRESETS.items()
        if "task.clients" in keys
    }
    assert joining
    assert not any(joining.values())


@pytest.mark.parametrize(("clients", "length"), [(10, 3), (50, 13), (100, 26)])
def test_an_embedding_of_pfedhn_is_one_and_a_fourth_of_the_clients_long(
    clients: int, length: int
) -> None:
    """Section 5: floor(1 + n / 4), on its 10, 50 and 100 clients."""
    for method in ("pfedhn", "pfedhn_pc"):
        assert config.load(method, ["preset=paper"]).settings.length(clients) == length


def test_the_descriptors_of_pefll_are_as_long_as_its_paper_and_its_code_say() -> None:
    """Appendix C.2 has n/4, with the n of table 1; train.py int(1 + num_nodes / 4) of all."""
    outline = Outline({}, clients=90, classes=10, novel=10)
    for preset, length in (("paper", 90 // 4), ("official", 1 + 100 // 4)):
        settings: PefllConfig = config.load("pefll", [f"preset={preset}"]).settings
        assert settings.length(outline) == length


@pytest.mark.parametrize(
    ("method", "preset"), [("pfedhn", "default"), ("pfedhn_pc", "default"), ("itpfl", "paper")]
)
def test_embeddings_begin_as_those_of_the_code(method: str, preset: str) -> None:
    """models.py: an ``nn.Embedding``, whose entries are N(0, 1)."""
    settings = config.load(method, [f"preset={preset}"]).settings
    with seeded(0, "server"):
        server = METHODS[method].Server(Outline({"base": TwoLayers()}, 800, CLASSES), settings)
    entries = server.embeddings.weight
    assert entries.mean().item() == pytest.approx(0, abs=0.01)
    assert entries.std().item() == pytest.approx(1, rel=0.01)
    assert entries.pow(4).mean().item() == pytest.approx(3, rel=0.05)
