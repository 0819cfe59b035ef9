"""Responses that can be asked for by id, or gone on from: those that run, and the newest of those that have ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from kvblend.actors.messages import ChatMessage, Generate
from kvblend.api.server.fields import PREVIOUS, invalid, show
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.event_log import EventLog
from kvblend.api.server.requests import find_nothing

LOGPROB_CHARS = 400


@dataclass(frozen=True, slots=True)
class _Entry:
    """A response, what it answers, and its events if they can be read again."""

    response: dict[str, Any]
    request: Generate | None
    log: EventLog | None

    @property
    def size(self) -> int:
        request = 0 if self.request is None else asked_chars(self.request)
        return text_chars(self.response) + request + (0 if self.log is None else self.log.size)


class KeptResponses:
    """Response objects by id, bounded in number and in characters of text; the oldest that have ended go first.

    What a response answers counts with it, and so do its events where they are kept. One that ended just now stays,
    however long it is: where it alone is too long, its events are forgotten, then what it answers, then all others.
    """

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, _Entry] = OrderedDict()
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], request: Generate | None = None, log: EventLog | None = None) -> None:
        """Keep the newest state of a response."""
        name = response["id"]
        self.drop(name)
        self._kept[name] = _Entry(response, request, log)
        if response["status"] not in ("queued", "in_progress"):
            entry = self._kept[name] = self._fitted(response, request, log)
            self._ended[name] = size = entry.size
            self._chars += size
        limits = self._limits
        # whoever waits for the newest has not seen its end yet
        while len(self._ended) > 1 and (
            len(self._ended) > limits.kept_responses_max or self._chars > limits.kept_chars_max
        ):
            self.drop(next(iter(self._ended)))

    def _fitted(self, response: dict[str, Any], request: Generate | None, log: EventLog | None) -> _Entry:
        """A response with as much beside it as there is room for it alone."""
        for entry in (_Entry(response, request, log), _Entry(response, request, None)):
            if entry.size <= self._limits.kept_chars_max:
                return entry
        return _Entry(response, None, None)

    def get(self, name: str) -> dict[str, Any] | None:
        """The newest state of a response; None if it is unknown or forgotten."""
        entry = self._kept.get(name)
        return None if entry is None else entry.response

    def log(self, name: str) -> EventLog | None:
        """The events of a response; None if it is unknown or its events are not kept."""
        entry = self._kept.get(name)
        return None if entry is None else entry.log

    def earlier(self, name: str) -> Generate:
        """What a response answered, with its answer as the last message.

        RequestError `previous_response_not_found` for one that is unknown or has not ended, `invalid_request` for one
        without an answer.
        """
        entry = self._kept.get(name)
        if entry is None or entry.request is None or name not in self._ended:
            return find_nothing(name)
        answer = "".join(part["text"] for item in entry.response["output"] for part in item["content"])
        if entry.response["status"] == "failed" or not answer.strip():
            raise invalid(PREVIOUS, f"response {show(name)} has no answer to go on from")
        return replace(entry.request, messages=(*entry.request.messages, ChatMessage("assistant", answer)))

    def drop(self, name: str) -> bool:
        """Forget a response; False if it was not there."""
        self._chars -= self._ended.pop(name, 0)
        return self._kept.pop(name, None) is not None


def text_chars(response: dict[str, Any]) -> int:
    """Characters of text in a response object, its instructions and metadata included.

    A log probability counts as `LOGPROB_CHARS`, which is about what it takes in memory.
    """
    parts = [part for item in response["output"] for part in item["content"]]
    output = sum(len(part["text"]) for part in parts)
    output += LOGPROB_CHARS * sum(1 + len(one["top_logprobs"]) for part in parts for one in part.get("logprobs", ()))
    metadata = sum(len(key) + len(value) for key, value in (response.get("metadata") or {}).items())
    return output + metadata + len(response.get("instructions") or "")


def asked_chars(request: Generate) -> int:
    """Characters of text in a request."""
    documents = sum(len(one.title) + len(one.text) for one in request.documents)
    return documents + sum(len(one.content) for one in request.messages) + len(request.system or "")
