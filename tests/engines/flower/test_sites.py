"""Who is where: what sites say of themselves, whose a name is, and who is not waited for."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import hyperfed
from hyperfed.data.roster import Introduction, Member, enrol
from hyperfed.engines.flower import sites as module
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.grid import GridLink, fingerprint
from hyperfed.engines.flower.sites import Sites
from hyperfed.engines.flower.wire import WireError, read_introduction
from hyperfed.engines.replies import NoAnswerError


def said(*names: str, **changes: Any) -> Introduction:
    made = Introduction(tuple(Member(n, 7, 3, 3) for n in names), (5,), "torch.float32", 3)
    return replace(made, **changes)


def as_bytes(introduction: Introduction) -> bytes:
    return wire._INTRODUCTION.dump_json(introduction)


class Nodes:
    """What nodes say of themselves, and the clock while they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[int, str] = {}
        self.says: dict[int, Any] = {}
        self.takes: dict[int, float] = {}
        self.asked: list[int] = []
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def nodes(self) -> dict[int, str]:
        return dict(self.keys)

    def exchange(
        self, kind: str, contents: Mapping[int, bytes], timeout: float, most: Mapping[int, int]
    ) -> dict[int, Any]:
        self.asked += contents
        self.now += max(self.takes.get(node, 0.0) for node in contents)
        answers = {node: self.says[node] for node in contents if node in self.says}
        return {n: as_bytes(a) if isinstance(a, Introduction) else a for n, a in answers.items()}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_a_name_belongs_to_the_key_that_introduced_it_first(link: Nodes, caplog: Any) -> None:
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann"), 2: said("ann", "bob")}
    sites = Sites(link, 10.0)
    found = sites.gather(2)
    assert [[member.name for member in each.members] for each in found] == [["ann"], ["bob"]]
    roster = enrol(found, run=1, keys=sites.keys)
    assert roster.keys == {"ann": "A", "bob": "B"}
    assert "client ann: node 2: another key, B, says that it is its site" in caplog.text
    assert sites.find(["ann", "bob"]) == {"ann": 1, "bob": 2}


def test_another_key_is_refused_when_the_owner_is_gone_and_when_the_run_goes_on(
    link: Nodes, caplog: Any
) -> None:
    link.keys, link.says = {2: "B"}, {2: said("ann", "bob")}
    for keys in ({"ann": "A", "bob": "B"}, {"ann": "A"}):
        sites = Sites(link, 10.0, keys)
        assert sites.find(["ann", "bob"]) == {"bob": 2}
        assert "belongs to A; if its site has a new key, see hyperfed move" in sites.refused["ann"]
    link.keys = {2: "B", 3: "A"}  # it is back, as another node with the same key
    link.says[3] = said("ann")
    assert sites.find(["ann", "bob"]) == {"ann": 3, "bob": 2}
    assert sites.refused == {}


def test_names_that_are_no_client_s_of_a_run_are_not_kept(link: Nodes, caplog: Any) -> None:
    """A site whose answers are of no use is asked in each round who it is, with 32 MB each time."""
    link.keys = {1: "A", 2: "B"}
    sites = Sites(link, 10.0, {"ann": "A"}, ["ann", "bob"])
    for time in range(5):
        link.says = {1: said("ann"), 2: said("ann", *(f"{time}-{n}" for n in range(9)))}
        assert sites.find(["ann", "bob"]) == {"ann": 1}
        sites.forget(1)
        sites.forget(2)
    assert (sites.keys, sites.refused.keys()) == ({"ann": "A"}, {"ann"})
    assert link.asked.count(2) == 5


def test_who_says_another_s_name_is_told_of_once(link: Nodes, caplog: Any) -> None:
    link.keys, link.says = {2: "B"}, {2: said("ann")}
    sites = Sites(link, 1.0, {"ann": "A"})
    for _ in range(5):
        assert sites.find(["ann"]) == {}
        sites.forget(2)
    assert caplog.text.count("client ann: node 2: another key") == 1


def test_a_node_without_a_key_is_not_one_with(link: Nodes) -> None:
    link.keys, link.says = {2: ""}, {2: said("ann")}
    assert Sites(link, 1.0, {"ann": "A"}).find(["ann"]) == {}
    assert Sites(link, 1.0, {"ann": ""}).find(["ann"]) == {"ann": 2}
    link.keys = {2: "B"}
    assert Sites(link, 1.0, {"ann": ""}).find(["ann"]) == {"ann": 2}


def test_a_site_of_which_all_is_refused_does_not_count(link: Nodes) -> None:
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann"), 2: said("ann")}
    with pytest.raises(
        ValueError, match=r"engine.sites=2 .* but 1 did(.|\n)*- not counted: a second client ann"
    ):
        Sites(link, 1.0).gather(2)


def test_who_does_not_count_is_told_with_those_who_came(link: Nodes) -> None:
    link.keys = dict(zip(range(5), "ABCDE", strict=True))
    link.says = {0: said("ann"), 1: said("ann"), 2: NoAnswerError("its policy\nis wrong")}
    sites = Sites(link, 1.0)
    with pytest.raises(ValueError, match="but 1 did") as error:
        sites.gather(2)
    told = str(error.value)
    assert "did; start the others, see their logs and this one, or raise engine.timeout\n- " in told
    assert "\n- not counted: a second client ann: another key, B, says" in told
    assert "node 2, which is not asked: it did not introduce itself (its policy\\nis wrong)" in told
    assert told.endswith("\n- not counted: 1 more")
    assert len(sites.left_out()) == 4
    assert Sites(link, 1.0).left_out() == []


def test_who_is_silent_is_asked_less_and_less_often(link: Nodes, caplog: Any) -> None:
    """Each time it keeps all waiting for 100 s, and is then left alone for twice as long."""
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann")}
    link.takes = {2: 100.0}
    sites, asked = Sites(link, 100.0), []

    def look(until: float) -> None:
        while link.now < until:
            before, count = link.now, link.asked.count(2)
            sites.introduced()
            asked.extend([before] * (link.asked.count(2) - count))
            link.now += 10.0

    begin = link.now
    look(begin + 2000)
    assert link.asked.count(1) == 1
    assert [time - begin for time in asked] == [0, 200, 500, 1000, 1900]
    assert caplog.text.count("node 2 is not asked: it did not introduce itself") == 5

    # Whoever has answered begins anew.
    link.says[2], link.takes = said("bob"), {}
    look(link.now + 2000)
    assert sites.find(["ann", "bob"]) == {"ann": 1, "bob": 2}
    sites.forget(2)
    del link.says[2]
    link.takes, begin = {2: 100.0}, link.now
    asked.clear()
    look(begin + 400)
    assert [time - begin for time in asked] == [0, 200]


def test_who_fails_at_once_is_asked_again_at_once(link: Nodes) -> None:
    link.keys, link.says = {1: "A"}, {1: NoAnswerError("its app failed")}
    sites = Sites(link, 100.0)
    for _ in range(5):
        assert sites.introduced() == {}
    assert link.asked == [1] * 5


def test_who_fails_at_once_is_asked_every_ten_minutes_and_who_takes_long_for_a_share_of_the_time(
    link: Nodes,
) -> None:
    """A disk that is away for a night costs no other night when it is back."""
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann"), 2: NoAnswerError("its app failed")}
    for takes, pause in ((0.5, module.LONGEST_PAUSE), (100.0, 100.0 / module.LARGEST_SHARE)):
        link.takes, sites = {2: takes}, Sites(link, 100.0)
        asked = []
        while len(asked) < 20:
            before, count = link.now, link.asked.count(2)
            sites.introduced()
            asked += [before] * (link.asked.count(2) - count)
            link.now += 1.0
        gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
        assert gaps == sorted(gaps)
        assert pause <= gaps[-1] - takes <= pause + 1


def test_who_was_away_is_asked_at_once(link: Nodes) -> None:
    """Whoever mends a site starts its node again, which has the same key and number."""
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann"), 2: NoAnswerError("its app failed")}
    link.takes, sites = {2: 100.0}, Sites(link, 100.0, {"bob": "B"})
    assert sites.find(["ann", "bob"]) == {"ann": 1}
    del link.keys[2]
    assert sites.find(["ann", "bob"]) == {"ann": 1}
    link.keys[2], link.says[2] = "B", said("bob")
    assert sites.find(["ann", "bob"]) == {"ann": 1, "bob": 2}


def test_why_a_client_is_not_asked_is_what_its_site_did(link: Nodes) -> None:
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann"), 2: NoAnswerError("its app failed")}
    sites = Sites(link, 100.0, {"ann": "A", "bob": "B", "cem": "C"})
    sites.find(["ann", "bob", "cem"])
    did_not = "its site is not asked: it did not introduce itself (its app failed)"
    assert (sites.why_not("bob"), sites.why_not("cem")) == (did_not, "its site is not connected")
    link.now, link.says[2] = link.now + 1000, said("eve", "ann")
    sites.find(["ann", "bob", "cem"])
    assert sites.why_not("bob") == "its site does not name it any more"
    assert "another key, B, says" in sites.why_not("ann")
    link.keys.clear()
    sites.find(["ann"])
    assert sites.why_not("bob") == "its site is not connected"


def test_a_node_without_a_key_is_no_client_s_site(link: Nodes) -> None:
    link.keys, link.says = {1: ""}, {1: NoAnswerError("its app failed")}
    sites = Sites(link, 1.0, {"ann": ""})
    sites.find(["ann"])
    assert sites.why_not("ann") == "its site is not connected"


def test_sites_are_waited_for(link: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    link.says, begin = {1: said("ann"), 2: said("bob")}, link.now

    def come(seconds: float) -> None:
        link.now += seconds
        link.keys = {n: key for n, key in ((1, "A"), (2, "B")) if link.now >= begin + 4 * n}

    monkeypatch.setattr(module.time, "sleep", come)
    sites = Sites(link, 10.0)
    with pytest.raises(ValueError, match=r"engine.sites=3 sites .* within 10 s, but 2 did"):
        sites.gather(3)
    assert link.now - begin == 10 + module.POLL
    link.now, link.keys = begin, {}
    assert [each.members[0].name for each in sites.gather(2)] == ["ann", "bob"]
    assert link.now == begin + 8
    link.now, link.keys = begin, {}
    assert sites.find(["ann", "bob"]) == {"ann": 1}  # nobody waits for the second
    assert link.now == begin + 4
    link.now, link.keys = begin, {}
    assert sites.find(["eve"]) == {}
    assert link.now - begin == 10 + module.POLL


@pytest.mark.parametrize("look", [lambda it: it.gather(1), lambda it: it.find(["bob"])])
def test_who_comes_while_all_wait_for_a_silent_node_is_there(
    look: Any, link: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one node that says nothing could have no run begin, and no round be of anybody."""
    link.keys, link.says, link.takes = {1: "A"}, {2: said("bob")}, {1: 10.0}
    exchange = link.exchange

    def one_comes(*arguments: Any) -> dict[int, Any]:
        answers = exchange(*arguments)
        link.keys[2] = "B"
        return answers

    monkeypatch.setattr(link, "exchange", one_comes)
    assert look(Sites(link, 9.0))


def test_a_node_that_has_left_is_not_there(link: Nodes) -> None:
    link.keys, link.says = {1: "A", 2: "B"}, {1: said("ann"), 2: said("bob")}
    sites = Sites(link, 10.0)
    assert sites.find(["ann", "bob"]) == {"ann": 1, "bob": 2}
    assert sites.connected == {1, 2}
    del link.keys[2]
    assert sites.known().keys() == sites.connected == {1}
    assert sites.find(["ann", "bob"]) == {"ann": 1}


@pytest.mark.parametrize(
    ("waited", "seconds"), [(0.0, 0.1), (0.5, 0.1), (5.0, 0.5), (29.0, 2.9), (1000.0, 3.0)]
)
def test_looks_are_a_tenth_of_the_time_apart(waited: float, seconds: float) -> None:
    assert module.pause(waited) == pytest.approx(seconds)


def test_strangers_are_not_asked_while_all_are_there(link: Nodes) -> None:
    link.keys, link.says = {1: "A"}, {1: said("ann", "bob")}
    sites = Sites(link, 100.0)
    assert sites.find(["ann"]) == {"ann": 1}
    link.keys[2] = "B"
    assert sites.find(["bob"]) == {"bob": 1}
    assert link.asked == [1]


NO_NUMBER = {"mean": (0.5,), "std": (0.5,), "shape": (1, 8, 8), "dtype": "torch.uint8", "pixels": 7}

IMPOSSIBLE: dict[str, tuple[Introduction | bytes, str]] = {
    "garbage": (b"garbage", "must be one"),
    "a list": (b"[]", "must be one"),
    "longer than any": (b" " * (wire.MOST_INTRODUCED + 1), "bytes at most"),
    "a name twice": (said("ann", "ann"), "is twice"),
    "a name in two lines": (said("a\nb"), "printable, got a\\\\nb"),
    "a name in colours": (said("\x1b[31mann"), "printable"),
    "a name from the right": (said("\u202eann"), "printable"),
    "a size in colours": (said(members=(Member("a", 7, 3, 3, "\x1b[2J"),)), "name and size"),
    "an unknown dtype": (said("ann", dtype="float16"), "of dtype"),
    "examples beyond memory": (said("ann", shape=(10**6, 10**6)), "numbers at most"),
    "nothing to train on": (said("ann", members=(Member("a", 0, 3, 3),)), "an example to train on"),
    "a mean of floats": (said("ann", mean=(0.5,), std=(0.5,)), "only images"),
    "means of other channels": (said("ann", **NO_NUMBER | {"mean": (0.1, 0.2)}), "only images"),
    "no deviation": (said("ann", **NO_NUMBER | {"std": ()}), "only images"),
    "a mean above 1": (said("ann", **NO_NUMBER | {"mean": (1.5,)}), "from 0 to 1"),
    "a deviation below 0": (said("ann", **NO_NUMBER | {"std": (-0.5,)}), "from 0 to 1"),
    "labels in colours": (
        said("ann", classes=2, labels=("a", "\x1b[31mb")),
        "label's name must be pr",
    ),
    "a label twice": (said("ann", classes=3, labels=("a", "a", "b")), "named once each"),
    "labels without names": (said("ann", classes=3, labels=("a", "b")), "named all 3, got 2 names"),
    "labels of two numbers": (said("ann", target_size=2), "a label must be one number, got 2"),
    "names of numbers": (said("ann", classes=0, labels=("a",)), "named all 0, got 1 names"),
    "more images than examples": (said("ann", **NO_NUMBER | {"pixels": 8}), "of no more"),
}

RAW: dict[str, tuple[str, Any]] = {
    "examples below zero": ("members.0.examples", -1),
    "2^62 examples": ("members.0.examples", 2**62),
    "half an example": ("members.0.examples", 0.5),
    "validation below zero": ("members.0.val", -1),
    "no number for testing": ("members.0.test", None),
    "an empty name": ("members.0.name", ""),
    "a name of 1 MB": ("members.0.name", "a" * 10**6),
    "a size of 1 MB": ("members.0.size", "a" * 10**6),
    "classes below zero": ("classes", -1),
    "10^9 classes": ("classes", 10**9),
    "targets of nothing": ("target_size", 0),
    "targets of 10^9 numbers": ("target_size", 10**9),
    "no axis": ("shape", []),
    "an axis of nothing": ("shape", [0]),
    "nine axes": ("shape", [1] * 9),
    "a mean in words": ("mean", ["a"]),
    "a fingerprint of 1 MB": ("fingerprint", "0" * 10**6),
    "names of features of 1 MB": ("features", "0" * 10**6),
    "a key of its own": ("key", "A"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_no_site_has_is_refused(what: str) -> None:
    content, message = IMPOSSIBLE[what]
    with pytest.raises(WireError, match=message):
        read_introduction(content if isinstance(content, bytes) else as_bytes(content))


@pytest.mark.parametrize("what", RAW)
def test_what_no_introduction_says_is_refused(what: str) -> None:
    path, value = RAW[what]
    table = wire.json.loads(as_bytes(said("ann")))
    *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    inner = table
    for part in way:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(WireError, match=r"an introduction must be one of hyperfed \S+, but"):
        read_introduction(wire.json.dumps(table).encode())


def test_a_site_of_another_version_is_told_which_and_counts_when_it_has_the_servers(
    link: Nodes,
) -> None:
    link.keys = {1: "", 2: ""}
    link.says = {1: said("ann"), 2: said("bob", version="0.0.9")}
    sites = Sites(link, 10.0)
    assert sites.find(["ann", "bob"]) == {"ann": 1}
    (why,) = sites.left_out()
    assert f"must have the server's hyperfed, {hyperfed.__version__}, or" in why
    assert "but has 0.0.9; install that there" in why
    link.says[2], link.now = said("bob"), link.now + 600.0
    assert sites.find(["ann", "bob"]) == {"ann": 1, "bob": 2}
    assert sites.left_out() == []


def test_a_novel_client_may_have_no_example_to_train_on() -> None:
    nobody = said("ann", members=(Member("ann", 7, 3, 3), Member("new", 0, 3, 3, novel=True)))
    assert read_introduction(as_bytes(nobody)) == nobody


def test_what_can_be_is_believed(link: Nodes) -> None:
    images = said("ann", **NO_NUMBER)
    assert read_introduction(as_bytes(images)) == images
    link.keys, link.says = {1: "A", 2: "B"}, {1: b"{}", 2: images}
    assert Sites(link, 10.0).gather(1) == [images]
    link.says[1] = NoAnswerError("its app failed")
    assert Sites(link, 10.0).gather(1) == [images]


PUBLIC = (
    b"ecdsa-sha2-nistp384 "
    b"AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBCgIM9VDdjG0Rr+uYRhahxNy4C5q"
    b"H6h4K/WHHQBOadf6dUM1vLgA/4zo0TPMlNnR2UbLVA3hhBjqoET6kANdFSWbPXiF8RdYJbhNi0Ic3SlJ"
    b"beJNdwG57GgBalcVbc4Qrg=="
)
"""Made by ssh-keygen -t ecdsa -b 384, of which ssh-keygen -lf says what stands below."""


def test_a_key_is_called_as_ssh_keygen_calls_it() -> None:
    name = "SHA256:Q1UdGA8DZpeQKma5MYVMAxB09bxzJEXNYH9kGfpRRvI"
    key = serialization.load_ssh_public_key(PUBLIC)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    assert fingerprint(PUBLIC) == name
    assert fingerprint(key.public_bytes(serialization.Encoding.PEM, form)) == name
    assert fingerprint(b"") == ""


def test_a_key_that_ssh_has_no_name_for_ends_no_run() -> None:
    """A SuperLink that authenticates no nodes takes it: then whoever reaches it could."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo

    def new(curve: ec.EllipticCurve) -> bytes:
        key = ec.generate_private_key(curve).public_key()
        return key.public_bytes(serialization.Encoding.PEM, form)

    keys = [new(ec.SECP256K1()), new(ec.SECP256K1()), new(ec.SECP384R1())]
    told = [SimpleNamespace(node_id=n, registered_at="", public_key=k) for n, k in enumerate(keys)]
    nodes = GridLink(SimpleNamespace(get_nodes=lambda: told)).nodes()  # type: ignore[arg-type]
    assert list(nodes) == [0, 1, 2]
    assert len({*nodes.values()}) == 3
    assert all(name.startswith("SHA256:") for name in nodes.values())
