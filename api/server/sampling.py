"""How tokens are chosen, and what is told of their probabilities, as the fields of a request say it."""

from __future__ import annotations

from kvblend.actors.messages import LOGPROBS_MAX, PENALTY_MAX, REPETITION_PENALTIES, STOP_IDS_MAX, Sampling
from kvblend.api.server.fields import Fields, check_text, invalid, show
from kvblend.api.server.limits import ApiLimits

SAMPLING_FIELDS = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    )
)
"""Of every form; each has names of its own for the longest answer and for log probabilities."""
INCLUDE_LOGPROBS = "message.output_text.logprobs"
TOP_K_MAX = (1 << 31) - 1


def parse_sampling(fields: Fields, limits: ApiLimits, *lengths: str, logprobs: int | None = None) -> Sampling:
    """How tokens are chosen; `lengths` are the names under which the longest answer may be given.

    RequestError names a field that is out of its range or contradicts another.
    """
    plain = Sampling()
    given = {name: value for name in lengths if (value := fields.integer(name, 1, limits.output_tokens_max))}
    if len(set(given.values())) > 1:
        raise invalid(lengths[-1], f"is another name of {lengths[0]}; give one of the two")
    max_tokens = next(iter(given.values()), plain.max_tokens)
    min_tokens = fields.integer("min_tokens", 0, limits.output_tokens_max) or 0
    if min_tokens > max_tokens:
        raise invalid(
            "min_tokens", f"is {min_tokens}; the longest answer has {max_tokens} ({next(iter(given), lengths[0])})"
        )
    return Sampling(
        max_tokens=max_tokens,
        temperature=_number(fields, "temperature", 0.0, limits.temperature_max, plain.temperature),
        top_p=_number(fields, "top_p", 0.0, 1.0, plain.top_p, above=True),
        seed=fields.integer("seed", 0, limits.seed_max),
        stop=_parse_stop(fields, limits),
        # -1 is the usual way to say: all
        top_k=max(0, fields.integer("top_k", -1, TOP_K_MAX) or 0),
        min_p=_number(fields, "min_p", 0.0, 1.0, plain.min_p),
        repetition_penalty=_number(fields, "repetition_penalty", *REPETITION_PENALTIES, plain.repetition_penalty),
        presence_penalty=_number(fields, "presence_penalty", -PENALTY_MAX, PENALTY_MAX, plain.presence_penalty),
        frequency_penalty=_number(fields, "frequency_penalty", -PENALTY_MAX, PENALTY_MAX, plain.frequency_penalty),
        stop_token_ids=_parse_stop_ids(fields, limits),
        ignore_eos=bool(fields.flag("ignore_eos")),
        min_tokens=min_tokens,
        logprobs=logprobs,
    )


def parse_chat_logprobs(fields: Fields) -> int | None:
    """`logprobs` and `top_logprobs` of a conversation: how many of the likeliest tokens, None: no log probabilities."""
    wanted, top = bool(fields.flag("logprobs")), fields.integer("top_logprobs", 0, LOGPROBS_MAX)
    if top and not wanted:
        raise invalid("top_logprobs", f"is {top}, which needs logprobs: true")
    return (top or 0) if wanted else None


def parse_text_logprobs(fields: Fields) -> int | None:
    """`logprobs` of a plain prompt: how many of the likeliest tokens, None for no log probabilities."""
    return fields.integer("logprobs", 0, LOGPROBS_MAX)


def parse_response_logprobs(fields: Fields) -> int | None:
    """`top_logprobs` and `include` of a response: how many of the likeliest tokens, None for no log probabilities."""
    top = fields.integer("top_logprobs", 0, LOGPROBS_MAX) or 0
    include = fields.array("include", LOGPROBS_MAX) or []
    for index, item in enumerate(include):
        if item != INCLUDE_LOGPROBS:
            raise invalid(f"include[{index}]", f"is {show(item)}; only {INCLUDE_LOGPROBS} can be included")
    return top if top or include else None


def _number(fields: Fields, name: str, low: float, high: float, plain: float, *, above: bool = False) -> float:
    value = fields.number(name, low, high, above=above)
    return plain if value is None else value


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


def _parse_stop_ids(fields: Fields, limits: ApiLimits) -> tuple[int, ...]:
    ids: list[int] = []
    for index, item in enumerate(fields.array("stop_token_ids", STOP_IDS_MAX) or ()):
        path = f"stop_token_ids[{index}]"
        if not isinstance(item, int) or isinstance(item, bool):
            raise invalid(path, f"must be a token id, not {show(item)}")
        if not 0 <= item <= limits.token_id_max:
            raise invalid(path, f"is {show(item)}; it must lie in 0..{limits.token_id_max}")
        ids.append(item)
    return tuple(ids)
