"""Requests as frames and frames as typed events: `kvblend.v1.msgpack` from the client's side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack
from urllib.parse import urlsplit, urlunsplit

import msgpack

from kvblend.actors.messages import (
    Accepted,
    Delta,
    Document,
    Failed,
    Finished,
    IngestProgress,
    LoadingDecision,
    Planned,
    StoredChunk,
    StreamEvent,
    TokenLogprob,
    Usage,
)
from kvblend.api.client.errors import KvblendError, RequestRefused

SUBPROTOCOL = "kvblend.v1.msgpack"
RESPONSES_PATH = "/v1/responses"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
MESSAGE_BYTES_MAX = 4 << 20
"""The largest frame a server takes."""
Frame = dict[str, Any]
DocumentLike = str | Mapping[str, Any] | Document
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_USAGE_NAMES = frozenset(field.name for field in dataclasses.fields(Usage))
_LOADING_NAMES = frozenset(field.name for field in dataclasses.fields(LoadingDecision))


def websocket_url(url: str) -> str:
    """The WebSocket address of a server given as http(s):// or ws(s):// base URL; ValueError for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError(f"url {url!r} is not an address like ws://host:port")
    path = parts.path.rstrip("/")
    if not path.endswith(RESPONSES_PATH):
        path = path.removesuffix("/v1") + RESPONSES_PATH
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, "", ""))


def encode(frame: Frame) -> bytes:
    """The bytes of a frame; RequestRefused for what cannot be written or is larger than a server takes."""
    try:
        data = bytes(msgpack.packb(frame))
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestRefused(400, "invalid_request", f"the request cannot be written as msgpack: {error}") from error
    if len(data) > MESSAGE_BYTES_MAX:
        message = f"the request has {len(data)} bytes; the limit is {MESSAGE_BYTES_MAX}"
        raise RequestRefused(413, "too_large", message)
    return data


def decode(data: bytes | str) -> Frame:
    """A frame from the server; KvblendError if it is not an object in msgpack."""
    try:
        frame = msgpack.unpackb(data) if isinstance(data, bytes) else None
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise KvblendError(f"the server sent an unreadable frame: {error}") from error
    if not isinstance(frame, dict):
        raise KvblendError("the server sent a frame that is not an object")
    return frame


def document_fields(documents: Iterable[DocumentLike]) -> list[Frame]:
    """Documents as the wire has them: a text alone, `{title?, text}` or `{id}`, each with `behind?`, its neighbours.

    ValueError for a single text.
    """
    if isinstance(documents, str):
        # a text is a sequence of texts too: each character would become a chunk
        raise ValueError(f"documents is one text ({documents[:40]!r}...); give a list of documents")
    out: list[Frame] = []
    for document in documents:
        if isinstance(document, str):
            out.append({"text": document})
        elif isinstance(document, Document):
            plain = {"title": document.title, "text": document.text} if document.title else {"text": document.text}
            out.append(plain if document.id is None else {"id": document.id})
            if document.behind:
                out[-1]["behind"] = document_fields(document.behind)
        else:
            out.append(dict(document))
            if isinstance(near := document.get("behind"), list | tuple | str):
                out[-1]["behind"] = document_fields(near)
    return out


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen, beside the usual fields; what is left out or None is left to the server.

    `logprobs`: log probabilities of every token and of so many of the likeliest, 0..20.
    """

    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    logprobs: int | None


def create_frame(
    *,
    query: str | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    system: str | None = None,
    previous_response_id: str | None = None,
    documents: Iterable[DocumentLike] = (),
    generate: bool = True,
    model: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] | str | None = None,
    deadline_ms: float | None = None,
    mode: str | None = None,
    recompute_ratio: float | str | None = None,
    max_kl: float | None = None,
    selector: str | None = None,
    divergence: str | None = None,
    residual: str | None = None,
    on_miss: str | None = None,
    blend: Mapping[str, Any] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Frame:
    """A `response.create` frame without ids; what is None is left to the server. `blend` has more fields of `blend`."""
    named = {
        "mode": mode,
        "recompute_ratio": recompute_ratio,
        "max_kl": max_kl,
        "selector": selector,
        "divergence": divergence,
        "residual": residual,
        "on_miss": on_miss,
    }
    options = named | {n: list(value) if isinstance(value, tuple) else value for n, value in (blend or {}).items()}
    fields: Frame = {
        "type": "response.create",
        "model": model,
        "input": query,
        "messages": None if messages is None else [dict(message) for message in messages],
        "instructions": system,
        "previous_response_id": previous_response_id,
        "documents": document_fields(documents) or None,
        "generate": None if generate else False,
        "max_output_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop if stop is None or isinstance(stop, str) else list(stop),
        **_sampling_fields(sampling),
        "deadline_ms": deadline_ms,
        "blend": {name: value for name, value in options.items() if value is not None} or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _sampling_fields(sampling: SamplingOptions) -> Frame:
    fields: Frame = dict(sampling)
    if (ids := fields.get("stop_token_ids")) is not None:
        fields["stop_token_ids"] = list(ids)
    if (top := fields.pop("logprobs", None)) is not None:
        fields |= {"include": [INCLUDE_LOGPROBS], "top_logprobs": top}
    return fields


def parse_event(frame: Frame) -> StreamEvent | None:
    """The typed event of a server frame; None for those that only repeat what others said, and for unknown ones."""
    kind = frame.get("type")
    response = frame.get("response") or {}
    request_id = str(frame.get("response_id") or response.get("id") or "")
    match kind:
        case "response.created":
            return Accepted(request_id, str(response.get("model", "")))
        case "response.kv":
            return Planned(request_id, parse_usage(frame))
        case "response.output_text.delta":
            logprobs = tuple(map(parse_logprob, frame.get("logprobs", ())))
            return Delta(request_id, frame["delta"], tuple(frame.get("token_ids", ())), logprobs)
        case "response.ingest.progress":
            return IngestProgress(request_id, frame["done"], frame["total"])
        case "response.completed" | "response.incomplete":
            chunks = tuple(parse_chunk(chunk) for chunk in response.get("chunks", ()))
            detail = (response.get("incomplete_details") or {}).get("detail", "")
            return Finished(request_id, response["finish_reason"], parse_usage(response["usage"]), chunks, detail)
        case "response.failed":
            error = response["error"]
            return Failed(request_id, error["code"], error["message"], error.get("param"))
        case _:
            return None


def parse_logprob(fields: Mapping[str, Any]) -> TokenLogprob:
    """A token's log probabilities."""
    data = fields["bytes"]
    return TokenLogprob(
        fields["token_id"],
        fields["logprob"],
        fields["token"],
        None if data is None else bytes(data),
        tuple(map(parse_logprob, fields.get("top_logprobs", ()))),
        fields.get("offset", 0),
    )


def parse_chunk(fields: Mapping[str, Any]) -> StoredChunk:
    """A stored document; an older server does not say what it was computed behind."""
    return StoredChunk(fields["id"], fields["tokens"], fields["created"], fields.get("conditioning", ""))


def parse_usage(fields: Mapping[str, Any]) -> Usage:
    """The figures a server sent; those this version does not know are left out."""
    known = {name: value for name, value in fields.items() if name in _USAGE_NAMES}
    if "notes" in known:
        known["notes"] = tuple(known["notes"])
    if "loading" in known:
        given = known["loading"]
        known["loading"] = LoadingDecision(**{name: given[name] for name in _LOADING_NAMES if name in given})
    return Usage(**known)
