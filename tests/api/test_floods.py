"""Clients that connect by the thousand, or send and never read: memory stays bounded and others are served."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from scripted_server import Scripted, scripted
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: kvblend.v1.json\r\n\r\n"
)
CONNECTS = 1000
GROWTH_BYTES_MAX = 32 << 20
SENT_BYTES_MAX = 128 << 20
ANSWER_S = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Scripted]:
    with scripted(tmp_path / "errors.txt") as running:
        yield running
        assert running.stop() == 0
        assert running.errors.read_text() == ""


def open_peer(server: Scripted) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    return connect(url, subprotocols=[Subprotocol("kvblend.v1.json")], compression=None, proxy=None)


def ask(peer: ClientConnection) -> None:
    """One request that ends as it should."""
    peer.send(json.dumps({"type": "response.create", "input": "what?"}))
    while json.loads(peer.recv(timeout=ANSWER_S))["type"] != "response.completed":
        pass


def reset(peer: socket.socket) -> None:
    """Close without a goodbye: the other side reads a reset."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_a_thousand_connects_leave_nothing_behind(server: Scripted, stress_factor: int) -> None:
    process = psutil.Process(server.process.pid)
    with open_peer(server) as other:
        ask(other)
        files, memory = process.num_fds(), process.memory_info().rss
        for number in range(CONNECTS * stress_factor):
            peer = socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_S)
            if number % 4 == 1:
                peer.sendall(HANDSHAKE[:60])
            elif number % 4 > 1:
                peer.sendall(HANDSHAKE)
            if number % 4 == 3:
                assert peer.recv(4096).startswith(b"HTTP/1.1 101")
            reset(peer)
        ask(other)
        due = time.monotonic() + ANSWER_S
        while process.num_fds() > files and time.monotonic() < due:
            ask(other)
        assert process.num_fds() <= files
        assert process.memory_info().rss - memory < GROWTH_BYTES_MAX


def test_a_client_that_sends_and_never_reads_is_slowed_down(server: Scripted) -> None:
    process = psutil.Process(server.process.pid)
    refused = json.dumps({"type": "response.create", "input": 5, "pad": "x" * 4000}).encode()
    frame = struct.pack("!BBHI", 0x81, 0x80 | 126, len(refused), 0) + refused
    with open_peer(server) as other, socket.create_connection(("127.0.0.1", server.port)) as peer:
        ask(other)
        memory, sent = process.memory_info().rss, 0
        peer.sendall(HANDSHAKE)
        assert peer.recv(4096).startswith(b"HTTP/1.1 101")
        peer.setblocking(False)
        rest = b""
        # the server stops reading once its answers find no room; what is on its way then fills up
        while sent < SENT_BYTES_MAX and select.select([], [peer], [], 2.0)[1]:
            rest = rest or frame
            count = peer.send(rest)
            rest, sent = rest[count:], sent + count
        assert sent < SENT_BYTES_MAX
        ask(other)
        assert process.memory_info().rss - memory < GROWTH_BYTES_MAX
        reset(peer)
