"""JSON schemas of the bodies, with the limits that the server checks."""

from __future__ import annotations

from typing import Any, get_args

from kvblend.actors.messages import (
    LOGPROBS_MAX,
    MODES,
    PENALTY_MAX,
    REPETITION_PENALTIES,
    STOP_IDS_MAX,
    SelectionOptions,
)
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.bodies import CHAT_FIELDS, TEXT_FIELDS
from kvblend.api.server.requests import HARMLESS, OnMiss
from kvblend.api.server.sampling import INCLUDE_LOGPROBS, TOP_K_MAX
from kvblend.api.server.turns import PART_TYPES, ROLES

Schema = dict[str, Any]


def build_schemas(model: str, limits: ApiLimits) -> dict[str, Schema]:
    """The named schemas of a server of this model."""
    shared = _shared(model, limits)
    return {
        "Document": _document(limits),
        "Message": _message(),
        "Blend": _blend(),
        "Error": _error(),
        "ChatCompletion": _object(
            {
                **{name: schema for name, schema in shared.items() if name in CHAT_FIELDS},
                "messages": {"type": "array", "items": _ref("Message"), "minItems": 1, "maxItems": limits.messages_max},
                "max_completion_tokens": _whole(1, limits.output_tokens_max),
                "logprobs": {"type": "boolean"},
                "top_logprobs": _whole(0, LOGPROBS_MAX),
            },
            "messages",
        ),
        "Completion": _object(
            {
                **{name: schema for name, schema in shared.items() if name in TEXT_FIELDS},
                "prompt": _prompt(limits),
                "logprobs": _whole(0, LOGPROBS_MAX),
            },
            "prompt",
        ),
        "Response": _object(
            {
                **{name: schema for name, schema in shared.items() if name not in ("max_tokens", "stream_options")},
                "input": {"anyOf": [_text(), {"type": "array", "items": _ref("Message"), "minItems": 1}]},
                "instructions": {"type": "string"},
                "max_output_tokens": _whole(1, limits.output_tokens_max),
                "background": {"type": "boolean"},
                "top_logprobs": _whole(0, LOGPROBS_MAX),
                "include": {"type": "array", "items": {"const": INCLUDE_LOGPROBS}, "maxItems": LOGPROBS_MAX},
                "previous_response_id": {"type": "string"},
            },
            "input",
        ),
        "Chunks": _object(
            {
                **{name: shared[name] for name in ("model", "documents", "stream", "deadline_ms")},
                "system": {"type": "string"},
            },
            "documents",
        ),
    }


def _shared(model: str, limits: ApiLimits) -> dict[str, Schema]:
    options = {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}}
    return {
        "model": {"type": "string", "enum": [model]},
        "documents": {"type": "array", "items": _ref("Document"), "maxItems": limits.items_max},
        "max_tokens": _whole(1, limits.output_tokens_max),
        **_sampling(limits),
        "stream": {"type": "boolean"},
        "stream_options": _object(options),
        "deadline_ms": {"type": "number", "exclusiveMinimum": 0, "maximum": limits.deadline_ms_max},
        "blend": _ref("Blend"),
        **{name: {"description": "Taken and ignored."} for name in sorted(HARMLESS - {"metadata", "store"})},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 16},
        "store": {"type": "boolean"},
    }


def _sampling(limits: ApiLimits) -> dict[str, Schema]:
    stop = {"type": "string", "minLength": 1, "maxLength": limits.stop_chars_max}
    ids = {"type": "array", "items": _whole(0, limits.token_id_max), "maxItems": STOP_IDS_MAX}
    return {
        "temperature": _number(0, limits.temperature_max),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {**_whole(-1, TOP_K_MAX), "description": "0 and -1 stand for all tokens."},
        "min_p": _number(0, 1),
        "repetition_penalty": _number(*REPETITION_PENALTIES),
        "presence_penalty": _number(-PENALTY_MAX, PENALTY_MAX),
        "frequency_penalty": _number(-PENALTY_MAX, PENALTY_MAX),
        "seed": _whole(0, limits.seed_max),
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": limits.stop_max}]},
        "stop_token_ids": ids,
        "ignore_eos": {"type": "boolean"},
        "min_tokens": _whole(0, limits.output_tokens_max),
    }


def _document(limits: ApiLimits) -> Schema:
    near = _object({"title": {"type": "string"}, "text": _text()}, "text")
    behind = {"type": "array", "items": near, "maxItems": limits.neighbours_max}
    whole = _object({"title": {"type": "string"}, "text": _text(), "behind": behind}, "text")
    return {"anyOf": [whole, _object({"id": {"type": "string"}, "behind": behind}, "id")]}


def _message() -> Schema:
    part = _object({"type": {"type": "string", "enum": list(PART_TYPES)}, "text": {"type": "string"}}, "type", "text")
    content = {"anyOf": [_text(), {"type": "array", "items": part, "minItems": 1}]}
    role = {"type": "string", "enum": list(ROLES)}
    return _object({"role": role, "content": content, "name": {"type": "string"}}, "role", "content")


def _blend() -> Schema:
    selection: dict[str, Schema] = {
        name: {"description": 'See docs/algorithm.md, "Choosing rows".'} for name in SelectionOptions.names()
    }
    return _object(
        {
            "mode": {"type": "string", "enum": list(MODES)},
            "recompute_ratio": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"const": "auto"}]},
            "on_miss": {"type": "string", "enum": list(get_args(OnMiss))},
            **selection,
        }
    )


def _prompt(limits: ApiLimits) -> Schema:
    ids = {
        "type": "array",
        "items": _whole(0, limits.token_id_max),
        "minItems": 1,
        "maxItems": limits.prompt_ids_max,
    }
    one = [_text(), ids]
    several = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": limits.prompts_max}
    return {"anyOf": [*one, several]}


def _error() -> Schema:
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "The path of the field, as `messages[0].content`."},
        "code": {"type": "string"},
        "status": {"type": "integer"},
    }
    return {"type": "object", "properties": {"error": {"type": "object", "properties": fields}}}


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _text() -> Schema:
    return {"type": "string", "minLength": 1, "pattern": r"\S"}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}
