from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest
from websockets.exceptions import ConnectionClosed

from kvblend.actors.messages import Generate
from kvblend.actors.streams import TokenStream
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.serve import bind, serve
from tests.api.scripted import ScriptedSystem, answer, hold, serving

CALM = ApiLimits(drain_grace_s=20.0, close_grace_s=2.0)


async def test_an_idle_connection_is_closed_with_1012_on_stop() -> None:
    async with serving(ScriptedSystem()) as server, server.peer() as peer:
        await peer.create()
        await peer.finish()
        server.stop.set()
        with pytest.raises(ConnectionClosed) as caught:
            await peer.receive()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1012


async def test_a_running_response_finishes_while_draining() -> None:
    release = asyncio.Event()

    async def wait_then_answer(request: Generate, stream: TokenStream) -> None:
        await release.wait()
        await answer(request, stream)

    async with serving(ScriptedSystem(wait_then_answer), CALM) as server, server.peer() as peer:
        await peer.create()
        await peer.until("response.in_progress")
        server.stop.set()
        await peer.create(stream_id="late")
        # refused once the stop is noticed; if it slipped in before, it is an accepted request like the first
        release.set()
        assert (await peer.finish())[-1]["type"] == "response.completed"
    assert server.task.result() == 0


async def test_a_new_request_while_draining_is_503() -> None:
    async with serving(ScriptedSystem(hold), CALM) as server, server.peer() as peer:
        await peer.create()
        frames = await peer.until("response.output_text.delta")
        server.stop.set()
        error = None
        for index in range(100):
            await peer.create(stream_id=f"s{index % 8}", event_id="probe")
            frame = await peer.receive()
            if frame["type"] == "error" and frame["status"] == 503:
                error = frame
                break
        for request in server.system.requests:
            await peer.send({"type": "response.cancel", "response_id": request.request_id})
    assert frames
    assert error is not None
    assert "shutting down" in error["error"]["message"]


async def test_what_outlasts_the_grace_ends_cancelled() -> None:
    limits = ApiLimits(drain_grace_s=0.0, close_grace_s=2.0)
    async with serving(ScriptedSystem(hold), limits) as server, server.peer() as peer:
        await peer.create()
        await peer.until("response.output_text.delta")
        server.stop.set()
        end = (await peer.finish())[-1]
    assert end["response"]["incomplete_details"]["detail"] == "the server is shutting down"


async def test_a_dead_system_ends_the_server_non_zero() -> None:
    async with serving(ScriptedSystem()) as server:
        server.system.fatal.set_result(None)
        async with asyncio.timeout(20):
            assert await server.task == 1


async def test_a_taken_port_is_a_clear_error() -> None:
    listener = await bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    try:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            await serve(ScriptedSystem(), "127.0.0.1", port, handle_signals=False)
    finally:
        listener.close()


async def test_sigterm_stops_the_server() -> None:
    system = ScriptedSystem()

    def on_listening(_host: str, _port: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async with asyncio.timeout(20):
        assert await serve(system, "127.0.0.1", 0, on_listening=on_listening) == 0
    await system.close()


async def test_a_second_signal_does_not_wait_for_the_drain() -> None:
    system = ScriptedSystem()
    draining = asyncio.Event()

    async def drain(grace_s: float) -> None:
        draining.set()
        await asyncio.Event().wait()

    system.drain = drain  # type: ignore[method-assign]
    listening = asyncio.Event()
    task = asyncio.create_task(serve(system, "127.0.0.1", 0, on_listening=lambda _h, _p: listening.set()))
    async with asyncio.timeout(20):
        await listening.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await draining.wait()
        os.kill(os.getpid(), signal.SIGINT)
        assert await task == 0
    await system.close()


async def test_cancelling_serve_closes_its_connections() -> None:
    async with serving(ScriptedSystem(hold)) as server, server.peer() as peer:
        await peer.create()
        await peer.until("response.output_text.delta")
        server.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server.task
        await server.system.until(lambda: len(server.system.abandoned) == 1)


async def test_small_frames_are_sent_at_once() -> None:
    with await bind("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
