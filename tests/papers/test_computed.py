"""Tables that are computed: pFedKT's table 12 as its one command makes it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperfed.apps.catalogue import Kind, entries
from hyperfed.apps.cli import main
from hyperfed.errors import UserError
from hyperfed.papers import computed, report
from hyperfed.papers.computed import Number
from hyperfed.runs import config, experiments

ROOT = Path(__file__).parents[2] / "experiments"
TABLE = "pfedkt/table12"


def test_a_command_computes_the_table_and_the_report_sets_it_beside_the_published(
    tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["reproduce", TABLE, "--experiments", str(ROOT), "--out", str(tmp_path)])
    assert leaving.value.code == 0
    with pytest.raises(SystemExit, match="2"):  # nothing is trained that settings could be of
        main(["reproduce", TABLE, "device=cpu", "--experiments", str(ROOT), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main(["reproduce", TABLE, "--experiments", str(ROOT), "--out", "/dev/null"])
    path = tmp_path / "pfedkt" / "table12.json"
    assert capsys.readouterr().out == f"{path}\n"
    record = json.loads(path.read_text())
    assert record["command"] == f"hyperfed reproduce {TABLE}"
    assert {"commit", "versions", "networks"} <= set(record)
    target, small = 1_706_458, 13 * 100 + 100 * 100 + 100 * 400
    large = 13 * 100 + 100 * 100 + 100 * target  # without biases, which cost no FLOPs
    numbers = record["numbers"]
    assert numbers["target_parameters"] == target
    assert numbers["small_flops"] == 2 * small == 102_600
    assert numbers["small_parameters"] == small + 100 + 100 + 400
    assert numbers["large_mebibytes"] == (large + 200 + target) * 4 / 2**20
    assert numbers["large_generation"] == 2 * large * 4 / 2**30
    assert numbers["small_generation"] == 4267 * 102_600 * 4 / 2**30
    assert numbers["clients"] == pytest.approx((large + 200 + target) / (small + 600))
    with_embeddings = small + 600 + 4267 * 13
    assert numbers["small_mebibytes_with_embeddings"] == with_embeddings * 4 / 2**20
    ratios = dict(record["ratio"])
    assert ratios[400] == numbers["ratio"] == pytest.approx(4267 * 2 * small / (2 * large))
    assert list(ratios.values()) == sorted(ratios.values(), reverse=True)  # figure 9 (a)
    assert 1 < ratios[12800] < 1.02

    (table,) = computed.find_all(ROOT)
    others = [experiments.find(f"{paper}/table1", ROOT) for paper in ("pefll", "pfedkt")]

    def reported(paper: str) -> report.Report:
        return report.of_papers(tmp_path, others, paper, computed=[table])

    made = reported("pfedkt")
    for told in (
        "| parameters of the private model | appendix G.1 | 1,706,458 | 1,706,458 | **reproduced**",
        "| small hypernetworks that take as much storage as the large one | appendix G.2 | 3,321 |",
        "| appendix G.1 | 1.6306 | 1.6309 | differs |",  # which has 4,266.145 calls
        "| appendix G.2 | 657 | 658 | **reproduced** |",  # cut off
        "| appendix G.2 | – | 0.41 | – |",
    ):
        assert told in made.text
    assert "ratio of FLOPs" in made.figures[f"{TABLE}-ratio"]
    assert TABLE not in reported("pefll").text
    path.write_text("{}")
    with pytest.raises(UserError, match=r"table12\.json must hold the numbers of pfedkt/table12"):
        reported("pfedkt")
    path.unlink()
    assert f"Not computed yet. `hyperfed reproduce {TABLE}` does so." in reported("pfedkt").text


@pytest.mark.parametrize(
    ("published", "digits", "value", "reproduced"),
    [
        (1.28, 2, 1.2826, True),
        (1.28, 2, 1.2899, True),  # cut off
        (1.28, 2, 1.2751, True),  # rounded
        (1.28, 2, 1.2749, False),
        (1.28, 2, 1.2901, False),
        (657, 0, 657.5, True),
        (657, 0, 656.4, False),
        (None, 0, 1.0, None),
    ],
)
def test_a_number_is_the_published_one_rounded_or_cut_off(
    published: float | None, digits: int, value: float, reproduced: bool | None
) -> None:
    assert Number("it", "there", published, digits).reproduced(value) is reproduced


def test_such_a_table_is_not_trained_and_says_so(tmp_path: Path) -> None:
    file = ROOT / "pfedkt" / "table12.toml"
    with pytest.raises(UserError, match="computed and not trained; hyperfed reproduce pfedkt/tab"):
        config.load(str(file))
    told = {entry["experiment"]: entry["about"] for entry in entries(Kind.EXPERIMENTS, ROOT)}
    assert str(told["pfedkt/table12"]).endswith("(computed)")
    with pytest.raises(UserError, match="computed: hyperfed reproduce pfedkt/table12"):
        entries(Kind.EXPERIMENTS, ROOT, "pfedkt/table12")
    other = tmp_path / "pfedkt" / "table12.toml"
    other.parent.mkdir()
    other.write_text(file.read_text().replace("numbers.calls", "numbers.calls_of_it"))
    with pytest.raises(UserError, match="numbers of pfedkt/table12 must be of target_parameters,"):
        computed.write(computed.read(other), tmp_path)
    other.write_text(file.read_text().replace("chunk = 400", "chunk = 0\nwide = 1"))
    with pytest.raises(UserError, match=r"(?s)networks\.chunk: .* greater than 0.*networks\.wide"):
        computed.read(other)
    assert computed.find("pfedhn/table1", ROOT) is None
