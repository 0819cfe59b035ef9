"""What a request's stream says, as the events of the wire, in their order and numbered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvblend.actors.errors import STATUS_BY_CODE, RequestError
from kvblend.actors.messages import (
    Accepted,
    Delta,
    Failed,
    Finished,
    IngestProgress,
    Planned,
    StreamEvent,
    Usage,
)
from kvblend.api.server.codec import Event
from kvblend.api.server.logprobs import response_logprobs
from kvblend.api.server.requests import FrameIds

# what clients of the plain protocol look for in every response object
_PLAIN: dict[str, Any] = {
    "error": None,
    "incomplete_details": None,
    "parallel_tool_calls": False,
    "tool_choice": "none",
    "tools": [],
}


class ResponseEvents:
    """The translator of one response: feed it its stream's events in order.

    `extended` adds what only our subprotocols carry: `response.kv`, `response_id` on every event, and token ids on
    deltas. `echo` are fields of the request that the response object repeats.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        created_at: float,
        ids: FrameIds,
        *,
        extended: bool,
        generate: bool,
        echo: Mapping[str, Any] | None = None,
    ) -> None:
        self.response_id = response_id
        self.terminal = False
        self._model = model
        self._created_at = int(created_at)
        self._ids = ids
        self._extended = extended
        self._generate = generate
        self._echo = {} if echo is None else dict(echo)
        self._sequence = 0
        self._item_open = False
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def translate(self, event: StreamEvent) -> list[Event]:
        """The wire events of one stream event; after the terminal one there are none."""
        if self.terminal:
            return []
        match event:
            case Accepted():
                created = self._event("response.created", response=self._response("in_progress"))
                if not self._generate:
                    return [created]
                return [created, self._event("response.in_progress", response=self._response("in_progress"))]
            case Planned():
                return [self._event("response.kv", **usage_fields(event.usage))] if self._extended else []
            case Delta():
                return self._on_delta(event)
            case IngestProgress():
                return [self._event("response.ingest.progress", done=event.done, total=event.total)]
            case Finished():
                return self._on_finished(event)
            case Failed():
                return self.fail(event.code, event.message, event.param)

    def fail(self, code: str, message: str, param: str | None = None) -> list[Event]:
        """The terminal events of a response that cannot be completed."""
        self.terminal = True
        error = error_fields(code, message, param)
        return [self._event("response.failed", response=self._response("failed", error=error))]

    def abort(self, detail: str) -> list[Event]:
        """The terminal events of a response whose reader went away."""
        return self._on_finished(Finished(self.response_id, "cancelled", Usage(), detail=detail))

    def snapshot(self) -> dict[str, Any]:
        """The response object before its end."""
        return self._response("in_progress")

    def _on_delta(self, event: Delta) -> list[Event]:
        out = self._open_item()
        self._text.append(event.text)
        extra: dict[str, Any] = {"token_ids": list(event.token_ids)} if self._extended else {}
        extra["logprobs"] = response_logprobs(event.logprobs, extended=self._extended)
        if not self._extended:
            # whoever speaks our subprotocols has them from the deltas
            self._logprobs += extra["logprobs"]
        out.append(self._event("response.output_text.delta", **self._place(), delta=event.text, **extra))
        return out

    def _on_finished(self, event: Finished) -> list[Event]:
        out: list[Event] = []
        if self._generate and (event.reason != "cancelled" or self._item_open):
            out = self._open_item()
            out += self._close_item("completed" if event.reason == "stop" else "incomplete")
        self.terminal = True
        more: dict[str, Any] = {"usage": usage_fields(event.usage), "finish_reason": event.reason}
        if not self._generate:
            more["chunks"] = [dataclasses.asdict(chunk) for chunk in event.chunks]
        if event.reason == "stop":
            out.append(self._event("response.completed", response=self._response("completed", **more)))
            return out
        details: dict[str, Any] = {"reason": "max_output_tokens" if event.reason == "length" else event.reason}
        if event.detail:
            details["detail"] = event.detail
        more["incomplete_details"] = details
        out.append(self._event("response.incomplete", response=self._response("incomplete", **more)))
        return out

    def _open_item(self) -> list[Event]:
        if self._item_open:
            return []
        self._item_open = True
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def _close_item(self, status: str) -> list[Event]:
        text = "".join(self._text)
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs),
            self._event("response.content_part.done", **self._place(), part=_part(text, self._logprobs)),
            self._event("response.output_item.done", output_index=0, item=self._item(status)),
        ]

    @property
    def _item_id(self) -> str:
        return f"msg_{self.response_id.removeprefix('resp_')}"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> dict[str, Any]:
        content = [_part("".join(self._text), self._logprobs)]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        item_status = "completed" if status == "completed" else "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "model": self._model,
            "status": status,
            "output": [self._item(item_status)] if self._item_open and status != "in_progress" else [],
            **({} if self._extended else _PLAIN),
            **self._echo,
            **more,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event: Event = {"type": kind, "sequence_number": self._sequence}
        self._sequence += 1
        if self._ids.stream_id:
            event["stream_id"] = self._ids.stream_id
        if self._extended:
            event["response_id"] = self.response_id
            if self._ids.event_id and kind == "response.created":
                event["event_id"] = self._ids.event_id
        return {**event, **fields}


def plain_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response object with all that clients of the plain protocol look for."""
    return {**_PLAIN, **response}


def error_event(error: RequestError, ids: FrameIds) -> Event:
    """An `error` event: it carries no response id, so nothing was accepted."""
    event: Event = {"type": "error", "status": error.status}
    if ids.event_id is not None:
        event["event_id"] = ids.event_id
    if ids.stream_id is not None:
        event["stream_id"] = ids.stream_id
    event["error"] = error_fields(error.code, error.message, error.param)
    if error.retry_after_s is not None:
        event["error"]["retry_after_s"] = error.retry_after_s
    return event


def error_fields(code: str, message: str, param: str | None) -> dict[str, Any]:
    """The error object of the one error table; a code that is not in it is shown as `internal`."""
    code = code if code in STATUS_BY_CODE else "internal"
    status = STATUS_BY_CODE[code]
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"type": kind, "code": code, "message": message, "param": param, "status": status}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """All figures of a request under our names, and the usual ones under the names of the Responses API."""
    return {
        **own_fields(usage),
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.tokens_reused},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def own_fields(usage: Usage) -> dict[str, Any]:
    """All figures of a request under our names."""
    fields: dict[str, Any] = {field.name: getattr(usage, field.name) for field in dataclasses.fields(usage)}
    return {
        **fields,
        "tiers": dict(usage.tiers),
        "tier_tokens": dict(usage.tier_tokens),
        "loading": dataclasses.asdict(usage.loading),
        "notes": list(usage.notes),
    }


def _part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    told = {"logprobs": list(logprobs)} if logprobs else {}
    return {"type": "output_text", "text": text, "annotations": [], **told}
