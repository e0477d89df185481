"""The table of numbers in docs/security.md: each is the length of a list that tests go through."""

import json
import re
from pathlib import Path

from data import test_hostile as tables
from data import test_site as archives
from engines.flower import hostile as replies
from engines.flower import test_grid as grid
from engines.flower import test_hostile as sites
from engines.flower import test_masked as masked
from engines.flower import test_pairwise as pairwise
from engines.flower import test_policy as policy
from engines.flower import test_private_site as private
from engines.flower import test_sites as introductions
from runs import test_edits as edits
from runs import test_folder as checkpoints
from runs import test_hostile as lies
from runs import test_kill as kills

PAGE = Path(__file__).parents[1] / "docs" / "security.md"

IN_TRAINING = replies.UNREADABLE | replies.UNUSABLE | replies.LIES
IN_EVALUATION = replies.UNREADABLE | replies.UNUSABLE | replies.MISCOUNTED

NUMBERS = {
    "replies of a site in training": (len(IN_TRAINING), 60),
    "replies of a site in an evaluation": (len(IN_EVALUATION), 30),
    "replies of a site that are no message of Flower": (len(grid.FORGED), 9),
    "poison of a client": (len(lies.ATTACKS), 15),
    "failures of an honest site": (len(sites.FAILURES), 10),
    "departures of a server": (len(policy.DEPARTURES) + len(private.RESETS), 10),
    "attempts of a server at masked sums": (len(pairwise.REFUSED), 20),
    "garbage of a site in masked sums": (len(masked.EXCHANGES) * len(masked.GARBAGE), 15),
    "introductions of a site": (len(introductions.IMPOSSIBLE) + len(introductions.RAW), 30),
    "edits of a run's files": (
        len(edits.CASES) + len(checkpoints.EDITS) + len(checkpoints.USED),
        40,
    ),
    "hostile archives, tables and images": (len(archives.HOSTILE) + len(tables.FILES), 40),
    "folders that name data elsewhere": (len(tables.ELSEWHERE), 5),
}
"""What is tried -> cases that there are, and how many there must be."""


def test_as_many_runs_are_killed_as_the_table_says() -> None:
    each, runs = kills.KILLS, len(kills.KILLED)
    assert f"| {each} in a row of each of {runs} |" in PAGE.read_text(encoding="utf-8")
    assert each * runs >= 40


def test_the_table_counts_what_the_tests_go_through() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = re.findall(r"^\| ([^|]+) \| (\d+) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert {what: int(number) for what, number in told} == {w: n for w, (n, _) in NUMBERS.items()}
    assert [what for what, (number, least) in NUMBERS.items() if number < least] == []


def test_what_it_costs_is_what_the_record_says() -> None:
    record = PAGE.parents[1] / "results" / "benchmarks" / "robust-2cores.json"
    found: dict[tuple[str, ...], list[str]] = {}
    for b in json.loads(record.read_text(encoding="utf-8"))["benchmarks"]:
        info = b["extra_info"]
        share = info["share_of_a_round"]
        parts = (info["together"], share["check of the state"] + share["bound on replies"])
        found[tuple(b["params"].values())] = [f"{part:.2%}".replace("%", " %") for part in parts]
    told = " ".join(PAGE.read_text(encoding="utf-8").partition("**What this costs**")[2].split())
    methods, where = ("fedavg", "pfedhn", "pefll"), ("LeNet", "digits")
    (nets, _), (digits, without) = (
        zip(*(found[task, method] for method in methods), strict=True) for task in where
    )
    assert f"{nets[0]} of FedAvg, {nets[1]} of pFedHN and {nets[2]} of PeFLL" in told
    assert f"and {digits[0]}, {digits[1]} and {digits[2]} on the digits" in told
    assert f"of which {without[0]}, {without[1]} and {without[2]} are bound and check" in told
