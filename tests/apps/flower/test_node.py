"""A site's node: what it answers, what it makes of what goes wrong, and what it is told to be."""

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZipFile

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

from commands import command
from engines.flower.deployment import write_certificates, write_node_key
from hyperfed.apps.flower import app, commands, node
from hyperfed.apps.flower.app import NodeConfig
from hyperfed.apps.flower.executor import CrashedError, FailedError
from hyperfed.apps.flower.node import LARGEST_SETTINGS, Node, SuperLink
from hyperfed.engines.flower import diary
from hyperfed.engines.flower.diary import told_by
from hyperfed.engines.flower.grid import WHOLE, bytes_of, record_of
from hyperfed.engines.flower.sites import STEP
from hyperfed.engines.flower.wire import WireError
from hyperfed.errors import UserError

READ = node.defaults_in
RUN = 7
SETTINGS = {"settings": "", "folder": "x"}


class Stop(BaseException):
    """Ends a node that has nothing more to do."""


class Connection:
    """What Flower's connection is made of, with messages that are waiting."""

    def __init__(self, *contents: bytes) -> None:
        self.objects: dict[str, bytes] = {}
        self.waiting: list[Any] = [self.announced(content) for content in contents]
        self.confirmed: list[str] = []
        self.replies: list[tuple[Message, str]] = []
        self.asked_for_run = 0
        self.ended = False
        self.bundle = b""
        self.overrides: dict[str, Any] = {}

    def announced(self, content: bytes) -> tuple[Message, Any]:
        message = Message(record_of(content), 5, STEP)
        message.metadata.__dict__["_run_id"] = RUN
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            for name, each in get_all_nested_objects(message).items():
                self.objects[name] = each.deflate()
            return message, get_object_tree(message)

    def receive(self) -> Any:
        if not self.waiting:
            raise Stop
        return self.waiting.pop(0)

    def send(self, reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        assert seconds >= 0
        self.replies.append((reply, tree.object_id))
        return {part.object_id for part in iterate_object_tree(tree)}, "session"

    def get_run(self, run: int) -> Run:
        self.asked_for_run += 1
        if self.ended:
            raise RunNotRunningException
        return replace(Run.create_empty(run), override_config=self.overrides)

    def pull(self, run: int, name: str) -> bytes:
        return self.objects[name]

    def push(self, run: int, session: str, name: str, content: bytes) -> None:
        assert (run, session) == (RUN, "session")
        self.objects[name] = content

    def confirm(self, run: int, name: str) -> None:
        self.confirmed.append(name)

    def parts(self) -> tuple[Any, ...]:
        get_fab = lambda name, run: type("Fab", (), {"content": self.bundle})  # noqa: E731
        return (
            3, self.receive, self.send, self.get_run, get_fab, self.pull, self.push, self.confirm
        )  # fmt: skip

    def contents(self) -> list[bytes]:
        """What arrived at the SuperLink, put together again."""
        return [
            bytes_of(inflate_object_from_contents(name, dict(self.objects)).content)
            for _, name in self.replies
        ]


class Calls:
    """An executor that does as it is told."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.calls = list(outcomes), []

    def call(self, *arguments: Any) -> bytes:
        self.calls.append(arguments)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def at_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("_task_id", 1), ("_run_id", RUN), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr(node, "defaults_in", lambda bundle: SETTINGS)


def serve(connection: Connection, calls: Calls, **options: Any) -> list[str]:
    said: list[str] = []
    config = NodeConfig(state="s", data="d", **options)
    with pytest.raises(Stop):
        Node(connection.parts(), calls, config, said.append).run()
    return said


@pytest.mark.parametrize("size", [3, WHOLE + 1])
def test_messages_are_answered_and_their_runs_asked_for_once(size: int) -> None:
    connection, calls = Connection(b"a" * size, b"b"), Calls(b"A" * size, b"B")
    identities = [message.metadata.message_id for message, _ in connection.waiting]
    serve(connection, calls)
    config = {"state": "s", "data": "d", "device": "cpu"}
    assert [call[:3] for call in calls.calls] == [
        (STEP, b"a" * size, SETTINGS), (STEP, b"b", SETTINGS)
    ]  # fmt: skip
    assert {key: value for key, value in calls.calls[0][3].items() if value} == config
    assert connection.contents() == [b"A" * size, b"B"]
    replied_to = [reply.metadata.reply_to_message_id for reply, _ in connection.replies]
    assert replied_to == identities == connection.confirmed
    assert connection.asked_for_run == 1


RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
HIDDEN = "its node's log says more"


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        (FailedError("UserError: got 'HIV positive' at 40"), RAISED, f"UserError: {HIDDEN}"),
        (FailedError("ValueError: 'Jane Doe': no number"), RAISED, f"ValueError: {HIDDEN}"),
        (FailedError("MemoryError"), RAISED, f"MemoryError: {HIDDEN}"),
        (FailedError("RefusedError: task.val"), RAISED, "RefusedError: task.val"),
        (FailedError("WireError: the header"), RAISED, "WireError: the header"),
        (CrashedError("it ended"), ErrorCode.CLIENT_APP_CRASHED, "it ended"),
    ],
)
def test_a_message_that_fails_is_answered_by_what_quotes_no_data_and_the_next_one_served(
    outcome: Exception, code: int, told: str
) -> None:
    connection = Connection(b"a", b"b")
    said = serve(connection, Calls(outcome, b"B"))
    (failed, _), (fine, _) = connection.replies
    assert (failed.error.code, failed.error.reason) == (code, told)
    assert fine.has_content()
    assert any(str(outcome) in line for line in said)


def test_a_message_without_an_answer_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that a site's process answers, it notes each call itself."""
    policy = tmp_path / "policy.toml"
    policy.write_text("largest_message = 1")
    serve(Connection(b"a" * (3 << 20)), Calls(), policy=str(policy))
    why = "RefusedError: task.val must be 0.15 here\n, came 0.3"
    serve(Connection(b"a", b"b", b"c"), Calls(FailedError(why), b"B", CrashedError("it ended")))
    monkeypatch.setattr(node, "defaults_in", READ)
    serve(Connection(b"a"), Calls())
    notes = [json.loads(line) for line in Path("s/audit.jsonl").read_text().splitlines()]
    assert [(note["run"], note["kind"]) for note in notes] == [(RUN, STEP)] * 4
    large, *others = (note["decision"] for note in notes)
    assert large.startswith("refused: a message must have 1 bytes at most, has")
    assert others == [
        "refused: task.val must be 0.15 here\\n, came 0.3",
        "it ended",
        "BadZipFile: File is not a zip file",
    ]
    assert told_by(Path("s")).calls == 4
    assert told_by(Path("s")).refused == 2


def test_what_a_killed_message_left_of_the_data_is_removed_at_once(tmp_path: Path) -> None:
    copy = tmp_path / "s" / "reading-abc"
    copy.mkdir(parents=True)
    (copy / "train.arrow").write_bytes(b"rows")
    serve(Connection(b"a"), Calls(CrashedError("it ended")))
    assert not copy.exists()


def test_a_message_is_replied_to_also_where_that_cannot_be_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diary, "append_line", full)
    connection = Connection(b"a", b"b")
    said = serve(connection, Calls(FailedError("KeyError: 'w'"), b"B"))
    assert connection.replies[0][0].has_error()
    assert any("this is not in the audit log: no space left" in line for line in said)
    assert connection.replies[1][0].has_content()


def full(*_: Any) -> None:
    raise UserError("no space left")


@pytest.mark.parametrize(
    ("rules", "size", "why"),
    [
        ("largest_message = 1", 3 << 20, "must have 1 bytes at most, has"),
        ("largest_message = 23068672", 25 << 20, "must have 23068672 bytes at most"),  # in parts
    ],
)
def test_a_message_that_is_too_large_is_not_fetched_to_its_end(
    rules: str, size: int, why: str, tmp_path: Path
) -> None:
    """What fetches it is the process that serves all others, whose memory nothing bounds."""
    policy = tmp_path / "policy.toml"
    policy.write_text(rules)
    connection, calls = Connection(os.urandom(size), b"b"), Calls(b"B")
    said = serve(connection, calls, policy=str(policy))
    (refused, _), (fine, _) = connection.replies
    assert why in refused.error.reason
    assert any(why in line for line in said)
    assert fine.has_content()
    assert len(calls.calls) == len(connection.confirmed) == 1


def test_a_message_whose_parts_do_not_come_keeps_nobody_waiting_for_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server announces a message and never sends it, or dies over it."""
    monkeypatch.setattr(node, "PATIENCE", 0.0)
    monkeypatch.setattr(node, "PAUSE", 0.0)
    connection, asked = Connection(b"a", b"b"), []
    late, pull = connection.waiting[0][1].object_id, connection.pull

    def pulled(run: int, name: str) -> bytes:
        if name != late:
            return pull(run, name)
        asked.append(name)
        if len(asked) > 9:
            raise Stop
        raise ObjectUnavailableError(name)

    connection.pull = pulled  # type: ignore[method-assign]
    said = serve(connection, Calls(b"B"))
    (failed, _), (fine, _) = connection.replies
    assert failed.error.reason == f"UserError: {HIDDEN}"
    assert any("all parts of a message must come within" in line for line in said)
    assert "all parts of a message" in Path("s/audit.jsonl").read_text()
    assert fine.has_content()


def test_a_policy_that_is_gone_is_told_at_once() -> None:
    connection = Connection(b"a")
    said = serve(connection, Calls(), policy="/nowhere/policy.toml")
    assert connection.replies[0][0].error.reason == f"UserError: {HIDDEN}"
    assert any("--policy must be a TOML file" in line for line in said)


def test_a_log_of_a_node_takes_one_short_line_of_what_a_server_sent() -> None:
    evil = FailedError("\x1b[2J\n" + "x" * 10**7)
    for line in serve(Connection(b"a"), Calls(evil)):
        assert len(line) <= 500
        assert line.isprintable()


def bundle(settings: str, kind: int = ZIP_DEFLATED, *, says: int | None = None) -> bytes:
    """A run's bundle; ``says`` is how many bytes it tells of its settings."""
    written = BytesIO()
    with ZipFile(written, "w", kind) as archive:
        archive.writestr("pyproject.toml", f"[tool.flwr.app.config]\n{settings}")
        true = archive.infolist()[0].file_size
    lie = (true if says is None else says).to_bytes(4, "little")
    return written.getvalue().replace(true.to_bytes(4, "little"), lie)


def test_settings_are_those_of_the_bundle_and_a_run_overrides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "defaults_in", READ)
    connection, calls = Connection(b"a"), Calls(b"A")
    connection.bundle = bundle('folder = "x"\n[tool.flwr.app.config.task]\nclients = 3\nval = 0.5')
    connection.overrides = {"task.clients": 4}
    serve(connection, calls)
    assert calls.calls[0][2] == {"folder": "x", "task.clients": 4, "task.val": 0.5}


def large(comment: str = "", **options: Any) -> bytes:
    """A thousandth of its settings, deflated."""
    return bundle(f'{comment}folder = "{"x" * (1 << 26)}"', **options)


@pytest.mark.parametrize(
    "content",
    [
        partial(bytes, b"no bundle"),
        partial(bundle, "folder ="),
        large,
        partial(large, "#"),
        partial(large, says=100),
        partial(large, kind=ZIP_BZIP2),
    ],
    ids=["none", "no TOML", "large", "large comment", "says small", "bzip2"],
)
def test_a_bundle_that_cannot_be_read_is_told_and_not_unpacked(
    content: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "defaults_in", READ)
    connection = Connection(b"a", b"b")
    connection.bundle = content()
    assert len(connection.bundle) < 1 << 17
    tracemalloc.start()
    serve(connection, Calls())
    assert tracemalloc.get_traced_memory()[1] < 4 * LARGEST_SETTINGS
    tracemalloc.stop()
    assert {reply.error.code for reply, _ in connection.replies} == {ErrorCode.INVALID_FAB}


def test_a_run_that_has_ended_and_a_message_that_is_gone_end_no_node() -> None:
    connection = Connection(b"a", b"b")
    connection.ended = True
    assert any("the run ended" in line for line in serve(connection, Calls()))
    connection = Connection(b"a", b"b")
    connection.objects.pop(connection.waiting[0][1].object_id)
    assert any("a message was lost: KeyError" in line for line in serve(connection, Calls(b"B")))
    assert connection.contents() == [b"B"]


@pytest.mark.parametrize("accepted", [False, True])
def test_a_zygote_is_started_for_a_node_that_the_superlink_takes(
    accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(node, "warm", lambda: started.append(True))

    @contextmanager
    def connect(*_: Any) -> Iterator[tuple[Any, ...]]:
        if not accepted:
            raise SystemExit  # as Flower does
        yield Connection().parts()

    monkeypatch.setattr(node, "http_request_response", connect)
    link, config = SuperLink("127.0.0.1:1", insecure=True), NodeConfig(state="s", clients="0-3")
    with pytest.raises(Stop if accepted else UserError):
        node.serve(link, config, print)
    assert bool(started) == accepted


@pytest.mark.parametrize(("device", "lasting"), [("cpu", False), ("cuda:1", True)])
def test_a_process_answers_one_message_but_on_an_accelerator(
    device: str, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing of a message stays in memory, where it does not take long to begin anew."""
    said: list[tuple[Any, bool]] = []

    def executor(respond: Any, *, lasting: bool) -> Any:
        said.append((respond, lasting))
        raise Stop

    monkeypatch.setattr(node, "Executor", executor)
    config = NodeConfig(state="s", clients="0-3", device=device)
    with pytest.raises(Stop):
        node.serve(SuperLink("127.0.0.1:1", insecure=True), config, print)
    assert said == [(app.respond_within, lasting)]  # within the policy's largest_memory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--superlink", "fl.example.org"], "--superlink must be HOST:PORT"),
        (["--superlink", "https://a:1"], "--superlink must be HOST:PORT"),
        (["--superlink", ":80"], "--superlink must be HOST:PORT"),
        (["--root-certificates", "none.crt"], "--root-certificates must be a file"),
        (["--root-certificates", "node"], "must hold certificates in PEM"),
        (["--key", "none"], "--key must be a file"),
        (["--key", "ca.crt"], "elliptic curve's private key"),
        (["--insecure", "--key", "node"], "--insecure must be without"),
        (["--superlink", "192.0.2.7:1", "--insecure"], "is on another host, got 192.0.2.7: all"),
        (["--workers", "0"], "'--workers': 0 is not in the range x>=1"),
        (["--cores-per-client", "0"], "'--cores-per-client': 0 is not in the range x>=1"),
        (["--superlink", "", "--device", "gpu"], "device must be one that PyTorch"),
        (["--superlink", "", "--device", "cuda:63"], "device must be one that PyTorch"),
        (["--data", "x.npz"], "x.npz"),
    ],
)
def test_what_is_wrong_with_the_options_is_told_before_anything_starts(
    options: list[str], message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_certificates(tmp_path)
    write_node_key(tmp_path / "node")
    monkeypatch.setenv("COLUMNS", "200")
    given = ["--clients", "0-3", "--state", "state", "--superlink", "127.0.0.1:1"]
    assert command("node", *given, *options) == 2
    assert message in capsys.readouterr().err


def test_a_number_is_no_content() -> None:
    record = RecordDict({"hyperfed": ConfigRecord({"content": 3})})
    with pytest.raises(WireError, match="its content is of type int"):
        bytes_of(record)


def test_an_address_of_ipv6_is_one() -> None:
    for address in ("[::1]:8443", "localhost:8443", "LOCALHOST:1"):
        assert SuperLink.of(address, None, None, insecure=True).address == address
    with pytest.raises(UserError, match="HOST:PORT"):
        SuperLink.of("[::1]:99999", None, None, insecure=True)


def test_without_a_superlink_the_command_says_how_to_start(tmp_path: Path, capsys: Any) -> None:
    state = tmp_path / "state"
    assert command("node", "--clients", "0-3", "--state", str(state), "--novel") == 0
    place = "--superlink HOST:PORT --root-certificates CA.CRT"
    assert capsys.readouterr().out.strip().splitlines() == [
        "here:",
        f"hyperfed node --clients 0-3 --state {state} --novel {place} --key KEY",
        "or here:",
        f"flower-supernode {place} --auth-supernode-private-key KEY --node-config "
        f"""'clients="0-3" state="{state}" novel=true'""",
        "before, at the operator's:",
        "flwr supernode register KEY.pub",
    ]
    assert command("node", "--check") == 2
    assert "give --data" in capsys.readouterr().err


def test_a_check_shows_labels_that_are_words_and_who_must_say_their_order(
    tmp_path: Path, capsys: Any
) -> None:
    data = tmp_path / "data.csv"
    data.write_text("age,label,client\n" + "1,none,a\n2,mild,a\n3,severe,b\n" * 10)
    check = ["node", "--data", str(data), "--check"]
    assert command(*check) == 0
    asked = "labels: mild, none, severe (of words --labels or the run's task.labels is the order)"
    assert asked in capsys.readouterr().out.splitlines()
    assert command(*check, "--labels", "none,mild,severe") == 0
    assert "labels: none, mild, severe" in capsys.readouterr().out.splitlines()
    assert command(*check, "--json") == 0
    assert json.loads(capsys.readouterr().out)["labels"] == ["mild", "none", "severe"]


def test_a_node_reads_its_data_beside_its_state_and_a_check_leaves_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def read(*_: Any, **options: Any) -> Any:
        asked.append(options["scratch"])
        raise UserError("no data")

    monkeypatch.setattr(commands, "read_site", read)
    for more in ([], ["--check"]):
        assert command("node", "--data", "d", "--state", str(tmp_path / "state"), *more) == 2
    assert asked == [tmp_path / "state", None]


def test_what_is_to_be_run_is_said_whole_and_found_wrong_before_it_is(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_certificates(tmp_path)
    write_node_key(tmp_path / "my node")
    x, y = np.zeros((30, 2), np.float32), np.arange(30) % 2
    np.savez("data.npz", x=x, y=y, client=np.repeat(["ann[/3]", "[b]bob"], 15))
    site = ["--data", "data.npz", "--state", "state", "--site", "clinic", "--check"]
    place = ["--superlink", "fl.example.org:8443", "--root-certificates", "ca.crt"]
    assert command("node", *site, *place, "--key", "my node") == 0
    said = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in said[1:3]} == {"ann[/3]", "[b]bob"}  # no markup
    assert said[-5:][0] == (
        f"hyperfed node --data {tmp_path}/data.npz --state {tmp_path}/state --site clinic "
        f"--superlink fl.example.org:8443 --root-certificates {tmp_path}/ca.crt "
        f"--key '{tmp_path}/my node'"
    )
    assert said[-1] == f"flwr supernode register '{tmp_path}/my node.pub'"
    assert not (tmp_path / "state").exists()
    assert command("node", *site, *place, "--key", "ca.crt") == 2
    assert "elliptic curve's private key" in capsys.readouterr().err
    trial = ["--superlink", "127.0.0.1:8443", "--insecure"]
    assert command("node", *site, *trial) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-3].endswith("--superlink 127.0.0.1:8443 --insecure")
    assert said[-1].startswith("flower-supernode --superlink 127.0.0.1:8443 --insecure --node-")
