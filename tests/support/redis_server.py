"""A real Redis or Valkey server for tests: found or installed, started on a Unix socket, without persistence.

As a pytest plugin it brings the fixtures `redis_server` (one for all tests, emptied for each) and `redis_binary`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

BINARIES = ("redis-server", "valkey-server")
PACKAGES = ("redis-server", "valkey-server")
READY = b"ready to accept connections"


def find_binary() -> str | None:
    """The path of an installed server."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


def install_package() -> None:
    """Install Debian's package if this is root on a machine with apt-get. Says loudly what it does."""
    if os.geteuid() or not shutil.which("apt-get"):
        return
    # the package must not start a server of its own on the default port
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    installs = (["install", "-y", "--no-install-recommends", package] for package in PACKAGES)
    for arguments in (["update"], *installs):
        print(f"\n*** the tests need a Redis server: apt-get {' '.join(arguments)} ***", file=sys.stderr, flush=True)
        # together less than what a test may take
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["apt-get", *arguments], env=environment, stdin=subprocess.DEVNULL, timeout=35, check=False)
        if find_binary():
            return


class RedisServer:
    """A running server. `url` is its Unix socket's; `call` sends it one command and gives the raw reply."""

    def __init__(self, binary: str, *options: str) -> None:
        # a socket's path may have about a hundred bytes: pytest's own folders can be longer
        self.folder = Path(tempfile.mkdtemp(prefix="kvb-"))
        self.path = self.folder / "server.sock"
        self.url = f"unix://{self.path}"
        self._command = [
            binary, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--appendonly", "no",
            "--dir", str(self.folder), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, again after `stop`, and return when it takes connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("the server has no output")
        said = b""
        while line := stdout.readline():
            said += line
            if READY in line.lower():
                return
        raise RuntimeError(f"the server did not start: {said.decode(errors='replace')}")

    def stop(self) -> None:
        """Kill it, as a machine that dies would, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    def close(self) -> None:
        """Kill it and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *words: str | bytes) -> bytes:
        """Run a command on a connection of its own, blocking; the reply with its first character, if it is short."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.path))
            connection.sendall(request)
            return connection.recv(65536).rstrip(b"\r\n")

    def keys(self) -> list[bytes]:
        """All keys of database 0."""
        return sorted(self.call("KEYS", "*").split(b"\r\n")[2::2])


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """The server's path. A test is skipped where there is none and none can be installed; in CI it fails."""
    if find_binary() is None:
        install_package()
    binary = find_binary()
    if binary is None:
        reason = "neither redis-server nor valkey-server is installed, and it could not be installed here"
        print(f"\n*** {reason}: the remote tier is not tested ***", file=sys.stderr, flush=True)
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return binary


@pytest.fixture(scope="session")
def shared_redis_server(redis_binary: str) -> Iterator[RedisServer]:
    server = RedisServer(redis_binary)
    yield server
    server.close()


@pytest.fixture
def redis_server(shared_redis_server: RedisServer) -> RedisServer:
    """A server with nothing in it, shared with other tests: leave it running and as it was configured."""
    shared_redis_server.call("FLUSHALL")
    return shared_redis_server


@pytest.fixture
def own_server(redis_binary: str) -> Iterator[RedisServer]:
    """A server of this test alone, to be stopped, started or configured."""
    server = RedisServer(redis_binary)
    yield server
    server.close()
