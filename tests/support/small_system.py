"""A whole system on a tiny random model, for tests of what happens between submit and the terminal event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvblend.actors.messages import BlendOptions, ChatMessage, Delta, Document, Finished, Generate, Sampling
from kvblend.actors.settings import Settings
from kvblend.actors.streams import TokenStream
from kvblend.actors.system import System
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.port import SystemPort
from kvblend.api.server.serve import serve

TEXTS = (
    "the river and the mill were the old heart of the town; the wheel turned all night when the water rose. " * 2,
    "a baker lived by the bridge and sold bread to the miller every morning before the bell rang. " * 2,
    "in winter the ice held the wheel fast and the town was silent until the thaw came down the valley. " * 2,
    "the mayor kept the key of the sluice and let nobody near it, not even the miller himself. " * 2,
)
# random weights have no quality that a gate could judge; tests that say nothing else want exact chunks and every slot
# given back
SETTINGS: dict[str, Any] = {
    "system": "be brief.",
    "blend_min_tokens": 1,
    "kv_tokens_max": 8192,
    "debug": True,
    "gate": "off",
    "store_dtype": "float32",
    "kept_tokens_max": 0,
}


@asynccontextmanager
async def running(model: Path, **changes: Any) -> AsyncIterator[System]:
    system = await System.start(Settings(**{**SETTINGS, **changes}), model, "tiny")
    try:
        yield system
    finally:
        await system.close()


@asynccontextmanager
async def serving_any(system: SystemPort, limits: ApiLimits | None = None, **options: Any) -> AsyncIterator[int]:
    """A server over any system, which stays its owner's; the port."""
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    options["on_listening"] = lambda _host, port: listening.set_result(port)
    task = asyncio.create_task(
        serve(system, "127.0.0.1", 0, limits=limits, stop=stop, handle_signals=False, **options), name="server"
    )
    try:
        yield await listening
    finally:
        stop.set()
        await task


def request(
    request_id: str, texts: Sequence[str | Document] = (), question: str = "who held the key?", **changes: Any
) -> Generate:
    sampling = changes.pop("sampling", Sampling(max_tokens=changes.pop("max_tokens", 6)))
    blend = BlendOptions(**{k: changes.pop(k) for k in ("mode", "recompute_ratio", "on_miss") if k in changes})
    documents = tuple(t if isinstance(t, Document) else Document(t) for t in texts)
    messages = (ChatMessage("user", question),) if question else ()
    return Generate(request_id, messages, documents, sampling=sampling, blend=blend, **changes)


async def answer(system: System, *args: Any, **changes: Any) -> tuple[str, Finished]:
    stream = await system.submit(request(*args, **changes))
    return await stream.result()


async def first_delta(stream: TokenStream) -> Delta:
    async for event in stream:
        if isinstance(event, Delta):
            return event
    raise AssertionError("the stream ended without text")
