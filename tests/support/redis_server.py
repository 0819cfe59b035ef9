"""A real Redis or Valkey server for tests: found or installed, started on a Unix socket, without persistence.

As a pytest plugin it brings the fixtures `redis_server` (one for all tests, emptied for each) and `redis_binary`.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from needed import find_program, install_program, need_program

BINARIES = ("redis-server", "valkey-server")
PACKAGES = ("redis-server", "valkey-server")
INSTALL_S = 105.0
READY = b"ready to accept connections"


def find_binary() -> str | None:
    """The path of an installed server."""
    return find_program(BINARIES)


def install_package() -> None:
    """Install Debian's package; together less than what a test may take."""
    # the package must not start a server of its own on the default port
    install_program("a Redis server", PACKAGES, find_binary, INSTALL_S, {"RUNLEVEL": "1"})


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
    missing = "neither redis-server nor valkey-server is installed"
    return need_program(find_binary, install_package, missing, "the remote tier is not tested")


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
