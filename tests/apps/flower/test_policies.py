"""A policy's file, and what is said of it in plain words."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import command
from hyperfed.apps.flower.policies import explain, read
from hyperfed.data import site
from hyperfed.engines.flower.policy import Policy
from hyperfed.errors import UserError


def test_what_a_file_does_not_name_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        'methods = ["fedavg"]\nsmallest_reply = 50\n[settings]\nlocal_steps = [10, 1000]\n'
    )
    settings = {"local_steps": (10.0, 1000.0)}
    assert read(path) == Policy(methods=("fedavg",), smallest_reply=50, settings=settings)
    path.write_text("")
    assert read(path) == read(None)
    assert "export" in read(None).refused_steps
    path.write_text(f"refused_steps = {[*Policy().refused_steps, 'keep', 'join']}")
    assert {"class_counts", "keep"} < {*read(path).refused_steps}
    assert not {"fedproto", "fedpac"} & {*(read(None).methods or ())}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smallest_batch = 0", "smallest_batch"),
        ("smallest_bach = 9", "smallest_bach"),
        ('epsilon = "much"', "epsilon"),
        ('methods = ["fedavgg"]', "names fedavgg"),
        ("methods = []", "name a method that the site runs, but methods is empty"),
        ("[settings]\nlocal_lr = [1]", "settings.local_lr"),
        ("[settings]\nlocal_stepz = [1, 2]", "bounds local_stepz"),
        ("[settings]\nlocal_steps = [1000, 10]", "bound local_steps .* has 1000 before 10"),
        ('refused_steps = ["exprt"]', "refuses exprt; did you mean 'export'"),
        ('refused_steps = ["memory"]', "refuses memory"),  # of a client, but no step
        ("val = 0.5\ntest = 0.5", r"leave examples to train on, .* = 0\.5 \+ 0\.5"),
        ('methods = ["a"]\nval = 0.5\ntest = 0.5', "names a, and must leave examples to train on"),
        ('methods = ["b", "a"]', "names a, b$"),
        ("smallest_batch = 0\nsmallest_bach = 9", "smallest_batch: .*; smallest_bach: "),
        ("methods = ", "must be a TOML file"),
        (f"smallest_batch = {'9' * 5000}", "must be a TOML file"),
        ("x = " + "[" * 100_000, "must be a TOML file"),
        (".".join("a" * 3000) + " = 1", "nested 32 deep"),
        ("x = [{" + ".".join("a" * 3000) + " = 1}]", "nested 32 deep"),
    ],
)
def test_a_wrong_file_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(os.devnull), Path.mkdir])
def test_nobody_waits_for_a_policy_that_is_no_file(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "policy.toml")
    with pytest.raises(UserError, match=r"must be a file, since it is read again.*policy\.toml"):
        read(tmp_path / "policy.toml")


def test_a_policy_at_home_is_that_of_each_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--policy=~/mine.toml`` comes as it stands: no shell expands it after a "="."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text("smallest_batch = 4\n")
    np.savez(tmp_path / "a.npz", x=np.zeros((30, 2)), y=np.zeros(30, int), client=["ann"] * 30)
    given = ["--data", str(tmp_path / "a.npz"), "--state", str(tmp_path / "s")]
    assert command("node", *given, "--policy=~/mine.toml", "--json") == 0
    start = shlex.split(json.loads(capsys.readouterr().out)["start"])
    assert read(Path(start[start.index("--policy") + 1])).smallest_batch == 4


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml is not"):
        read(tmp_path / "none.toml")


def test_a_check_says_what_a_server_could_learn(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    data, policy = tmp_path / "clinic.npz", tmp_path / "policy.toml"
    names = np.repeat(["ann", "bob", "cem"], [40, 6, 20])
    np.savez(data, x=np.zeros((66, 4)), y=np.arange(66) % 2, client=names)
    policy.write_text('methods = ["fedavg", "fedproto"]\nevaluations_per_day = 7\n')
    assert command("node", "--data", str(data), "--policy", str(policy), "--check") == 0
    said = capsys.readouterr().out
    for part in (
        "what fedavg, fedproto reply",
        "at least 11 different examples in batches of at least 8, but for the last of a pass",
        "at most 7 times a day",
        "epsilon 1 at delta 0.001 in all runs together",
        "bounds what they tell of any one example; answers of training are counted by what they "
        "tell of all of a client's examples at once",
        "fedproto reply with the mean features of each class",
        "Too small to reply: bob (1 of 3 clients)",
        "Too small to be evaluated: bob, cem (2 of 3 clients)",
        "Never run: export",
    ):
        assert part in said
    assert command("node", "--data", str(data), "--state", str(tmp_path / "s")) == 0
    assert "--policy" not in capsys.readouterr().out
    state = ["--state", str(tmp_path / "s"), "--policy", str(policy)]
    assert command("node", "--data", str(data), *state) == 0
    assert f"--policy {policy}" in capsys.readouterr().out


def test_who_has_less_than_a_batch_is_too_small_to_reply(tmp_path: Path) -> None:
    names = np.repeat(["ann", "bob"], [40, 60])  # 28 and 42 to train on
    np.savez(tmp_path / "a.npz", x=np.zeros((100, 2)), y=np.arange(100) % 2, client=names)
    said = explain(Policy(smallest_batch=32), site.read(tmp_path / "a.npz"))
    assert "Too small to reply: ann (1 of 2 clients)." in said


def test_a_check_says_what_masks_hide() -> None:
    policy = Policy(methods=("fedavg",), smallest_sum=4)
    shown = " ".join(explain(policy, None))
    assert "what fedavg reply, in the clear" in shown
    assert "In a run with masks, only the sums over at least 4 clients" in shown
    shown = " ".join(explain(replace(policy, masks_in_training=True), None))
    assert "sums over at least 4 clients of what fedavg reply" in shown
    assert "in the clear" not in shown


def test_a_sum_of_two_is_no_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("masks_in_training = true\nsmallest_sum = 2")
    with pytest.raises(UserError, match="smallest_sum"):
        read(path)
