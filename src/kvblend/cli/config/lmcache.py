"""The names of LMCache: what each means here, or why it means nothing. docs/configuration.md has the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvblend.actors.settings import REMOTE_SCHEMES
from kvblend.cli.config.fields import BadValue, Field, nearest

GIB = 1 << 30


class NoMeaning(ValueError):
    """A name or value that nothing here stands for: the message goes on after the name."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The settings that a value stands for, and a note where it changes nothing and somebody might think it did."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


Reader = Callable[[Any], Meaning]
NOTHING = Meaning()


def mean(name: str, value: Any) -> Meaning:
    """What a name with this value means here. NoMeaning says why it means nothing."""
    reader = NAMES.get(name)
    if reader is None:
        near = nearest(name, NAMES)
        raise NoMeaning(f"has no counterpart in kvblend{near or ': take it out'}")
    return reader(_unquote(value))


def _unquote(value: Any) -> Any:
    if isinstance(value, str) and len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def _same(ours: str) -> Reader:
    return lambda value: NOTHING if _is_none(value) else Meaning({ours: value})


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))


def _only(wanted: bool, reason: str) -> Reader:
    """A switch that has one position here."""

    def read(value: Any) -> Meaning:
        if _read_as(bool, value) is not wanted:
            raise NoMeaning(f"is {str(not wanted).lower()}: {reason}")
        return NOTHING

    return read


def _noted(reason: str) -> Reader:
    return lambda _value: Meaning(note=reason)


def _refused(reason: str) -> Reader:
    def read(value: Any) -> Meaning:
        if _is_none(value):
            return NOTHING
        raise NoMeaning(f"cannot be followed: {reason}")

    return read


def _read_as(kind: type, value: Any) -> Any:
    try:
        return Field("", object, kind, None).read(value)
    except BadValue as error:
        raise NoMeaning(str(error)) from None


def _ratios(value: Any) -> Meaning:
    if _is_none(value):
        return NOTHING
    ratios = _read_as(tuple[float, ...], value)
    return Meaning({"recompute_ratio": ratios[0]} if len(ratios) == 1 else {"recompute_ratios": ratios})


def _gibibytes(ours: str, zero: str) -> Reader:
    def read(value: Any) -> Meaning:
        size = _read_as(float, value)
        if size == 0 and not zero:
            return NOTHING
        if not 0 < size < 1 << 30:
            raise NoMeaning(f"must be a size in GB above 0{zero}; it is {value!r}")
        return Meaning({ours: round(size * GIB)})

    return read


def _folder(value: Any) -> Meaning:
    if _is_none(value):
        return NOTHING
    if not isinstance(value, str) or value in ("true", "false"):
        raise NoMeaning(f"must be a folder, as a path or file:///path; it is {value!r}")
    path = urlsplit(value).path if value.startswith("file://") else value
    if "," in path:
        raise NoMeaning("names several folders; kvblend keeps its chunks in one")
    return Meaning({"store": path})


def _device(value: Any) -> Meaning:
    if _is_none(value) or value == "cpu":
        return NOTHING
    if isinstance(value, str) and value.startswith(("file://", "/")):
        return _folder(value)
    raise NoMeaning(f"is {value!r}: stored chunks are kept in host memory (cpu) and in a folder (file:///path)")


def _remote(value: Any) -> Meaning:
    if _is_none(value):
        return NOTHING
    if not isinstance(value, str) or not value.startswith(REMOTE_SCHEMES):
        # the value may hold a password
        raise NoMeaning("must be the address of a Redis or Valkey server: no other remote store is known")
    return Meaning({"remote": value})


def _policy(value: Any) -> Meaning:
    word = str(value).lower()
    if word != "lru":
        raise NoMeaning(f"is {value!r}: only LRU is known by this name; see host_policy and disk_policy")
    return Meaning(dict.fromkeys(("host_policy", "disk_policy"), "lru"))


def _serde(value: Any) -> Meaning:
    if _is_none(value) or value == "naive":
        return NOTHING
    raise NoMeaning(f"is {value!r}: there is no such form; see store_dtype for a narrower form of stored chunks")


_CHUNK = "a chunk is a document, of any length"
NAMES: dict[str, Reader] = {
    "enable_blending": _only(True, "kvblend always can blend; ask with mode prefix or full where it should not"),
    "use_layerwise": _only(True, "layers are always loaded one by one while others are computed"),
    "blend_special_str": _same("separator"),
    "blend_separator": _same("separator"),
    "blend_check_layers": _same("check_layers"),
    "blend_recompute_ratios": _ratios,
    "blend_recompute_ratio": _ratios,
    "blend_thresholds": _same("thresholds"),
    "blend_min_tokens": _same("blend_min_tokens"),
    "blend_add_special_in_precomp": _only(False, "a chunk's tokens are those of its text alone"),
    "save_unfull_chunk": _noted(f"{_CHUNK}, and always stored"),
    "chunk_size": _noted(_CHUNK),
    "enable_sparse": _only(False, "rows are chosen by kvblend's selectors; see selector"),
    "save_decode_cache": _only(False, "the KV of answers is not stored"),
    "local_device": _device,
    "local_cpu": _only(True, "memory is always the first tier; make host_bytes_budget small instead"),
    "max_local_cpu_size": _gibibytes("host_bytes_budget", ": memory is always the first tier"),
    "local_disk": _folder,
    "max_local_disk_size": _gibibytes("disk_bytes_budget", ""),
    "remote_url": _remote,
    "remote_serde": _serde,
    "cache_policy": _policy,
    "pre_caching_hash_algorithm": _noted("chunks are named by BLAKE3"),
    "pipelined_backend": _noted("layers are always read ahead"),
    "enable_async_loading": _noted("layers are always read ahead"),
    "lmcache_instance_id": _noted("it names a process of LMCache"),
    "enable_p2p": _only(False, "servers share chunks through a remote store only"),
    "enable_pd": _only(False, "prefill and decoding run in one process"),
    "enable_controller": _only(False, "there is no controller"),
    "internal_api_server_enabled": _only(False, "figures are on the server's own port"),
    "numa_mode": _refused("threads are not pinned"),
    "gds_path": _refused("files are read through the operating system"),
    "nixl_backends": _refused("there is no such transfer"),
    "storage_plugins": _refused("there are no plugins"),
    "remote_storage_plugins": _refused("there are no plugins"),
    "extra_config": _refused("it is for LMCache's plugins"),
}
