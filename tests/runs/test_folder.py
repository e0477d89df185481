"""A run's folder: one process at a time, nothing half written, and what does not fit is refused."""

import fcntl
import json
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import hyperfed
from hyperfed.errors import UserError
from hyperfed.methods import fedper
from hyperfed.runs import config
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import Evaluation
from hyperfed.runs.run import CHECKPOINT_SECONDS, Run
from hyperfed.system.locks import Lock
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state, save_state
from toys import make_task

KEYS: dict[str, Any] = {
    "rounds": 6,
    "evaluate_every": 1,
    "checkpoint_every": 2,
    "method": {"local_steps": 1},
}


def stopped(folder: Path, rounds: int, method: str = "fedper", **keys: Any) -> RunFolder:
    run = Run.start(config.from_keys(method, KEYS | keys), folder, make_task())
    for progress in run.train():
        if progress.round == rounds:
            break
    assert run.folder is not None
    return run.folder


def test_a_second_process_is_refused_while_a_run_trains(tmp_path: Path) -> None:
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path, make_task())
    assert run.folder is not None
    training = run.train()
    for _ in range(3):
        next(training)
    before = run.folder.metrics.read_bytes()
    with pytest.raises(UserError, match="one process at a time"):
        Run.resume(run.folder.path, make_task())
    assert run.folder.metrics.read_bytes() == before
    assert Run.open(run.folder.path, make_task()).round == 2  # who reads it may
    training.close()
    resumed = Run.resume(run.folder.path, make_task())
    with pytest.raises(UserError, match="one process at a time"):
        next(run.train())
    list(resumed.train())
    assert resumed.summary["rounds"] == 6


@pytest.mark.parametrize(
    "name", ["log.txt", ".lock", "metrics.jsonl", "checkpoint/state.safetensors", "checkpoint"]
)
def test_a_run_writes_through_no_link(name: str, tmp_path: Path) -> None:
    """Somebody else made the folder, and whoever resumes it would write to the other end."""
    folder = stopped(tmp_path / "runs", 3)
    target = tmp_path / "elsewhere"
    folder.log.touch()
    (folder.path / name).rename(target)
    (folder.path / name).symlink_to(target)
    files = [target] if target.is_file() else list(target.iterdir())
    before = [file.read_bytes() for file in files]
    with pytest.raises(UserError, match=f"{name} must be no link, .* would go to {target}"):
        Run.resume(folder.path, make_task())
    assert [file.read_bytes() for file in files] == before
    assert Run.open(folder.path, make_task()).round == 2  # who reads it writes nothing


def test_who_opened_a_run_that_was_killed_spoils_no_record_by_training_it(tmp_path: Path) -> None:
    folder = stopped(tmp_path, 3)  # the checkpoint is of round 2
    before = folder.metrics.read_bytes()
    lines = before.splitlines(keepends=True)
    whole = [line for line in lines if b'"round":3' not in line]
    half = b"".join(whole) + lines[len(whole)][:9]  # as of a kill within a line
    for left in (before, half):
        folder.metrics.write_bytes(left)
        with pytest.raises(UserError, match=r"must end where .*, round 2, but has more.* resume"):
            list(Run.open(folder.path, make_task()).train())
        assert folder.metrics.read_bytes() == left
    assert hyperfed.resume(folder.path, make_task()).done
    Run.open(folder.path, make_task())


def test_who_opened_a_run_whose_end_was_broken_off_spoils_no_record(tmp_path: Path) -> None:
    task = make_task(novel=1)
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path, task)
    list(run.train())
    assert run.folder is not None
    run.folder.summary.unlink()
    with pytest.raises(UserError, match=r"must end where .*, round 6, but has more"):
        list(Run.open(run.folder.path, task).train())
    assert hyperfed.resume(run.folder.path, task).done


def test_who_opened_a_run_of_an_earlier_version_trains_it_on(tmp_path: Path) -> None:
    """Whose lines lack what has come since."""
    folder = stopped(tmp_path, 2)
    told = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for line in told:
        del line["client_zeroed_accuracy"]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in told))
    rounds = [progress.round for progress in Run.open(folder.path, make_task()).train()]
    assert rounds == [3, 4, 5, 6]


def test_an_end_that_was_broken_off_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are done, and it leaves the server as it is."""
    run, record = Run(config.from_keys("fedper", KEYS), make_task(novel=1)), Run._record

    def interrupted(self: Run, evaluation: Evaluation) -> None:
        record(self, evaluation)
        if evaluation.split == "novel":
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run.train())
    monkeypatch.setattr(Run, "_record", record)
    assert list(run.train()) == []
    assert run.summary["rounds"] == 6
    assert sum(e.split == "novel" for e in run.evaluations) == 1


def test_who_left_a_run_to_another_process_spoils_no_record(tmp_path: Path) -> None:
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path, make_task())
    assert run.folder is not None
    training = run.train()
    next(training)
    training.close()
    next(training := run.train())  # nobody was there meanwhile
    training.close()
    hyperfed.resume(run.folder.path, make_task())
    with pytest.raises(UserError, match="of a process that was killed or that went on"):
        list(run.train())
    assert Run.open(run.folder.path, make_task()).summary["rounds"] == 6


@pytest.mark.parametrize("opened", [False, True])
def test_of_a_run_that_is_done_nothing_remains_to_be_trained(opened: bool, tmp_path: Path) -> None:
    task = make_task(novel=1)
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path, task)
    list(run.train())
    assert run.folder is not None
    before = run.folder.metrics.read_bytes()
    again = Run.open(run.folder.path, task) if opened else run
    assert list(again.train()) == []
    assert run.folder.metrics.read_bytes() == before
    assert sum(e.split == "novel" for e in again.evaluations) == 1


def test_a_round_that_was_broken_off_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has changed of the server nobody knows, nor what is recorded of its evaluation."""
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path, make_task())
    assert run.folder is not None
    training, append = run.train(), RunFolder.append

    def interrupted(self: RunFolder, evaluation: Evaluation) -> None:
        append(self, evaluation)
        if evaluation.round == 2:
            raise KeyboardInterrupt

    next(training)
    monkeypatch.setattr(RunFolder, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(training)
    monkeypatch.setattr(RunFolder, "append", append)
    with pytest.raises(UserError, match=r"its latest was broken off; .* hyperfed\.resume"):
        list(run.train())
    assert hyperfed.resume(run.folder.path, make_task()).done


def test_who_cannot_resume_leaves_the_folder_to_others(tmp_path: Path) -> None:
    folder = stopped(tmp_path, 3)
    with pytest.raises(UserError, match="data_fingerprint"):
        Run.resume(folder.path, make_task(fingerprint="other"))
    resumed = Run.resume(folder.path, make_task())
    resumed.close()
    Lock(folder.path).release()


def test_where_there_are_no_locks_nobody_is_kept_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    Lock(tmp_path)
    Lock(tmp_path).release()


def test_who_waits_for_a_folder_has_it_when_the_other_lets_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, asked, flock = Lock(tmp_path), Event(), fcntl.flock

    def noted(file: int, how: int) -> None:
        asked.set()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", noted)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lock, tmp_path, wait=True)
        assert asked.wait(60)
        assert not waiting.done()
        held.release()
        waiting.result(60).release()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    folder = stopped(tmp_path, 3)
    left = [folder.path / ".metrics.jsonl.aa.tmp", folder.state.parent / ".state.bb.tmp"]
    for path in left:
        path.write_bytes(b"half")
    Run.resume(folder.path, make_task())
    assert not any(path.exists() for path in left)


def test_nobody_else_may_look_into_a_runs_folder(tmp_path: Path) -> None:
    folder = stopped(tmp_path, 1)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_metrics_are_on_the_disk_before_the_checkpoint_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = RunFolder.sync

    def watched(self: RunFolder) -> None:
        sync(self)
        done = load_state(self.state)[1]["round"] if self.state.exists() else 0
        synced.append(done)

    monkeypatch.setattr(RunFolder, "sync", watched)
    stopped(tmp_path, 6)
    assert synced == [0, 2, 4]  # each before its own


@pytest.mark.parametrize("kept", [0, 2, 3, 5])
def test_metrics_that_lack_an_evaluation_are_told(kept: int, tmp_path: Path) -> None:
    folder = stopped(tmp_path, 5)  # the checkpoint is of round 4
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(b"".join(lines[:kept]))
    with pytest.raises(UserError, match=f"lacks that of round {kept // 2 + 1};"):
        Run.resume(folder.path, make_task())
    folder.metrics.write_bytes(b"".join(lines))
    Run.resume(folder.path, make_task())


def test_a_checkpoint_that_is_gone_is_told_and_no_run_begins_again(tmp_path: Path) -> None:
    folder = stopped(tmp_path, 5)
    for path in folder.state.parent.iterdir():
        path.unlink()
    before = folder.metrics.read_bytes()
    with pytest.raises(UserError, match=r"must be there, since metrics\.jsonl has round 5"):
        Run.resume(folder.path, make_task())
    assert folder.metrics.read_bytes() == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    folder = stopped(tmp_path, 3, checkpoint_every=4)
    assert not folder.has_checkpoint
    resumed = hyperfed.resume(folder.path, make_task())
    assert [e.round for e in resumed.evaluations if e.split == "val"] == [1, 2, 3, 4, 5, 6]


def test_a_round_that_ends_long_after_the_last_checkpoint_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperfed.runs.run.CHECKPOINT_SECONDS", 0.0)
    assert stopped(tmp_path, 3, checkpoint_every=4).has_checkpoint


def test_how_long_a_run_goes_on_without_a_checkpoint_counts_from_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved = 0.0, []
    monkeypatch.setattr("hyperfed.runs.run.monotonic", lambda: now)
    run = Run.start(
        config.from_keys("fedper", KEYS | {"checkpoint_every": 9}), tmp_path, make_task()
    )
    assert run.folder is not None
    now = 5000.0  # what passes before it trains does not count
    for _ in run.train():
        saved.append(run.folder.has_checkpoint and load_state(run.folder.state)[1]["round"])
        now += 0.7 * CHECKPOINT_SECONDS
    assert saved == [False, False, 3, 3, 5, 6]  # the last at the run's end


def without(name: str) -> Any:
    def edit(tree: Tree, meta: dict[str, Any]) -> None:
        tree.pop(name, None)
        meta.pop(name, None)

    return edit


def meta(**changes: Any) -> Any:
    return lambda tree, said: said.update(changes)


def in_best(name: str, value: Any) -> Any:
    return lambda tree, said: tree["best"].update({name: value})


def in_body(edit: Any, of: Any = lambda tree: tree) -> Any:
    """Edits what the server holds of the only target."""
    return lambda tree, said: edit(of(tree)["server"]["body"]["base"])


TRUTHS = torch.ones(4) > 0
"""Of the shape of the body's bias."""

EDITS: dict[str, Any] = {
    "no server": without("server"),
    "no memory": without("memory"),
    "no round": without("round"),
    "no seconds": without("seconds"),
    "no bytes": without("bytes"),
    "no lost": without("lost"),
    "no best round": without("best_round"),
    "lost in words": meta(lost="nobody"),
    "lost in numbers": meta(lost=[[1]]),
    "bytes in words": meta(bytes="many"),
    "a round in words": meta(round="three"),
    "a round below zero": meta(round=-1),
    "a round after the last": meta(round=10**9),
    "bytes of no number": meta(bytes={"down": "a", "up": 0}),
    "another method": meta(method="fedavg"),
    "seconds in words": meta(seconds="1.0"),
    "failures in words": meta(failures="1"),
    "a best round in words": meta(best_round="1"),
    "another task": meta(task=1),
    "other data": meta(data_fingerprint="0"),
    "a server without a weight": in_body(lambda body: body.pop("body.bias")),
    "a server of truth values": in_body(lambda body: body.update({"body.bias": TRUTHS})),
    "a server of other shapes": in_body(lambda body: body.update({"body.bias": torch.ones(7)})),
    "a best server of other shapes": in_body(
        lambda body: body.update({"body.bias": torch.ones(7)}), of=lambda tree: tree["best"]
    ),
    "memory of nobody": lambda tree, said: tree["memory"].update(x={}),
    "a server whose round is none": lambda tree, said: tree["server"].update(round={}),
    "a best without a server": lambda tree, said: tree["best"].pop("server"),
    "a best of other counts": lambda tree, said: tree["best"]["val"].update(
        count=torch.ones(7, dtype=torch.int64)
    ),
    "data in colours": meta(data_fingerprint="\x1b[31m\n"),
    "a best without counts": lambda tree, said: tree["best"].pop("val"),
    "a best of a table": in_best("memory", {"x": {}}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_checkpoint_that_somebody_edited_is_refused(edit: str, tmp_path: Path) -> None:
    """Well digested, so that nothing but what it says is wrong."""
    folder = stopped(tmp_path, 3)
    tree, said = load_state(folder.state)
    EDITS[edit](tree, said)
    save_state(folder.state, tree, said)
    with pytest.raises(UserError) as refused:
        Run.resume(folder.path, make_task())
    assert str(refused.value).isprintable()
    Lock(folder.path).release()  # it left it to others


def in_optimizer(parameter: str, name: str, value: Any) -> Any:
    """Another tensor of what the optimiser knows of a parameter; None takes it away."""

    def edit(tree: Tree) -> None:
        kept = tree["server"]["optimizer"][parameter]
        kept.pop(name) if value is None else kept.update({name: value})

    return edit


def in_memory(value: Any) -> Any:
    return lambda tree: tree["memory"].update(dict.fromkeys(tree["memory"], value))


USED: dict[str, tuple[str, Any]] = {
    "a head of other shapes": ("fedper", in_memory({"head": {"head.weight": torch.ones(2)}})),
    "a head that is a number": ("fedper", in_memory({"head": torch.ones(2)})),
    "a model without its layers": ("fedas", in_memory({"model": {"body.bias": torch.ones(4)}})),
    # Fused, a step would read and write behind them.
    "a momentum of one number": ("pfedhn", in_optimizer("1", "momentum_buffer", torch.ones(()))),
    "a momentum too short": ("pfedhn", in_optimizer("1", "momentum_buffer", torch.ones(3))),
    "an average too short": ("pefll", in_optimizer("0", "exp_avg", torch.ones(3))),
    "steps of no number": ("pefll", in_optimizer("0", "step", torch.ones(2))),
    "an average that is not there": ("pefll", in_optimizer("0", "exp_avg", None)),
    "a parameter that is not there": (
        "pfedhn",
        lambda tree: tree["server"]["optimizer"].update({"99": {"momentum_buffer": torch.ones(1)}}),
    ),
}
"""What the methods' own code would fall over: where that can be seen, before, else at first use."""


@pytest.mark.parametrize("edit", USED)
def test_what_cannot_be_gone_on_from_is_refused_where_it_is_used(edit: str, tmp_path: Path) -> None:
    method, change = USED[edit]
    folder = stopped(tmp_path, 3, method)
    tree, said = load_state(folder.state)
    change(tree)
    save_state(folder.state, tree, said)
    with pytest.raises(UserError, match="must be one that this run wrote, but does not fit"):
        list(Run.resume(folder.path, make_task()).train())
    Lock(folder.path).release()


@pytest.mark.parametrize(
    "use",
    [
        Run.evaluate_best,
        lambda run: run.model(0),
        lambda run: run.served_otherwise(["serve.finetune_steps=1"]).evaluate_best(),
        lambda run: pickle.loads(pickle.dumps(run)).model(0),
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_a_memory_that_does_not_fit_is_told_where_it_is_served(
    use: Any, opened: bool, tmp_path: Path
) -> None:
    folder = stopped(tmp_path, 3)
    trained = Run.resume(folder.path, make_task())
    list(trained.train())
    tree, said = load_state(folder.state)
    in_memory({"head": torch.ones(2)})(tree["best"])
    save_state(folder.state, tree, said)
    run = Run.open(folder.path, make_task())
    if opened:
        with pytest.raises(UserError, match="must be one that this run wrote, but does not fit"):
            use(run)
    else:  # nothing is the checkpoint's fault where it was not read
        trained.best.memory[0] = {"head": torch.ones(2)}
        with pytest.raises(Exception, match=r".") as raised:
            use(trained)
        assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("method", ["fedas", "pfedhn", "pefll"])
def test_what_nobody_edited_is_gone_on_from(method: str, tmp_path: Path) -> None:
    resumed = Run.resume(stopped(tmp_path, 3, method).path, make_task())
    list(resumed.train())
    assert resumed.summary["rounds"] == 6


@pytest.mark.parametrize("resumed", [False, True])
def test_a_method_that_falls_over_later_is_not_the_checkpoint_s_fault(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(self: fedper.Client, received: Tree) -> Tree:
        if self.round == 5:
            raise RuntimeError("a bug")
        counts: Tree = whole(self, received)
        return counts

    whole = fedper.Client.evaluate
    evaluate.__dict__["step"] = whole.__dict__["step"]
    monkeypatch.setattr(fedper.Client, "evaluate", evaluate)
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path, make_task())
    if resumed:
        run = Run.resume(stopped(tmp_path, 3).path, make_task())
    with pytest.raises(RuntimeError, match="a bug"):
        list(run.train())
