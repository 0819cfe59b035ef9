"""Hostile frames and requests by the thousand: no 5xx, no crash, no hang, and memory that does not grow.

`--fuzz N` says how many in all: 1,000 in an ordinary run, the same ones every time; 200,000 new ones under `--stress`.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import psutil
import pytest
import schemathesis
from hostile import json_bytes, json_frames, msgpack_frames
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode as Mode
from schemathesis.core.result import Ok
from scripted_server import Scripted, first_line, scripted
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

# what is a whole run of this file is more than other tests may take
pytestmark = pytest.mark.timeout(7200)
BATCH = 25
GROWTH_BYTES_MAX = 48 << 20
POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/chunks")
ANSWER_S = 30
# how the whole number is shared out
SHARES = {"msgpack": 0.35, "json": 0.33, "bodies": 0.28, "wire": 0.02, "schema": 0.02}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """One server for all of this file: what one test leaves behind, the next one meets."""
    with scripted(tmp_path_factory.mktemp("fuzz") / "errors.txt") as running:
        yield running
        assert running.stop() == 0
        assert running.errors.read_text() == ""


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[str], int]:
    """How many examples a kind gets."""
    total = int(request.config.getoption("--fuzz") or (200_000 if request.config.getoption("--stress") else 1_000))
    return lambda kind: max(1, round(SHARES[kind] * total))


class Watch:
    """The server's memory between the first quarter of a run and its end."""

    def __init__(self, server: Scripted, examples: int) -> None:
        self._server, self._quarter = server, max(1, examples // 4)
        self._process = psutil.Process(server.process.pid)
        self._seen, self._base = 0, 0

    def step(self) -> None:
        self._seen += 1
        if self._seen == self._quarter:
            self._base = self._process.memory_info().rss

    def check(self) -> None:
        assert self._server.process.poll() is None, self._server.errors.read_text()
        assert self._server.errors.read_text() == ""
        grown = self._process.memory_info().rss - self._base
        assert grown < GROWTH_BYTES_MAX, f"the server grew by {grown} bytes"


def run_examples(examples: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Run a function on so many examples, at once; on new ones each time only under --stress."""
    health = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.large_base_example,
    ]

    def run(test: Callable[..., None]) -> None:
        quick = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=health)
        same = settings.get_current_profile_name() != "stress"
        settings(quick, phases=[Phase.generate], derandomize=same)(given(*strategies)(test))()

    return run


def test_only_a_stress_run_is_another_every_time(request: pytest.FixtureRequest) -> None:
    def collect() -> list[int]:
        seen: list[int] = []
        run_examples(20, st.integers())(lambda number: seen.append(number))
        return seen

    assert (collect() == collect()) is not request.config.getoption("--stress")


def test_a_server_that_never_says_its_port_is_not_waited_for_long() -> None:
    end, other = os.pipe()
    with os.fdopen(end, "rb") as silent, os.fdopen(other, "wb"), pytest.raises(TimeoutError, match="no port"):
        first_line(silent, timeout_s=0.01)


def open_socket(server: Scripted, subprotocol: str) -> ClientConnection:
    names = [Subprotocol(subprotocol)]
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    # pings of its own draw random numbers in a thread, which hypothesis takes for ours
    return connect(url, subprotocols=names, compression=None, proxy=None, ping_interval=None)


def read_until_probe(socket: ClientConnection, decode: Callable[[Any], Any], probe: str) -> None:
    """Read what came, up to the refusal of a cancel that was sent last; nothing in it may be the server's own fault."""
    while True:
        event = decode(socket.recv(timeout=ANSWER_S))
        error = event.get("error") or (event.get("response") or {}).get("error") or {}
        assert error.get("status", 400) < 500, event
        if event["type"] == "error" and event.get("event_id") == probe:
            return


@pytest.mark.parametrize("kind", ["msgpack", "json"])
def test_hostile_frames(server: Scripted, count: Callable[[str], int], kind: str) -> None:
    frames: st.SearchStrategy[Any] = msgpack_frames() if kind == "msgpack" else json_frames()
    encode: Callable[[Any], Any] = msgpack.packb if kind == "msgpack" else json.dumps
    decode: Callable[[Any], Any] = msgpack.unpackb if kind == "msgpack" else json.loads
    batches = max(1, count(kind) // BATCH)
    watch = Watch(server, batches)
    with open_socket(server, f"kvblend.v1.{kind}") as socket:

        @run_examples(batches, st.lists(frames, min_size=BATCH, max_size=BATCH))
        def _(batch: list[Any]) -> None:
            for frame in batch:
                socket.send(frame)
            probe = secrets.token_hex(8)
            socket.send(encode({"type": "response.cancel", "stream_id": probe, "event_id": probe}))
            read_until_probe(socket, decode, probe)
            watch.step()

    watch.check()


def exchange(server: Scripted, method: str, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


TYPES = st.sampled_from(("application/json",) * 9 + ("text/plain", "application/json; charset=utf-16"))


def test_hostile_bodies(server: Scripted, count: Callable[[str], int]) -> None:
    watch = Watch(server, count("bodies"))

    @run_examples(count("bodies"), st.sampled_from(POSTS), json_bytes(), TYPES)
    def _(path: str, body: bytes, kind: str) -> None:
        status, said = exchange(server, "POST", path, body, kind)
        assert status < 500, said
        if status != 200:
            error = json.loads(said)["error"]
            assert {"message", "type", "param", "code"} <= error.keys()
        elif said.startswith((b"data:", b"event:")):
            # a stream that began may not end in a fault either
            assert b'"status":500' not in said
        watch.step()

    watch.check()


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def test_bytes_that_are_no_frames_and_no_requests(server: Scripted, count: Callable[[str], int]) -> None:
    watch = Watch(server, count("wire"))

    @run_examples(count("wire"), st.booleans(), st.binary(min_size=1, max_size=80))
    def _(upgraded: bool, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_S) as peer:
            if upgraded:
                peer.sendall(HANDSHAKE)
                assert peer.recv(4096).startswith(b"HTTP/1.1 101")
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            said = b""
            while block := peer.recv(4096):
                said += block
        assert upgraded or not said.startswith(b"HTTP/1.1 5")
        watch.step()

    watch.check()


def test_what_the_openapi_document_allows_and_what_it_does_not(server: Scripted, count: Callable[[str], int]) -> None:
    status, document = exchange(server, "GET", "/openapi.json", b"", "application/json")
    assert status == 200
    found = schemathesis.openapi.from_dict(json.loads(document)).get_all_operations()
    operations = [one.ok() for one in found if isinstance(one, Ok)]
    assert len(operations) == sum(map(len, json.loads(document)["paths"].values()))
    # nothing can be wrong where nothing is asked for
    wrong = [operation for operation in operations if operation.body.items or operation.query.items]
    runs = [(one, Mode.POSITIVE) for one in operations] + [(one, Mode.NEGATIVE) for one in wrong]
    sent = 0

    def visit(case: schemathesis.Case[Any]) -> None:
        nonlocal sent
        answer = case.call(base_url=f"http://127.0.0.1:{server.port}", timeout=ANSWER_S)
        assert answer.status_code < 500, (case.body, answer.text)
        sent += 1

    for operation, mode in runs:
        run_examples(max(1, count("schema") // len(runs)), operation.as_strategy(generation_mode=mode))(visit)
    assert sent > len(operations)
    assert server.process.poll() is None
