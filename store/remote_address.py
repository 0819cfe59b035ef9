"""Where a remote tier is: its URL, taken apart and checked, and kept out of every text that somebody may read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
"""What a URL may begin with, by its meaning."""
PORT_DEFAULT = 6379
DATABASE_MAX = 65535
PREFIX_DEFAULT = "kvblend"
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Paths of PEM files that a `rediss` URL may name: who is trusted, and the client's own certificate and key."""

_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,63}")


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """One database of one server. `str()` names it without user and password; `repr()` leaves out the password.

    `path` is a Unix socket's, empty for TCP. Keys of chunks begin with `prefix`.
    """

    host: str
    port: int
    path: str
    is_tls: bool
    database: int
    prefix: str
    username: str
    password: str = field(repr=False)
    tls_files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> Self:
        """`redis://[user[:password]@]host[:port][/database]`, the same with `rediss` (TLS), or `unix:///path`.

        `valkey` and `valkeys` are other words for `redis` and `rediss`.

        `?db=` and `?prefix=` may follow, and `TLS_OPTIONS` for `rediss`. Raises ValueError that names what is wrong and
        never what stands there, as it may be a part of a password.
        """
        # the library's own reader lets options of the URL override ours, and its errors may quote a password
        parts = _split(url)
        options = _options_of(parts)
        try:
            port = PORT_DEFAULT if parts.port is None else parts.port
        except ValueError:
            port = 0
        if not port:
            raise ValueError("remote: the port is no number in 1..65535 (in a password, / @ : # ? are written as %XX)")
        if parts.scheme == "unix":
            if parts.hostname or not parts.path.startswith("/") or parts.path == "/":
                raise ValueError("remote: a unix URL is unix:///absolute/path")
            database = options.get("db", "0")
        else:
            if not parts.hostname:
                raise ValueError("remote: the URL names no host")
            database = options.get("db") or parts.path.strip("/") or "0"
        return cls(
            host=unquote(parts.hostname or ""),
            port=port,
            path=unquote(parts.path) if parts.scheme == "unix" else "",
            is_tls=parts.scheme == "rediss",
            database=_read_database(database),
            prefix=_read_prefix(options.get("prefix", PREFIX_DEFAULT)),
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            tls_files={name: value for name, value in options.items() if name in TLS_OPTIONS},
        )

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}?db={self.database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.is_tls else 'redis'}://{host}:{self.port}/{self.database}"

    def scrub(self, text: str) -> str:
        """The text without the password: a server may quote a command that it does not know, AUTH's too."""
        return text.replace(self.password, "***") if self.password else text


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        scheme, _ = parts.scheme, parts.hostname
    except ValueError:
        raise ValueError("remote: this is no URL") from None
    if scheme not in SCHEMES or "://" not in url:
        raise ValueError(f"remote: the URL must begin with one of {', '.join(f'{name}://' for name in SCHEMES)}")
    if parts.fragment or "#" in url:
        raise ValueError("remote: the URL holds a #; in a password it is written %23")
    return parts._replace(scheme=SCHEMES[scheme])


def _options_of(parts: SplitResult) -> dict[str, str]:
    allowed = ("db", "prefix", *(TLS_OPTIONS if parts.scheme == "rediss" else ()))
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError("remote: what follows ? is not name=value pairs") from None
    if any(name not in allowed for name, _ in pairs):
        raise ValueError(f"remote: behind ? only {', '.join(allowed)} may be set in a {parts.scheme} URL")
    if len(dict(pairs)) != len(pairs):
        raise ValueError("remote: an option behind ? is given twice")
    return dict(pairs)


def _read_database(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(DATABASE_MAX)) and int(text) <= DATABASE_MAX):
        raise ValueError(f"remote: the database must be a number in 0..{DATABASE_MAX}")
    return int(text)


def _read_prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text):
        raise ValueError("remote: prefix must be 1..64 letters, digits and :._-, beginning with a letter or digit")
    return text
