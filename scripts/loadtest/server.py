"""What is asked of the server before the load: whether it is there, and its model."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp

from loadtest.options import Options

RETRY_S = 0.5
ASK_S = 10.0


class ServerAbsent(Exception):
    """The server does not answer, or not as one with a model."""


def find_model(options: Options) -> str:
    """The name to send in requests. ServerAbsent if the server cannot be reached or lists no model."""
    return asyncio.run(_wait_for_model(options))


async def _wait_for_model(options: Options) -> str:
    end = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            return await _ask_model(options)
        except ServerAbsent:
            if time.monotonic() >= end:
                raise
        await asyncio.sleep(RETRY_S)


async def _ask_model(options: Options) -> str:
    url = options.base_url + "/v1/models"
    given = options.served_model_name or options.model
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    connector = aiohttp.TCPConnector(ssl=not options.insecure)
    try:
        async with (
            aiohttp.ClientSession(headers=options.headers, timeout=timeout, connector=connector) as session,
            session.get(url) as answer,
        ):
            status, text = answer.status, await answer.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerAbsent(f"{url}: {error or 'no answer in time'}") from error
    if given is not None:
        # a server need not list its models to one who knows them
        return given
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServerAbsent(f"{url}: HTTP {status} without a model; give --model") from None
