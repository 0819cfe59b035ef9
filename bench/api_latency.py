#!/usr/bin/env python3
"""What the wire adds to each token: from its emission in the engine's place to the client that reads it.

A scripted engine in a server process of its own emits, in every stream, a token each `--interval-ms`; the token is the
moment of its emission. A client in this process reads `--streams` of them over `--connections` WebSockets
(`kvblend.v1.msgpack`) or, with `--transport sse`, as chat completions, and takes the difference. `--json` prints one
object. What the machine does beside it counts too: `idle` is how late a bare timer is in this process, `loop_lag` how
late one in the server's loop is, both during the run. `--clock cpu` is for a busy machine: server, engine and client
share one thread and one core, and all times are that thread's processor time, in which nobody else's work shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import psutil
import uvloop
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.serve import serve

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from scripted_server import scripted, timed_system

LAG_STEP_S = 0.005
TARGET_MS = 2.0
# a server's first moments: connections are made and code is met for the first time
SKIPPED_TOKENS = 5


@dataclass
class Taken:
    """Milliseconds from emission to arrival, of every token of all streams; `pieces` are the events they came in."""

    clock_ns: Callable[[], int]
    latencies_ms: list[float] = field(default_factory=list)
    pieces: int = 0

    def take(self, text: str, seen: int) -> int:
        """The tokens of one delta; how many the stream has had then."""
        now_ns = self.clock_ns()
        moments = [int(word) for word in text.split()]
        self.pieces += 1
        for moment in moments:
            seen += 1
            if seen > SKIPPED_TOKENS:
                self.latencies_ms.append((now_ns - moment) / 1e6)
        return seen


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean, median, p99 and largest, in the unit of the values."""
    ordered = sorted(values)
    if not ordered:
        return {}

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    figures = {"mean": sum(ordered) / len(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1]}
    return {name: round(value, 3) for name, value in figures.items()}


async def read_websocket(port: int, lanes: int, taken: Taken) -> None:
    """All lanes of one connection, to their ends."""
    names = [Subprotocol("kvblend.v1.msgpack")]
    url = f"ws://127.0.0.1:{port}/v1/responses"
    async with connect(url, subprotocols=names, compression=None, proxy=None) as socket:
        seen = dict.fromkeys((f"lane-{number}" for number in range(lanes)), 0)
        for name in seen:
            await socket.send(msgpack.packb({"type": "response.create", "input": "what?", "stream_id": name}))
        running = len(seen)
        while running:
            event = msgpack.unpackb(await socket.recv())
            if event["type"] == "response.output_text.delta":
                seen[event["stream_id"]] = taken.take(event["delta"], seen[event["stream_id"]])
            elif event["type"] == "response.completed":
                running -= 1
            elif event["type"] in ("error", "response.failed"):
                raise RuntimeError(f"the server refused: {event}")


async def read_sse(port: int, taken: Taken) -> None:
    """One chat completion to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"messages": [{"role": "user", "content": "what?"}], "stream": True})
    lines = ["POST /v1/chat/completions HTTP/1.0", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    writer.write("\r\n".join([*lines, "", body]).encode())
    seen = 0
    async for line in reader:
        if line.startswith(b'data: {"id"'):
            text = json.loads(line[6:])["choices"][0]["delta"].get("content")
            seen = taken.take(text, seen) if text else seen
    writer.close()
    await writer.wait_closed()


async def watch_timer(lags_ms: list[float]) -> None:
    """How late this process's loop is, again and again."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_STEP_S
        await asyncio.sleep(LAG_STEP_S)
        lags_ms.append(max(0.0, loop.time() - due) * 1e3)


async def measure(given: argparse.Namespace, port: int, clock_ns: Callable[[], int]) -> dict[str, Any]:
    """One run over one transport."""
    taken, lags = Taken(clock_ns), list[float]()
    watching = asyncio.create_task(watch_timer(lags))
    if given.transport == "websocket":
        shares = [len(range(index, given.streams, given.connections)) for index in range(given.connections)]
        await asyncio.gather(*(read_websocket(port, lanes, taken) for lanes in shares if lanes))
    else:
        await asyncio.gather(*(read_sse(port, taken) for _ in range(given.streams)))
    watching.cancel()
    added = percentiles(taken.latencies_ms)
    return {
        "transport": given.transport,
        "streams": given.streams,
        "connections": given.connections if given.transport == "websocket" else given.streams,
        "interval_ms": given.interval_ms,
        "tokens": len(taken.latencies_ms),
        "pieces": taken.pieces,
        "added_ms": added,
        "idle_ms": percentiles(lags),
        "target_p99_ms": TARGET_MS,
        "within_target": added["p99"] < TARGET_MS,
    }


class CpuTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose time is the processor time of its thread: it stands still while others have the processor."""

    def time(self) -> float:
        return time.thread_time()

    def spin(self) -> None:
        """Use up what is left over, so that time goes on."""
        self.call_soon(self.spin)


async def measure_in_one_thread(given: argparse.Namespace) -> dict[str, Any]:
    """Server, scripted engine and client in this thread, in its own time."""
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop, system = asyncio.Event(), timed_system(given.interval_ms, given.tokens, time.thread_time_ns)
    limits = ApiLimits(drain_grace_s=0.0, close_grace_s=1.0, lanes_max=64)
    serving = asyncio.create_task(
        serve(
            system,
            "127.0.0.1",
            0,
            limits=limits,
            stop=stop,
            handle_signals=False,
            on_listening=lambda _host, port: listening.set_result(port),
        )
    )
    found = await measure(given, await listening, time.thread_time_ns)
    stop.set()
    await serving
    await system.close()
    found["loop_lag_ms"] = found["idle_ms"]
    return found


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Server and client, once; the figures of both."""
    found = run_on_cpu_time(given) if given.clock == "cpu" else run_on_wall_time(given)
    found["clock"] = given.clock
    found["machine"] = {"cores": os.cpu_count(), "load": [round(one, 2) for one in os.getloadavg()]}
    return found


def run_on_cpu_time(given: argparse.Namespace) -> dict[str, Any]:
    """Everything in one thread; a busy machine makes it slower, not its figures larger."""
    with asyncio.Runner(loop_factory=CpuTimeLoop) as runner:
        loop = runner.get_loop()
        if isinstance(loop, CpuTimeLoop):
            loop.spin()
        return runner.run(measure_in_one_thread(given))


def run_on_wall_time(given: argparse.Namespace) -> dict[str, Any]:
    """The server in a process of its own, as users have it."""
    with tempfile.TemporaryDirectory() as folder:
        lag_file = Path(folder) / "lag.json"
        flags = ["--interval-ms", str(given.interval_ms), "--tokens", str(given.tokens), "--lag-file", str(lag_file)]
        with scripted(Path(folder) / "errors.txt", *flags) as server:
            process = psutil.Process(server.process.pid)
            before = sum(process.cpu_times()[:2])
            found = uvloop.run(measure(given, server.port, time.monotonic_ns))
            spent_s = sum(process.cpu_times()[:2]) - before
            server.stop()
        found["loop_lag_ms"] = percentiles(json.loads(lag_file.read_text()))
    found["server_cpu_us_per_token"] = round(spent_s * 1e6 / (given.streams * given.tokens), 1)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 however it comes out, for what is measured is the machine too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("websocket", "sse"), default="websocket")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, see above")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--connections", type=int, default=4, help="WebSockets that the streams share")
    parser.add_argument("--interval-ms", type=float, default=50.0, help="between two tokens of a stream")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = run(given)
    if given.json:
        print(json.dumps(found))
        return 0
    rate = given.streams * 1e3 / given.interval_ms
    print(f"{given.streams} streams over {found['connections']} connections ({given.transport}), {rate:.0f} tokens/s")
    names = {"added_ms": "added per token", "loop_lag_ms": "server's loop late", "idle_ms": "client's loop late"}
    for name, text in names.items():
        print(f"{text:20}" + "  ".join(f"{key} {value:8.3f} ms" for key, value in found[name].items()))
    if "server_cpu_us_per_token" in found:
        print(
            f"server's processor time {found['server_cpu_us_per_token']:.0f} us per token, requests and idling included"
        )
    print(f"target: p99 below {TARGET_MS:g} ms: {'kept' if found['within_target'] else 'missed'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
