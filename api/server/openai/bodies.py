"""Bodies of the two completion routes to requests: everything is checked here, before any work."""

from __future__ import annotations

from typing import Any

from kvblend.actors.messages import Generate
from kvblend.api.server.fields import Fields, check_text, invalid, show
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.answers import Asked
from kvblend.api.server.requests import HARMLESS, parse_blend, parse_documents, parse_model
from kvblend.api.server.sampling import SAMPLING_FIELDS, parse_chat_logprobs, parse_sampling, parse_text_logprobs
from kvblend.api.server.turns import check_question, neutral, parse_turns

_BOTH: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
CHAT_NEUTRAL: dict[str, tuple[object, ...]] = {
    **_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
TEXT_NEUTRAL: dict[str, tuple[object, ...]] = {
    **_BOTH,
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_SHARED = {
    *("model", "documents", "chunks", "blend", "deadline_ms", "max_tokens", "stream", "stream_options", "logprobs"),
    *SAMPLING_FIELDS,
    *HARMLESS,
}
CHAT_FIELDS = _SHARED | {"messages", "max_completion_tokens", "top_logprobs"} | CHAT_NEUTRAL.keys()
TEXT_FIELDS = _SHARED | {"prompt"} | TEXT_NEUTRAL.keys()


def parse_chat(body: object, call_id: str, model: str, limits: ApiLimits) -> Asked:
    """The body of `POST /v1/chat/completions`. RequestError names the field."""
    fields = Fields(body, "", CHAT_FIELDS)
    shared = _parse_shared(fields, model, limits)
    lengths = ("max_completion_tokens", "max_tokens")
    shared["sampling"] = parse_sampling(fields, limits, *lengths, logprobs=parse_chat_logprobs(fields))
    neutral(fields, CHAT_NEUTRAL)
    documents = shared.pop("documents")
    turns = parse_turns(fields.array("messages", limits.messages_max) or [], "messages", limits, len(documents))
    check_question(turns, "messages")
    request = Generate(
        request_id=call_id,
        messages=tuple(turns.messages),
        documents=(*documents, *turns.documents),
        system=turns.system,
        **shared,
    )
    return _asked(fields, [request], turns.places)


def parse_text(body: object, call_id: str, model: str, limits: ApiLimits) -> Asked:
    """The body of `POST /v1/completions`: one prompt or several, each a text or token ids. RequestError names it."""
    fields = Fields(body, "", TEXT_FIELDS)
    shared = _parse_shared(fields, model, limits)
    shared["sampling"] = parse_sampling(fields, limits, "max_tokens", logprobs=parse_text_logprobs(fields))
    neutral(fields, TEXT_NEUTRAL)
    prompts = _parse_prompts(fields, limits)
    names = [call_id] if len(prompts) == 1 else [f"{call_id}-{index}" for index in range(len(prompts))]
    requests = [Generate(request_id=name, prompt=prompt, **shared) for name, prompt in zip(names, prompts, strict=True)]
    return _asked(fields, requests, [])


def _parse_shared(fields: Fields, model: str, limits: ApiLimits) -> dict[str, Any]:
    return {
        "model": parse_model(fields, model, limits),
        "documents": parse_documents(fields, limits),
        "blend": parse_blend(fields),
        "deadline_ms": fields.number("deadline_ms", 0, limits.deadline_ms_max, above=True),
    }


def _asked(fields: Fields, requests: list[Generate], places: list[tuple[str, str]]) -> Asked:
    stream = bool(fields.flag("stream"))
    include_usage = False
    if fields.has("stream_options"):
        if not stream:
            raise invalid("stream_options", "is for streams; give stream: true with it")
        options = Fields(fields.raw("stream_options"), "stream_options", ("include_usage", "include_obfuscation"))
        include_usage = bool(options.flag("include_usage"))
        options.flag("include_obfuscation")
    length = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    question = "messages" if requests[0].prompt is None else "prompt"
    return Asked(requests, stream, include_usage, [*places, ("max_output_tokens", length), ("input", question)])


def _parse_prompts(fields: Fields, limits: ApiLimits) -> list[str | tuple[int, ...]]:
    value = fields.raw("prompt")
    if value is None:
        raise invalid("prompt", "is missing")
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return [_parse_prompt(value, "prompt", limits)]
    if not isinstance(value, list) or not value:
        raise invalid("prompt", f"must be a text, token ids, or a list of those, not {show(value)}")
    items = fields.array("prompt", limits.prompts_max) or []
    return [_parse_prompt(item, f"prompt[{index}]", limits) for index, item in enumerate(items)]


def _parse_prompt(value: object, path: str, limits: ApiLimits) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return check_text(value, path)
    if not isinstance(value, list) or not value:
        raise invalid(path, f"must be a text or token ids, not {show(value)}")
    if len(value) > limits.prompt_ids_max:
        raise invalid(path, f"has {len(value)} token ids; the limit is {limits.prompt_ids_max}")
    for number, item in enumerate(value):
        if not _is_id(item):
            raise invalid(f"{path}[{number}]", f"must be a token id, not {show(item)}")
        if not 0 <= item <= limits.token_id_max:
            raise invalid(f"{path}[{number}]", f"is {show(item)}; it must lie in 0..{limits.token_id_max}")
    return tuple(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
