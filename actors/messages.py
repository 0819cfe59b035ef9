"""Requests that enter the engine and events that leave it: frozen, typed, without tensors.

A leaf module. What travels between two actors only (plans, steps, loads) is in `actors.core.events`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["blend", "full", "reuse", "prefix"]
MODES: tuple[Mode, ...] = ("blend", "full", "reuse", "prefix")
FinishReason = Literal["stop", "length", "cancelled"]
Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Document:
    """A retrieved chunk: its text (with an optional title), or the id of one that was ingested before."""

    text: str = ""
    title: str = ""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn after the system prompt."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen. `temperature` 0 is greedy."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """How cached chunks are used. None means: as the server is set."""

    mode: Mode = "blend"
    recompute_ratio: float | None = None
    selector: Literal["divergence", "query"] | None = None
    divergence: Literal["k", "v", "kv"] | None = None
    residual: Literal["none", "mean", "distance", "ridge"] | None = None
    on_miss: Literal["fresh", "precompute"] | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """One request: documents stand at the start of the first user message.

    `system` None means the server's default system prompt. `generate` False stores the documents' KV (each behind the
    system prompt, or bare, as the server is set) and answers nothing: that is what ingesting is.
    """

    request_id: str
    messages: tuple[ChatMessage, ...] = ()
    documents: tuple[Document, ...] = ()
    system: str | None = None
    model: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    blend: BlendOptions = field(default_factory=BlendOptions)
    deadline_ms: float | None = None
    generate: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost and what was reused: `tokens_reused + tokens_recomputed + tokens_fresh = prompt_tokens`.

    Times are milliseconds since the request was accepted. `tiers` counts segments by the tier they came from.
    """

    mode: Mode = "blend"
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunk_hits: int = 0
    chunk_misses: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    tokens_fresh: int = 0
    charged_ratio: float = 0.0
    recompute_ratio: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    queue_ms: float = 0.0
    load_ms: float = 0.0
    compute_ms: float = 0.0
    tiers: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One document after ingestion. `created` is False when its KV was in the store already."""

    id: str
    tokens: int
    created: bool


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was taken; exactly one `Finished` or `Failed` will follow."""

    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Planned:
    """What will be reused, known before the first token (`usage` has no times or output yet)."""

    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """Generated text, never empty; several tokens when the reader was behind or a character spans tokens."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """`done` of `total` documents are durable."""

    request_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: completed, cut by length, or cancelled. `chunks` is filled where `generate` was False."""

    request_id: str
    reason: FinishReason
    usage: Usage
    chunks: tuple[StoredChunk, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: an accepted request that could not be completed. `code` is a key of the error table."""

    request_id: str
    code: str
    message: str
    param: str | None = None


StreamEvent = Accepted | Planned | Delta | IngestProgress | Finished | Failed
TERMINAL = (Finished, Failed)
