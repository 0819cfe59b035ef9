"""Requests that wait for something to be found out about the model before they are planned."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Generate


class WaitingRoom:
    """Waits for tasks on behalf of requests, of at most `requests_max` at once. Of one event loop."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._waiting = 0

    async def wait(self, request: Generate, task: asyncio.Task[Any], what: str) -> Generate:
        """The request once `task` is done, with what is left of its deadline. The task is never cancelled.

        Raises RequestError where its deadline passes meanwhile, or too many wait. `what` names the task in it.
        """
        if self._waiting >= self._requests_max:
            raise RequestError("overloaded", f"{self._waiting} requests wait for {what}", retry_after_s=5.0)
        loop, limit = asyncio.get_running_loop(), request.deadline_ms
        began = loop.time()
        self._waiting += 1
        try:
            await asyncio.wait({task}, timeout=None if limit is None else limit / 1e3)
        finally:
            self._waiting -= 1
        if limit is None:
            return request
        left_ms = limit - 1e3 * (loop.time() - began)
        if left_ms <= 0:
            raise RequestError("deadline_exceeded", f"deadline_ms: {limit:g} ms passed while {what} ran")
        return replace(request, deadline_ms=left_ms)
