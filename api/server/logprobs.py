"""Log probabilities of output tokens in the shapes of the wire: chat, completions, responses and our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvblend.actors.messages import TokenLogprob

Logprobs = Sequence[TokenLogprob]


def chat_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/chat/completions`."""
    return {
        "content": [_token(one, top_logprobs=[_token(other) for other in one.top]) for one in logprobs],
        "refusal": None,
    }


def text_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/completions`; the chosen token is among its likeliest ones."""
    return {
        "tokens": [_name(one) for one in logprobs],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [_by_name((*one.top, one)) for one in logprobs],
        "text_offset": [one.offset for one in logprobs],
    }


def response_logprobs(logprobs: Logprobs, *, extended: bool) -> list[dict[str, Any]]:
    """`logprobs` of a piece of a response's text; `extended`: with ids and places, as only our subprotocols carry."""
    return [
        _response_token(
            one,
            extended,
            top_logprobs=[_response_token(other, extended) for other in one.top],
            **({"offset": one.offset} if extended else {}),
        )
        for one in logprobs
    ]


def _token(one: TokenLogprob, **more: Any) -> dict[str, Any]:
    data = None if one.bytes is None else list(one.bytes)
    return {"token": one.token, "logprob": one.logprob, "bytes": data, **more}


def _response_token(one: TokenLogprob, extended: bool, **more: Any) -> dict[str, Any]:
    if extended:
        return {"token_id": one.token_id, **_token(one, **more)}
    # this interface knows no token without bytes
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.bytes or b""), **more}


def _name(one: TokenLogprob) -> str:
    """A token's text; a part of a character as `bytes:\\\\xe2\\\\x80`, which is how this interface writes it."""
    try:
        (one.bytes or b"").decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in one.bytes or b"")
    return one.token


def _by_name(tokens: Logprobs) -> dict[str, float]:
    """Log probabilities by text, likeliest first; of several tokens with one text the likeliest counts."""
    named: dict[str, float] = {}
    for one in tokens:
        named.setdefault(_name(one), one.logprob)
    return named
