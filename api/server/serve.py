"""Running the application: one uvicorn server inside the caller's loop, drained before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Any

import uvicorn

from kvblend.api.server.app import create_app
from kvblend.api.server.gate import Gate
from kvblend.api.server.keys import KeyRing
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.port import SystemPort
from kvblend.api.server.protocol import http_protocol_with, protocol_with
from kvblend.api.server.rates import RateLimits

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the process's signals alone: `serve` decides when it stops."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def bind(host: str, port: int) -> socket.socket:
    """A listening socket on the first address of `host`; OSError names address and reason."""
    loop = asyncio.get_running_loop()
    try:
        family, _, _, _, address = (
            await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=1024)
        # asyncio's own loop leaves it out for such a socket, and every small frame would wait 40 ms for an answer
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error


async def serve(
    system: SystemPort,
    host: str,
    port: int,
    *,
    limits: ApiLimits | None = None,
    origins: Collection[str] = (),
    keys: KeyRing | None = None,
    rates: RateLimits | None = None,
    on_listening: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
    handle_signals: bool = True,
) -> int:
    """Serve until SIGTERM, SIGINT or `stop`, drain, and return the exit code: non-zero if the system died.

    `on_listening` gets the host and the port bound (port 0 picks a free one). While draining, new requests are
    refused and running ones finish, at most `limits.drain_grace_s` seconds; a second signal stops at once. The caller
    closes the system. `keys` and `rates` are those of `create_app`.
    """
    limits = limits or ApiLimits()
    gate = Gate(limits)
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()
    listener = await bind(host, port)
    bound_port = int(listener.getsockname()[1])

    def announce() -> None:
        if on_listening is not None:
            on_listening(host, bound_port)

    server = _Server(_config(create_app(system, limits, gate, origins, keys, rates), limits, gate), announce)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        if handle_signals:
            stack.enter_context(_signals(stop, hurry))
        running = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
        try:
            died = await _wait_for_end(system, stop, running)
            if not died:
                await _drain(system, gate, limits, hurry)
        finally:
            # also when this task is cancelled: uvicorn closes its connections only if it may end by itself
            gate.close()
            server.should_exit = True
            await running
    return 1 if died or not stop.is_set() else 0


def _config(app: object, limits: ApiLimits, gate: Gate) -> uvicorn.Config:
    def count_stall() -> None:
        gate.slow_consumers += 1

    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=http_protocol_with(limits.stall_s, limits.body_s, count_stall),
        ws=protocol_with(limits.close_grace_s),
        ws_max_size=limits.message_bytes_max,
        ws_ping_interval=limits.ping_s,
        ws_ping_timeout=limits.ping_s,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(limits.close_grace_s)),
    )


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """While inside, the first signal sets `stop` and a second one `hurry`."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _wait_for_end(system: SystemPort, stop: asyncio.Event, running: asyncio.Task[None]) -> bool:
    """Wait for a reason to end; True if the system died or the server ended by itself."""
    stopping = asyncio.create_task(stop.wait(), name="serve-stop")
    reasons: set[asyncio.Future[Any]] = {system.fatal, stopping, running}
    try:
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
    if system.fatal.done():
        cause = None if system.fatal.cancelled() else system.fatal.exception()
        _log.critical("the system died: stopping", exc_info=cause)
    return system.fatal.done() or running.done()


async def _drain(system: SystemPort, gate: Gate, limits: ApiLimits, hurry: asyncio.Event) -> None:
    """Let what runs finish and be sent; cut short by `hurry`."""
    gate.close()

    async def calmly() -> None:
        await system.drain(limits.drain_grace_s)
        await gate.wait_empty(limits.close_grace_s)

    calm = asyncio.create_task(calmly(), name="serve-drain")
    hurried = asyncio.create_task(hurry.wait(), name="serve-hurry")
    reasons: set[asyncio.Future[Any]] = {calm, hurried, system.fatal}
    try:
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    finally:
        calm.cancel()
        hurried.cancel()
        await asyncio.gather(calm, hurried, return_exceptions=True)
    if calm.done() and not calm.cancelled() and (error := calm.exception()) is not None:
        _log.error("draining failed", exc_info=error)
