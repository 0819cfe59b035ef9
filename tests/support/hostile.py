"""Strategies for what no honest client sends: values, frames and bodies near enough to right ones to get somewhere."""

from __future__ import annotations

import json
from typing import Any

import msgpack
from hypothesis import strategies as st

WORDS = st.sampled_from(
    ("", " ", "q", "one", "user", "assistant", "system", "scripted", "true", "\x00", "é", "\ud800", "x" * 300)
)
NUMBERS = st.sampled_from(
    (0, 1, -1, 2, 0.5, 1.5, 1e308, float("nan"), float("inf"), 1 << 31, 1 << 63, -(1 << 63), 10**40)
)
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=8) | st.integers() | st.floats()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(("user", "assistant", "system", "developer")) | VALUES,
        "content": WORDS
        | st.lists(st.fixed_dictionaries({"type": WORDS | st.just("text"), "text": WORDS}), max_size=3)
        | VALUES,
        "type": st.just("message") | VALUES,
    },
)
DOCUMENT = st.fixed_dictionaries({}, optional={"text": WORDS, "title": WORDS, "id": WORDS, "behind": VALUES}) | VALUES
# a right value for every field, so that a frame may be wrong in one place only
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("scripted"),
    "input": st.just("what?") | st.lists(MESSAGE, max_size=3),
    "messages": st.just([{"role": "user", "content": "what?"}]) | st.lists(MESSAGE, max_size=3),
    "prompt": st.sampled_from(("what?", [1, 2, 3], ["a", "b"])),
    "documents": st.lists(DOCUMENT, max_size=3),
    "chunks": st.lists(DOCUMENT, max_size=2),
    "instructions": WORDS,
    "system": WORDS,
    "previous_response_id": WORDS,
    "stream_id": st.sampled_from(("a", "b", "c")),
    "event_id": WORDS,
    "response_id": WORDS,
    "max_output_tokens": st.just(5),
    "max_tokens": st.just(5),
    "temperature": st.just(0.5),
    "top_p": st.just(0.5),
    "seed": st.just(1),
    "stop": st.sampled_from(("END", ["a", "b"])),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "background": st.booleans(),
    "metadata": st.dictionaries(WORDS, WORDS, max_size=2),
    "store": st.booleans(),
    "generate": st.booleans(),
    "deadline_ms": st.just(1000),
    "blend": st.fixed_dictionaries({}, optional={"mode": st.just("blend") | VALUES, "recompute_ratio": VALUES}),
    "logprobs": st.sampled_from((True, False, 3)),
    "top_logprobs": st.just(2),
    "n": st.just(1),
}
KINDS = (
    st.sampled_from(("response.create", "response.create", "response.cancel", "response.resume", "flow.credit"))
    | VALUES
)


@st.composite
def bodies(draw: st.DrawFn, typed: bool = False) -> Any:
    """An object of known fields with right and wrong values; now and then anything. `typed` gives it a `type`."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True))
    body = {name: draw(FIELDS[name] if draw(st.integers(0, 3)) else VALUES) for name in names}
    if typed:
        body["type"] = draw(KINDS)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=6))] = draw(VALUES)
    return body


@st.composite
def spoiled(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes as they are, or cut, flipped, doubled or with others put in."""
    kind, at = draw(st.integers(0, 7)), draw(st.integers(0, max(0, len(data) - 1)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + draw(st.binary(max_size=8)) + data[at:]
    if kind == 3:
        return data + data
    return data


@st.composite
def msgpack_frames(draw: st.DrawFn) -> bytes:
    """A binary frame."""
    try:
        data = bytes(msgpack.packb(draw(bodies(typed=True))))
    except (ValueError, TypeError, OverflowError):
        # no such number or text in msgpack
        data = draw(st.binary(max_size=60))
    return draw(spoiled(data))


@st.composite
def json_bytes(draw: st.DrawFn, typed: bool = False) -> bytes:
    """JSON, or nearly; sometimes deeper than anybody needs."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.sampled_from((b"[", b'{"a":', b"[[", b'"'))) * draw(st.integers(1, 3000))
    data = json.dumps(draw(bodies(typed)), ensure_ascii=draw(st.booleans())).encode("utf-8", "replace")
    return draw(spoiled(data))


@st.composite
def json_frames(draw: st.DrawFn) -> str:
    """A text frame."""
    return draw(json_bytes(typed=True)).decode("utf-8", "replace")
