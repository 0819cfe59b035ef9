"""Client frames to requests: everything is checked here, before any work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    MODES,
    BlendOptions,
    ChatMessage,
    Document,
    Generate,
    Mode,
    Role,
    Sampling,
    SelectionOptions,
)
from kvblend.api.server.fields import Fields, check_text, invalid, show
from kvblend.api.server.limits import ApiLimits

OnMiss = Literal["fresh", "precompute"]
_IDS = {"type", "event_id", "stream_id"}
_PROMPT = {"model", "input", "messages", "instructions", "documents", "chunks"}
_SAMPLING = {"max_output_tokens", "temperature", "top_p", "seed", "stop"}
_CREATE_FIELDS = _IDS | _PROMPT | _SAMPLING | {"generate", "deadline_ms", "blend"}
_CANCEL_FIELDS = _IDS | {"response_id"}
_BLEND_FIELDS = frozenset(("mode", "recompute_ratio", "on_miss", *SelectionOptions.names()))
_TYPES = ("response.create", "response.cancel")


@dataclass(frozen=True, slots=True)
class Create:
    """`response.create`: the request, and the lane it runs in (`""` when the client named none)."""

    request: Generate
    stream_id: str
    event_id: str | None


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


def parse_frame(frame: object, request_id: str, model: str, limits: ApiLimits) -> Create | Cancel:
    """A checked request; `request_id` is what a new response will be called. RequestError names the field."""
    if not isinstance(frame, dict):
        raise RequestError("invalid_request", f"a frame must be an object, not {show(frame)}")
    kind = frame.get("type")
    if kind == "response.create":
        return _parse_create(Fields(frame, "", _CREATE_FIELDS), request_id, model, limits)
    if kind == "response.cancel":
        return _parse_cancel(Fields(frame, "", _CANCEL_FIELDS), limits)
    raise invalid("type", f"is {show(kind)}; choose one of {', '.join(_TYPES)}")


def _parse_cancel(fields: Fields, limits: ApiLimits) -> Cancel:
    response_id = fields.text("response_id", chars_max=limits.id_chars_max)
    stream_id = fields.text("stream_id", chars_max=limits.id_chars_max)
    if (response_id is None) == (stream_id is None):
        raise invalid("response_id", "give either response_id or stream_id")
    return Cancel(response_id, stream_id, fields.text("event_id", chars_max=limits.id_chars_max))


def _parse_create(fields: Fields, request_id: str, model: str, limits: ApiLimits) -> Create:
    event_id = fields.text("event_id", chars_max=limits.id_chars_max)
    stream_id = fields.text("stream_id", chars_max=limits.id_chars_max)
    named = fields.text("model", chars_max=limits.id_chars_max)
    if named is not None and named != model:
        raise RequestError("not_found", f"model: {show(named)} is not served here; this server has {model}", "model")
    generate = fields.flag("generate")
    generate = True if generate is None else generate
    documents = _parse_documents(fields, limits)
    if not generate and not documents:
        raise invalid("documents", "is empty; generate: false stores documents and needs at least one")
    system, messages = _parse_messages(fields, generate, limits)
    request = Generate(
        request_id=request_id,
        messages=messages,
        documents=documents,
        system=system,
        model=named,
        sampling=_parse_sampling(fields, limits),
        blend=_parse_blend(fields),
        deadline_ms=fields.number("deadline_ms", 0, limits.deadline_ms_max, above=True),
        generate=generate,
    )
    return Create(request, stream_id or "", event_id)


def _parse_documents(fields: Fields, limits: ApiLimits) -> tuple[Document, ...]:
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


def _parse_messages(fields: Fields, generate: bool, limits: ApiLimits) -> tuple[str | None, tuple[ChatMessage, ...]]:
    """The system prompt, if any, and the turns after it."""
    if fields.has("input") and fields.has("messages"):
        raise invalid("messages", "is another form of input; give one of the two")
    system = fields.text("instructions", blank=True)
    value = fields.raw("input")
    if isinstance(value, str):
        return system, (ChatMessage("user", check_text(value, "input")),)
    if value is not None and not isinstance(value, list):
        raise invalid("input", f"must be a string or a list of messages, not {show(value)}")
    name = "input" if value is not None else "messages"
    turns: list[ChatMessage] = []
    for index, item in enumerate(fields.array(name, limits.messages_max) or ()):
        one = Fields(item, f"{name}[{index}]", ("role", "content"))
        role = one.choice("role", ("user", "assistant", "system", "developer"))
        if role is None:
            raise invalid(one.path("role"), "is missing")
        if one.raw("content") is None:
            raise invalid(one.path("content"), "is missing")
        content = one.text("content", blank=role in ("system", "developer")) or ""
        if role in get_args(Role):
            turns.append(ChatMessage(cast(Role, role), content))
        elif index > 0:
            raise invalid(one.path("role"), f"is {role}; such a message may only stand first")
        elif system is not None:
            raise invalid(one.path("role"), f"is {role}, but instructions are given too; give one of the two")
        else:
            system = content
    if generate and (not turns or turns[-1].role != "user"):
        raise invalid(
            name if turns else "input", "must end with a user message" if turns else "is empty: ask something"
        )
    return system, tuple(turns)


def _parse_sampling(fields: Fields, limits: ApiLimits) -> Sampling:
    plain = Sampling()
    max_tokens = fields.integer("max_output_tokens", 1, limits.output_tokens_max)
    temperature = fields.number("temperature", 0.0, limits.temperature_max)
    top_p = fields.number("top_p", 0.0, 1.0, above=True)
    return Sampling(
        max_tokens=plain.max_tokens if max_tokens is None else max_tokens,
        temperature=plain.temperature if temperature is None else temperature,
        top_p=plain.top_p if top_p is None else top_p,
        seed=fields.integer("seed", 0, limits.seed_max),
        stop=_parse_stop(fields, limits),
    )


def _parse_stop(fields: Fields, limits: ApiLimits) -> tuple[str, ...]:
    value = fields.raw("stop")
    if isinstance(value, str):
        return (_check_stop(value, "stop", limits),)
    items = fields.array("stop", limits.stop_max) or ()
    return tuple(_check_stop(item, f"stop[{index}]", limits) for index, item in enumerate(items))


def _check_stop(value: object, path: str, limits: ApiLimits) -> str:
    # a stop of blanks ("\n\n") is common and meant; only an empty one can never be found
    text = check_text(value, path, chars_max=limits.stop_chars_max, blank=True)
    if not text:
        raise invalid(path, "is empty")
    return text


def _parse_blend(fields: Fields) -> BlendOptions:
    if not fields.has("blend"):
        return BlendOptions()
    blend = Fields(fields.raw("blend"), "blend", _BLEND_FIELDS)
    mode = blend.choice("mode", MODES)
    return BlendOptions(
        mode=BlendOptions().mode if mode is None else cast(Mode, mode),
        recompute_ratio=blend.number("recompute_ratio", 0.0, 1.0),
        selection=_parse_selection(blend),
        on_miss=cast("OnMiss | None", blend.choice("on_miss", get_args(OnMiss))),
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
