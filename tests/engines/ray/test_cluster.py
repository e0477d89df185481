"""The way to a cluster, with a stand-in for the library."""

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from hyperfed import federation
from hyperfed.engines import EngineConfig, build
from hyperfed.engines.ray import cluster
from hyperfed.errors import UserError
from toys import make_task


class FakeRay:
    """What a connection needs of the library."""

    def __init__(self, ip: str = cluster.LOOPBACK) -> None:
        self.cluster: str | None = None
        self.util = SimpleNamespace(get_node_ip_address=lambda: ip)

    def init(self, address: str, **options: Any) -> None:
        self.cluster, self.options = address, options

    def shutdown(self) -> None:
        self.cluster = None

    def is_initialized(self) -> bool:
        return self.cluster is not None

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.cluster)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(cluster, "library", lambda: fake)
    monkeypatch.setattr(cluster, "_OURS", weakref.WeakSet())
    monkeypatch.setattr(cluster.socket, "create_connection", lambda *_: SimpleNamespace(close=int))
    monkeypatch.setattr(cluster, "os", SimpleNamespace(environ={}))
    return fake


def test_engines_share_a_connection_which_ends_with_the_last(fake: FakeRay) -> None:
    first = cluster.connect()
    assert (fake.cluster, first.started) == ("local", True)
    assert fake.options["_node_ip_address"] == cluster.LOOPBACK
    second = cluster.connect()
    assert second is first
    del first
    assert fake.is_initialized()
    del second
    assert not fake.is_initialized()


def test_a_lost_head_is_waited_for_as_long_as_the_user_says_or_not_for_long(fake: FakeRay) -> None:
    key = "RAY_gcs_rpc_server_reconnect_timeout_s"
    cluster.connect("10.0.0.1:6379")  # which may be started anew there
    assert key not in cluster.os.environ
    cluster.connect()
    assert cluster.os.environ[key] == str(cluster.HEAD_SECONDS)
    cluster.os.environ[key] = "60"
    cluster.connect()
    assert cluster.os.environ[key] == "60"


def test_a_cluster_that_runs_is_joined_and_left(fake: FakeRay) -> None:
    connection = cluster.connect("10.0.0.1:6379")
    assert (fake.cluster, connection.started) == ("10.0.0.1:6379", False)
    assert cluster.connect("auto") is connection
    with pytest.raises(UserError, match=r"connected to, 10\.0\.0\.1:6379, came 10\.0\.0\.2:6379"):
        cluster.connect("10.0.0.2:6379")
    del connection
    assert not fake.is_initialized()


def test_a_connection_of_the_user_stays(fake: FakeRay) -> None:
    fake.init("theirs")
    connection = cluster.connect()
    assert not connection.started
    del connection
    assert fake.cluster == "theirs"


def test_a_connection_that_the_user_ended_does_not_end_the_next(fake: FakeRay) -> None:
    ended = cluster.connect()
    fake.shutdown()
    connection = cluster.connect()
    assert connection is not ended
    del ended
    assert fake.is_initialized()


def test_no_cluster_is_started_with_ports_open_to_the_network(fake: FakeRay) -> None:
    fake.util = FakeRay("192.0.2.1").util
    with pytest.raises(UserError, match="loopback address only"):
        cluster.connect()
    assert not fake.is_initialized()


@pytest.mark.parametrize("address", ["somewhere", "127.0.0.1:", ":5", "127.0.0.1:1"])
def test_a_wrong_address_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setattr(cluster, "library", lambda: fake)
    with pytest.raises(UserError, match=r"must be host:port of a Ray cluster's head.*" + address):
        cluster.connect(address)
    assert not fake.is_initialized()


def test_what_ray_says_of_an_address_is_passed_on(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, **options: Any) -> None:
        raise ConnectionError("no cluster runs")

    monkeypatch.setattr(fake, "init", refuse)
    with pytest.raises(UserError, match=r"at auto: no cluster runs\. A cluster"):
        cluster.connect("auto")


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install 'ray>="):
        build(EngineConfig("ray"), make_task(), federation.Client, None, seed=0)
