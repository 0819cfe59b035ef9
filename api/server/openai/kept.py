"""Responses that can be asked for by id: those that run, and the newest of those that have ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvblend.api.server.limits import ApiLimits


class KeptResponses:
    """Response objects by id, bounded in number and in characters of text; the oldest that have ended go first."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any]) -> None:
        """Keep the newest state of a response."""
        name = response["id"]
        self.drop(name)
        self._kept[name] = response
        if response["status"] not in ("queued", "in_progress"):
            self._ended[name] = size = text_chars(response)
            self._chars += size
        limits = self._limits
        while len(self._ended) > limits.kept_responses_max or self._chars > limits.kept_chars_max:
            self.drop(next(iter(self._ended)))

    def get(self, name: str) -> dict[str, Any] | None:
        """The newest state of a response; None if it is unknown or forgotten."""
        return self._kept.get(name)

    def drop(self, name: str) -> bool:
        """Forget a response; False if it was not there."""
        self._chars -= self._ended.pop(name, 0)
        return self._kept.pop(name, None) is not None


def text_chars(response: dict[str, Any]) -> int:
    """Characters of text in a response object, its instructions and metadata included."""
    output = sum(len(part["text"]) for item in response["output"] for part in item["content"])
    metadata = sum(len(key) + len(value) for key, value in (response.get("metadata") or {}).items())
    return output + metadata + len(response.get("instructions") or "")
