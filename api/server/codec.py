"""Frames to plain objects and back, one codec for each subprotocol. What comes in is hostile until parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import msgpack

from kvblend.actors.errors import RequestError
from kvblend.api.server.limits import ApiLimits

Event = dict[str, Any]
BRACKETS_PER_CONTAINER = 16
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Codec(Protocol):
    """One way to write frames. `extended` tells whether events of our own (`response.kv`) may be sent."""

    @property
    def binary(self) -> bool:
        """True for binary frames, False for text frames."""
        ...

    @property
    def extended(self) -> bool:
        """True on our own subprotocols."""
        ...

    def decode(self, data: bytes | str, limits: ApiLimits) -> object:
        """A plain object; RequestError `invalid_request` for anything undecodable or too large."""
        ...

    def encode(self, event: Event) -> bytes | str:
        """The frame of one event."""
        ...


class MsgpackCodec:
    """`kvblend.v1.msgpack`: binary frames, no extension types, no binary strings."""

    binary = True
    extended = True

    def decode(self, data: bytes | str, limits: ApiLimits) -> object:
        """See `Codec.decode`."""
        if isinstance(data, str):
            raise RequestError("invalid_request", "the frame is text; this subprotocol uses binary frames")
        count = _Counter(limits.containers_max)
        try:
            value = msgpack.unpackb(
                data,
                raw=False,
                strict_map_key=True,
                max_str_len=limits.message_bytes_max,
                max_bin_len=0,
                max_array_len=limits.items_max,
                max_map_len=limits.items_max,
                max_ext_len=0,
                ext_hook=_refuse_extension,
                list_hook=count,
                object_hook=count,
            )
        except UnicodeDecodeError as error:
            raise RequestError(
                "invalid_request", f"the frame holds a string that is not valid UTF-8: {error.reason}"
            ) from error
        # the unpacker raises subclasses of ValueError, and RecursionError or StackError for nesting
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            detail = str(error) or type(error).__name__
            raise RequestError("invalid_request", f"the frame is not readable msgpack: {detail}") from error
        check_depth(value, limits.depth_max)
        return value

    def encode(self, event: Event) -> bytes:
        """See `Codec.encode`."""
        return bytes(msgpack.packb(event))


class JsonCodec:
    """`kvblend.v1.json`, and with `extended` False what a client without a subprotocol gets: text frames."""

    binary = False

    def __init__(self, extended: bool) -> None:
        self.extended = extended

    def decode(self, data: bytes | str, limits: ApiLimits) -> object:
        """See `Codec.decode`."""
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        # before parsing, since parsing is what takes the time and memory; documents may hold brackets of their own
        if text.count("[") + text.count("{") > BRACKETS_PER_CONTAINER * limits.containers_max:
            raise RequestError(
                "invalid_request", f"the frame holds more than {limits.containers_max} lists and objects"
            )
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            detail = str(error) or type(error).__name__
            raise RequestError("invalid_request", f"the frame is not readable JSON: {detail}") from error
        check_depth(value, limits.depth_max)
        if _SURROGATE.search(text):
            _refuse_lone_surrogates(value)
        return value

    def encode(self, event: Event) -> str:
        """See `Codec.encode`."""
        return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


CODECS: Mapping[str, Codec] = {
    "kvblend.v1.msgpack": MsgpackCodec(),
    "kvblend.v1.json": JsonCodec(extended=True),
}
PLAIN_JSON: Codec = JsonCodec(extended=False)


def choose_codec(offered: list[str]) -> tuple[str | None, Codec]:
    """The first subprotocol of those offered that is known; plain JSON if none is offered; else RequestError."""
    if not offered:
        return None, PLAIN_JSON
    for name in offered:
        if name in CODECS:
            return name, CODECS[name]
    known = ", ".join(CODECS)
    raise RequestError("invalid_request", f"none of the offered subprotocols is known; known: {known}")


def check_depth(value: object, depth_max: int) -> None:
    """Refuse containers nested deeper than `depth_max`, without recursion of our own."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > depth_max:
            raise RequestError("invalid_request", f"the frame nests deeper than the limit of {depth_max} levels")
        level = [item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent)]


class _Counter:
    """Stops a frame of many tiny containers, each of which takes 60 times its wire size in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen = 0

    def __call__(self, container: object) -> object:
        self._seen += 1
        if self._seen > self._limit:
            raise ValueError(f"more than {self._limit} lists and objects")
        return container


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not allowed")


def _refuse_lone_surrogates(value: object) -> None:
    """Text that no UTF-8 frame can carry back; halves of a pair have become one character by now."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RequestError(
            "invalid_request", f"the frame holds a lone surrogate (\\u{ord(half):04x}): not valid Unicode"
        ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
