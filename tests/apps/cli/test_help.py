"""``--help``, and what the shell completes."""

import pytest
import typer
from click.shell_completion import ShellComplete

from hyperfed.apps import completion
from hyperfed.apps.cli import app


class TestHelp:
    def test_says_what_is_required_and_asks_once(self, cli):
        outcome = cli("resume", "--help")
        assert "The folder of a run.  [required]" in outcome.out
        assert "\\[" not in outcome.out
        wrong = cli("lsit")
        assert (wrong.code, wrong.err.count("Did you mean")) == (2, 1)

    def test_says_of_each_command_in_a_line_what_it_does(self, cli):
        _, _, commands = cli("--help").out.partition("Commands:\n")
        assert len(commands.splitlines()) == len(app.registered_commands)
        assert "..." not in commands  # cut off

    @pytest.mark.parametrize(
        ("words", "begun", "completed"),
        [
            (["run"], "fedr", {"fedrep"}),
            (["run"], "al", {"all"}),
            (["run", "pefll"], "method.local_c", {"method.local_clip="}),
            (["run", "fedavg"], "method.desc", set()),
            (["run", "pefll"], "task.partition=dirichlet_", {
                "task.partition=dirichlet_equal",
                "task.partition=dirichlet_per_class",
            }),
            (["run", "pefll"], "task=cifar100_", {"task=cifar100_coarse"}),
            (["run", "pefll"], "task.model=lenet_", {"task.model=lenet_bn"}),
            (["run", "pefll"], "engine.graphs=t", {"engine.graphs=true"}),
            (["resume", "RUN"], "engine.g", {"engine.graphs=", "engine.gpus_per_worker="}),
            (["resume", "RUN"], "ro", {"rounds="}),
            (["resume", "RUN"], "engine=v", {"engine=vmap"}),
            (["resume", "RUN"], "robust.agg", set()),
            (["reproduce", "pefll/table1"], "engine.gr", {"engine.graphs="}),
            (["reproduce", "pefll/table1"], "ro", set()),
            (["list", "keys"], "pfedhn_", {"pfedhn_pc"}),
            (["list", "experiments"], "pefll/f", {"pefll/fig3", "pefll/fig4"}),
            (["reproduce"], "pfedkt/table12", {"pfedkt/table12"}),
        ],
    )  # fmt: skip
    def test_the_shell_completes(self, words, begun, completed):
        group = typer.main.get_command(app)
        shell = ShellComplete(group, {}, "hyperfed", "_HYPERFED_COMPLETE")
        assert {item.value for item in shell.get_completions(words, begun)} == completed

    @pytest.mark.parametrize("folder", ["", "./", "own/", "../here/own/", "/"])
    def test_the_shell_completes_a_file_where_it_was_begun(self, tmp_path, monkeypatch, folder):
        here = tmp_path / "here"
        (here / "own").mkdir(parents=True)
        for path in (here / "mine.toml", here / "own" / "mine.toml", here / "other.toml"):
            path.touch()
        monkeypatch.chdir(here)
        begun = f"{here}/mi" if folder == "/" else f"{folder}mi"
        assert completion.sources(begun) == [f"{begun}ne.toml"]
        assert completion.sources(f"{folder}m**") == []
