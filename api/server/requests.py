"""Client frames to requests: everything is checked here, before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    MAX_KL_LIMIT,
    MODES,
    BlendOptions,
    ChatMessage,
    Document,
    Generate,
    Mode,
    SelectionOptions,
)
from kvblend.api.server.fields import PREVIOUS, Fields, Places, check_text, invalid, show
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.sampling import SAMPLING_FIELDS, parse_response_logprobs, parse_sampling
from kvblend.api.server.turns import Turns, check_question, neutral, parse_turns

OnMiss = Literal["fresh", "precompute"]
_IDS = {"type", "event_id", "stream_id"}
_PROMPT = {"model", "input", "messages", "instructions", "documents", "chunks", PREVIOUS}
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Fields of OpenAI's that change no answer: taken and ignored."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "max_tool_calls": (),
    "text": ({}, {"format": {"type": "text"}}),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
_OTHERS = {"max_output_tokens", "top_logprobs", "include", "generate", "deadline_ms", "blend"}
_BODY_FIELDS = _PROMPT | SAMPLING_FIELDS | HARMLESS | NEUTRAL.keys() | _OTHERS
_CREATE_FIELDS = _IDS | _BODY_FIELDS
_HTTP_FIELDS = _BODY_FIELDS | {"stream", "background"}
_CANCEL_FIELDS = _IDS | {"response_id"}
_BLEND_FIELDS = frozenset(("mode", "recompute_ratio", "max_kl", "on_miss", *SelectionOptions.names()))
_TYPES = ("response.create", "response.cancel")


@dataclass(frozen=True, slots=True)
class Create:
    """`response.create`: the request, and the lane it runs in (`""` when the client named none).

    `places` pairs paths of the request with those of the frame, see `relocate`. `previous` is the response that it
    goes on from, `store` whether others may go on from it.
    """

    request: Generate
    stream_id: str
    event_id: str | None
    places: Places = ()
    previous: str | None = None
    store: bool = True


@dataclass(frozen=True, slots=True)
class Cancel:
    """`response.cancel`: of one response, or of everything in a lane. Exactly one of the two is set."""

    response_id: str | None
    stream_id: str | None
    event_id: str | None


@dataclass(frozen=True, slots=True)
class FrameIds:
    """Which frame an error answers, as far as the frame could be read."""

    event_id: str | None = None
    stream_id: str | None = None

    @classmethod
    def of(cls, frame: object, limits: ApiLimits) -> FrameIds:
        """What can be read of it without raising."""
        if not isinstance(frame, dict):
            return cls()

        def read(name: str) -> str | None:
            value = frame.get(name)
            return value if isinstance(value, str) and len(value) <= limits.id_chars_max else None

        return cls(read("event_id"), read("stream_id"))


FindEarlier = Callable[[str], Generate]
"""The request of an earlier response, its answer behind its messages; RequestError where there is none."""


def find_nothing(name: str) -> Generate:
    """`FindEarlier` where nothing is kept."""
    message = f"{PREVIOUS}: response {show(name)} is unknown, still runs, or is no longer kept"
    raise RequestError("previous_response_not_found", message, PREVIOUS)


def parse_frame(
    frame: object, request_id: str, model: str, limits: ApiLimits, find: FindEarlier = find_nothing
) -> Create | Cancel:
    """A checked request; `request_id` is what a new response will be called. RequestError names the field."""
    if not isinstance(frame, dict):
        raise RequestError("invalid_request", f"a frame must be an object, not {show(frame)}")
    kind = frame.get("type")
    if kind == "response.create":
        return _parse_create(Fields(frame, "", _CREATE_FIELDS), request_id, model, limits, find)
    if kind == "response.cancel":
        return _parse_cancel(Fields(frame, "", _CANCEL_FIELDS), limits)
    raise invalid("type", f"is {show(kind)}; choose one of {', '.join(_TYPES)}")


def _parse_cancel(fields: Fields, limits: ApiLimits) -> Cancel:
    response_id = fields.text("response_id", chars_max=limits.id_chars_max)
    stream_id = fields.text("stream_id", chars_max=limits.id_chars_max)
    if (response_id is None) == (stream_id is None):
        raise invalid("response_id", "give either response_id or stream_id")
    return Cancel(response_id, stream_id, fields.text("event_id", chars_max=limits.id_chars_max))


def parse_body(
    body: object, request_id: str, model: str, limits: ApiLimits, find: FindEarlier = find_nothing
) -> tuple[Create, bool, bool]:
    """The body of `POST /v1/responses`: the request, whether to stream it, whether it runs in the background."""
    fields = Fields(body, "", _HTTP_FIELDS)
    create = _parse_create(fields, request_id, model, limits, find)
    return create, bool(fields.flag("stream")), bool(fields.flag("background"))


def _parse_create(fields: Fields, request_id: str, model: str, limits: ApiLimits, find: FindEarlier) -> Create:
    event_id = fields.text("event_id", chars_max=limits.id_chars_max)
    stream_id = fields.text("stream_id", chars_max=limits.id_chars_max)
    named = parse_model(fields, model, limits)
    neutral(fields, NEUTRAL)
    generate = fields.flag("generate")
    generate = True if generate is None else generate
    documents = parse_documents(fields, limits)
    if not generate and not documents:
        raise invalid("documents", "is empty; generate: false stores documents and needs at least one")
    previous = fields.text(PREVIOUS, chars_max=limits.id_chars_max)
    if previous is not None and not generate:
        raise invalid(PREVIOUS, "is for answers; leave it out with generate: false")
    earlier = Generate(request_id) if previous is None else find(previous)
    turns = _parse_messages(fields, generate, limits, len(earlier.documents) + len(documents), len(earlier.messages))
    messages = (*earlier.messages, *turns.messages)
    if len(messages) > limits.messages_max:
        raise invalid(PREVIOUS, f"makes a conversation of {len(messages)} messages; the limit is {limits.messages_max}")
    request = Generate(
        request_id=request_id,
        messages=messages,
        documents=(*earlier.documents, *documents, *(turns.documents if generate else ())),
        system=earlier.system if turns.system is None else turns.system,
        model=named,
        sampling=parse_sampling(fields, limits, "max_output_tokens", logprobs=parse_response_logprobs(fields)),
        blend=parse_blend(fields),
        deadline_ms=fields.number("deadline_ms", 0, limits.deadline_ms_max, above=True),
        generate=generate,
    )
    places = (*_places_of(earlier, fields, len(documents)), *turns.places)
    store = fields.flag("store") is not False
    return Create(request, stream_id or "", event_id, places, previous, store)


def _places_of(earlier: Generate, fields: Fields, documents: int) -> Places:
    """What the request calls the messages and documents that came with an earlier response, and those behind them."""
    if not earlier.messages:
        return ()
    name, before = "chunks" if fields.has("chunks") else "documents", len(earlier.documents)
    old = [f"messages[{i}]" for i in range(len(earlier.messages))] + [f"documents[{i}]" for i in range(before)]
    return (
        *((path, PREVIOUS) for path in old),
        *((f"documents[{before + index}]", f"{name}[{index}]") for index in range(documents)),
    )


def parse_model(fields: Fields, model: str, limits: ApiLimits) -> str | None:
    """The model asked for, if any. RequestError `not_found` for another than `model`."""
    named = fields.text("model", chars_max=limits.id_chars_max)
    if named is not None and named != model:
        raise RequestError("not_found", f"model: {show(named)} is not served here; this server has {model}", "model")
    return named


def parse_documents(fields: Fields, limits: ApiLimits) -> tuple[Document, ...]:
    """The field `documents`, or `chunks`: `{title?, text, behind?}` or `{id, behind?}` each."""
    if fields.has("documents") and fields.has("chunks"):
        raise invalid("chunks", "is another name of documents; give one of the two")
    name = "chunks" if fields.has("chunks") else "documents"
    documents: list[Document] = []
    for index, item in enumerate(fields.array(name, limits.items_max) or ()):
        path = f"{name}[{index}]"
        one = Fields(item, path, ("title", "text", "id", "behind"))
        behind = tuple(
            _parse_text(near, f"{path}.behind[{number}]")
            for number, near in enumerate(one.array("behind", limits.neighbours_max) or ())
        )
        chunk_id = one.text("id", chars_max=limits.id_chars_max)
        if chunk_id is not None:
            if one.has("text") or one.has("title"):
                raise invalid(f"{path}.id", "give either id, or text with an optional title")
            documents.append(Document(id=chunk_id, behind=behind))
            continue
        text = one.text("text")
        if text is None:
            raise invalid(f"{path}.text", "is missing; a document is {title?, text} or {id}")
        documents.append(Document(text=text, title=one.text("title", blank=True) or "", behind=behind))
    return tuple(documents)


def _parse_text(item: object, path: str) -> Document:
    """A neighbour of a document: `{title?, text}`."""
    one = Fields(item, path, ("title", "text"))
    text = one.text("text")
    if text is None:
        raise invalid(f"{path}.text", "is missing; a neighbour is {title?, text}")
    return Document(text=text, title=one.text("title", blank=True) or "")


def _parse_messages(fields: Fields, generate: bool, limits: ApiLimits, documents: int, before: int) -> Turns:
    """The system prompt, if any, the turns after it, and the documents in them; `documents` come before those.

    They follow `before` messages of an earlier response.
    """
    if fields.has("input") and fields.has("messages"):
        raise invalid("messages", "is another form of input; give one of the two")
    system = fields.text("instructions", blank=True)
    value = fields.raw("input")
    name = "input" if value is not None or not fields.has("messages") else "messages"
    if isinstance(value, str):
        turns = Turns(messages=[ChatMessage("user", check_text(value, "input"))])
        turns.places.append((f"messages[{before}].content", name))
    elif value is not None and not isinstance(value, list):
        raise invalid("input", f"must be a string or a list of messages, not {show(value)}")
    else:
        turns = parse_turns(fields.array(name, limits.messages_max) or [], name, limits, documents, before)
    if system is not None:
        if turns.system is not None:
            raise invalid(f"{name}[0].role", "is a system message, but instructions are given too; give one of the two")
        turns.system = system
    if generate:
        check_question(turns, name)
    return turns


def parse_blend(fields: Fields) -> BlendOptions:
    """The object `blend`: how stored chunks are used in this request."""
    if not fields.has("blend"):
        return BlendOptions()
    blend = Fields(fields.raw("blend"), "blend", _BLEND_FIELDS)
    mode = blend.choice("mode", MODES)
    return BlendOptions(
        mode=BlendOptions().mode if mode is None else cast(Mode, mode),
        recompute_ratio="auto" if blend.raw("recompute_ratio") == "auto" else blend.number("recompute_ratio", 0.0, 1.0),
        selection=_parse_selection(blend),
        on_miss=cast("OnMiss | None", blend.choice("on_miss", get_args(OnMiss))),
        max_kl=blend.number("max_kl", 0.0, MAX_KL_LIMIT),
    )


def _parse_selection(blend: Fields) -> SelectionOptions:
    # the values are checked as they came, whatever their type
    given: dict[str, Any] = {}
    for name in SelectionOptions.names():
        value = blend.raw(name)
        given[name] = tuple(value) if isinstance(value, list) else value
    selection = SelectionOptions(**given)
    selection.check()
    return selection
