"""A SuperLink and nodes as processes on this host, with TLS and node authentication."""

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hyperfed

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def write_certificates(folder: Path) -> None:
    """Writes ca.crt, server.pem and server.key: an authority, and a server on the loopback."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def begun(subject: str, key: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("trial CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = begun("trial CA", authority).add_extension(x509.BasicConstraints(True, None), True)
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(root.sign(authority, hashes.SHA256()).public_bytes(pem))
    own = begun("server", key).add_extension(place, False).sign(authority, hashes.SHA256())
    (folder / "server.pem").write_bytes(own.public_bytes(pem))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "server.key").write_bytes(key.private_bytes(pem, form, plain))


def write_node_key(path: Path) -> None:
    """Writes a SuperNode's key pair, as ssh-keygen -t ecdsa -b 384 does."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )


def until(true: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """Waits for something that other processes do."""
    end = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.2)
    return found


class Deployment:
    """Processes of a federation, each the leader of its own group, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"{HOST}:{self.port}"
        self.processes: dict[str, Any] = {}
        self.groups: list[int] = []
        programs = str(Path(sys.executable).parent)  # the SuperLink starts others by their names
        self.environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(hyperfed.__file__).parents[1]),
        }
        write_certificates(folder)
        (folder / "flower").mkdir()
        (folder / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "trial"\n[superlink.trial]\naddress = "{self.address}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.processes[name] = process
        self.groups.append(process.pid)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def superlink(self, *more: str) -> None:
        certificates = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem"]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        place = ["--host", HOST, "--port", str(self.port), "--database", "superlink.db"]
        self.start(
            "superlink", "flower-superlink", *certificates, "--ssl-keyfile", "server.key",
            *options, *place, *more,
        )  # fmt: skip
        until(lambda: listens(self.port), "the SuperLink's port")

    def supernode(self, name: str, config: str, *security: str) -> subprocess.Popen[bytes]:
        return self.start(
            name, "flower-supernode", *security, "--superlink", self.address,
            "--host", HOST, "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def secure(self, name: str, config: str, key: str) -> subprocess.Popen[bytes]:
        """Starts a SuperNode that knows the server's certificate and has a key."""
        security = ["--root-certificates", "ca.crt", "--auth-supernode-private-key", key]
        return self.supernode(name, config, *security)

    def superexec(self) -> None:
        """Starts runs for a SuperLink of its own processes (--isolation process)."""
        place = ("--superlink", self.address, "--root-certificates", "ca.crt")
        self.hyperfed("superexec", "superexec", *place)

    def register(self, name: str) -> None:
        """Makes a key of that name and has the SuperLink know it."""
        write_node_key(self.folder / name)
        assert self.flwr("supernode", "register", f"{name}.pub", "trial")["success"]

    def node(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Starts a node of ours whose key has its name."""
        security = ("--root-certificates", "ca.crt", "--key", name)
        return self.hyperfed(name, "node", *options, "--superlink", self.address, *security)

    def flwr(self, *arguments: str) -> Any:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("flwr")), *arguments, "--format", "json"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout[done.stdout.find("{") :] or "null")

    def hyperfed(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(name, "python", "-m", "hyperfed", *arguments)

    def end(self, name: str) -> None:
        """Ends a process and what it started, gently."""
        group = self.processes.pop(name)
        os.killpg(group.pid, signal.SIGTERM)
        group.wait()
        until(lambda: not members(group.pid), f"the end of {name}")

    def alive(self) -> list[int]:
        """The processes of all our groups that are still there."""
        return [pid for group in self.groups for pid in members(group)]

    def close(self) -> None:
        """Ends everything that we started, gently and then at once."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for group in self.groups:
                if members(group):
                    os.killpg(group, sent)
            for process in self.processes.values():
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    continue
        until(lambda: not self.alive(), "the end of all processes", seconds=30)


@contextmanager
def deployed(folder: Path, kind: type[Deployment] = Deployment) -> Iterator[Deployment]:
    deployment = kind(folder)
    try:
        yield deployment
    finally:
        deployment.close()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if path.name.isdecimal() and int(its_group) == group and state != "Z":
            found.append(int(path.name))
    return found
