"""A browser's own WebSocket against a server with keys: headless Chromium, a page served here, Origins good and bad."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browser import INSTALL_S, browsing, install_browser

from kvblend.api.server.keys import BEARER_SUBPROTOCOL, KeyRing, issue
from kvblend.api.server.limits import ApiLimits
from tests.api.scripted import ScriptedSystem, serving

# the first of them may install the browser, which takes `INSTALL_S` at most
TEST_S = 480
pytestmark = pytest.mark.timeout(TEST_S)
VISIT_S = 90
PAGE = """<!doctype html><meta charset="utf-8"><title>test</title><script>
const events = [], errors = [];
const report = (outcome) => fetch("/result", {method: "POST", body: JSON.stringify({events, errors, ...outcome})});
const socket = new WebSocket(URL_HERE, SUBPROTOCOLS_HERE);
socket.onopen = () => socket.send(JSON.stringify({type: "response.create", input: "what?", event_id: "e1"}));
socket.onmessage = (message) => {
  const event = JSON.parse(message.data);
  events.push(event);
  if (event.type === "response.completed" || event.type === "error") socket.close(1000);
};
socket.onerror = () => errors.push("error");
socket.onclose = (close) => report({code: close.code, protocol: socket.protocol});
</script>"""


class PageServer:
    """Serves one page on the loopback and waits for what it reports."""

    def __init__(self) -> None:
        self.page = b""
        self.reported: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("post /result"):
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                said = json.loads(await reader.readexactly(length))
                if not self.reported.done():
                    self.reported.set_result(said)
            body = self.page if head.startswith("get / ") else b""
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()


async def visit(
    chromium: str, profile: Path, *, listed: bool = True, known: bool = True
) -> tuple[dict[str, Any], ScriptedSystem]:
    """What a page reports, and the system it spoke to. `listed`: its Origin is; `known`: its key is."""
    tenant, good = issue("alice")
    token = good if known else "kvb_wrong"
    secret = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    pages, system = PageServer(), ScriptedSystem()
    async with pages.running():
        # the same page under two names of this machine: an Origin is compared as it is written
        origins = (f"http://127.0.0.1:{pages.port}",)
        host = "127.0.0.1" if listed else "localhost"
        limits = ApiLimits(drain_grace_s=0, close_grace_s=1)
        async with serving(system, limits, origins, keys=KeyRing([tenant])) as server:
            names = ["kvblend.v1.json", BEARER_SUBPROTOCOL + secret]
            page = PAGE.replace("URL_HERE", json.dumps(f"ws://127.0.0.1:{server.port}/v1/responses"))
            pages.page = page.replace("SUBPROTOCOLS_HERE", json.dumps(names)).encode()
            async with browsing(chromium, f"http://{host}:{pages.port}/", profile), asyncio.timeout(VISIT_S):
                return await pages.reported, system


async def test_a_page_with_a_key_and_a_listed_origin_gets_its_answer(chromium: str, tmp_path: Path) -> None:
    said, system = await visit(chromium, tmp_path)
    kinds = [event["type"] for event in said["events"]]
    assert (said["protocol"], said["code"], said["errors"]) == ("kvblend.v1.json", 1000, [])
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "".join(event["delta"] for event in said["events"] if "delta" in event) == "one two three"
    assert [event["sequence_number"] for event in said["events"]] == list(range(len(kinds)))
    assert len(system.requests) == 1


@pytest.mark.parametrize(("listed", "known"), [(False, True), (True, False)], ids=["bad origin", "bad key"])
async def test_a_page_of_another_origin_or_with_a_wrong_key_is_not_let_in(
    chromium: str, tmp_path: Path, listed: bool, known: bool
) -> None:
    said, system = await visit(chromium, tmp_path, listed=listed, known=known)
    assert (said["code"], said["errors"], said["events"]) == (1006, ["error"], [])
    assert system.requests == []


def test_an_installation_that_hangs_leaves_the_first_test_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []

    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        assert "DPkg::Lock::Timeout=60" in command
        # the first fails early, the next takes all the time that it gets
        spent.append(timeout if spent else timeout / 3)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name if name == "apt-get" else None)
    monkeypatch.setattr("subprocess.run", hang)
    monkeypatch.setattr("time.monotonic", lambda: sum(spent))
    install_browser()
    assert sum(spent) <= INSTALL_S < TEST_S - VISIT_S
