"""What the tools that make ``results/`` have in common: grids of rates, and records of runs."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import hyperfed

ROOT = Path(__file__).parents[1]

SEEDS, OTHER_SEED = (0, 1, 2), 3
"""Divisions that records are of, and the one by whose validation data rates are chosen."""

BEYOND = 3.0
"""By what a rate at the end of those tried is multiplied, or divided, to go on."""

KEPT = ("config.toml", "metrics.jsonl", "summary.json")
"""What a record is of the files of a run, the summary last: with it a record is whole."""


@dataclass(frozen=True)
class Grid:
    """What was reached on validation data at each point, one line of a file for each.

    Attributes:
        file: of lines {..., "rates": {setting: rate}, "val_accuracy": from 0 to 1}, where ... says
            what was trained.
    """

    file: Path

    def points(self, of: Mapping[str, str]) -> list[dict[str, Any]]:
        """Returns the lines of what was trained, in the order in which they were found."""
        every = map(json.loads, self.file.read_text().splitlines()) if self.file.exists() else ()
        return [point for point in every if of.items() <= point.items()]

    def search(
        self,
        of: Mapping[str, str],
        local_rates: Sequence[float],
        second_rates: Sequence[Mapping[str, float]],
        train: Callable[[Mapping[str, float]], hyperfed.Run],
    ) -> None:
        """Trains what is missing: each local rate, then at the best of them the second's others.

        Args:
            of: what is trained.
            local_rates: values of ``local_lr``.
            second_rates: {setting: value} of another rate of the method, the first of which the
                local ones are tried with; none where it has no other.
            train: takes the rates.
        """
        first, *others = second_rates or [{}]
        best = max(
            local_rates, key=lambda rate: self.reached(of, {"local_lr": rate, **first}, train)
        )
        for second in others:
            self.reached(of, {"local_lr": best, **second}, train)

    def go_beyond(
        self, of: Mapping[str, str], train: Callable[[Mapping[str, float]], hyperfed.Run]
    ) -> None:
        """Goes on for as long as a rate of the best point is the least or the greatest tried.

        Args:
            of: what is trained, and was searched before.
            train: takes the rates.
        """
        while rates := self._beyond(of):
            self.reached(of, rates, train)

    def _beyond(self, of: Mapping[str, str]) -> dict[str, float] | None:
        """Returns the next point to try; None where the best is at no end."""
        best, points = self.best(of), self.points(of)
        for name, rate in best.items():
            tried = [point["rates"][name] for point in points]
            for end, factor in ((max(tried), BEYOND), (min(tried), 1 / BEYOND)):
                if rate == end:
                    return best | {name: float(f"{rate * factor:.2g}")}
        return None

    def reached(
        self,
        of: Mapping[str, str],
        rates: Mapping[str, float],
        train: Callable[[Mapping[str, float]], hyperfed.Run],
    ) -> float:
        """Returns what is reached at a point, which is trained unless the file has it."""
        for point in self.points(of):
            if point["rates"] == rates:
                return float(point["val_accuracy"])
        name = " ".join(of.values())
        try:
            accuracy = float(train(rates).summary["val_accuracy"] or 0.0)  # none where all diverged
        except hyperfed.UserError as error:
            print(f"{name} {rates}: {error}", flush=True)
            accuracy = 0.0
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as lines:
            line = {**of, "rates": dict(rates), "val_accuracy": accuracy}
            lines.write(json.dumps(line) + "\n")
        print(f"{name:16}{rates}  validation {accuracy:.3f}", flush=True)
        return accuracy

    def best(self, of: Mapping[str, str]) -> dict[str, float]:
        """Returns the rates of the best point of what was trained.

        Raises:
            UserError: there is no point of it.
        """
        if not (points := self.points(of)):
            name = " ".join(of.values())
            raise hyperfed.UserError(f"rates of {name} must be in {self.file}; run grid before")
        best = max(points, key=lambda point: float(point["val_accuracy"]))
        return dict(best["rates"])


def record(folder: Path, rates: Mapping[str, float], train: Callable[..., hyperfed.Run]) -> None:
    """Makes a record that is not there yet, of a run that is trained into a folder for the time.

    Args:
        folder: of the record, which takes the place of one with other rates.
        rates: {setting of the method: value} that ``train`` takes.
        train: takes the folder of the run as ``out``.
    """
    if (folder / KEPT[-1]).exists():
        made_with = tomllib.loads((folder / KEPT[0]).read_text())["method"]
        if rates.items() <= made_with.items():
            return
    with TemporaryDirectory() as out:
        run = train(out=Path(out))
        if folder.exists():
            rmtree(folder)
        keep(run, folder)
    reached = {who: run.summary.get(f"{who}_accuracy") for who in ("test", "novel")}
    told = [f"{who} {accuracy:.3f}" for who, accuracy in reached.items() if accuracy is not None]
    print(" ".join(folder.parts[-2:]).ljust(28), *told, flush=True)


def keep(run: hyperfed.Run, folder: Path) -> None:
    """Copies what a record has of a run; files of this project are called as they are in it."""
    assert run.folder is not None  # a run with out=... has one
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        written = (run.folder.path / name).read_text()
        (folder / name).write_text(written.replace(f"{ROOT}/", ""))
