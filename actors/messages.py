"""Requests that enter the engine and events that leave it: frozen, typed, without tensors.

A leaf module. What travels between two actors only (plans, steps, loads) is in `actors.core.events`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvblend.actors.errors import RequestError
from kvblend.engine.logprobs import LOGPROBS_MAX as LOGPROBS_MAX
from kvblend.engine.logprobs import TokenLogprob as TokenLogprob
from kvblend.engine.selectors.spec import (
    KL_MAX_LIMIT,
    KL_POSITIONS,
    BadSelection,
    ChunkBudget,
    DivergenceOf,
    NamedLayers,
    ResidualName,
    SelectorName,
    check_field,
)

Mode = Literal["blend", "full", "reuse", "prefix"]
MODES: tuple[Mode, ...] = ("blend", "full", "reuse", "prefix")
MAX_KL_LIMIT = KL_MAX_LIMIT
DRAFT_TOKENS = KL_POSITIONS
"""Tokens of an answer that a request with `max_kl` needs room for, however short the answer may be."""
FinishReason = Literal["stop", "length", "cancelled"]
Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Document:
    """A retrieved chunk: its text (with an optional title), or the id of one that was ingested before.

    `behind`, where documents are stored: its neighbours, texts that its KV is computed behind, nearest first.
    """

    text: str = ""
    title: str = ""
    id: str | None = None
    behind: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn after the system prompt."""

    role: Role
    content: str


REPETITION_PENALTIES = (0.01, 100.0)
PENALTY_MAX = 2.0
STOP_IDS_MAX = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen (docs/api.md, "How tokens are chosen"). `temperature` 0 is greedy, `top_k` 0 all.

    A token in `stop_token_ids` ends the answer and has no text, as the model's own end tokens do unless `ignore_eos`;
    none of them comes before `min_tokens` others. `logprobs`: how many of the likeliest tokens are reported with each
    chosen one; None: no log probabilities at all.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """How rows are chosen and the others corrected (docs/algorithm.md). None means: as the server is set."""

    selector: SelectorName | None = None
    check_layers: tuple[int, ...] | None = None
    divergence: DivergenceOf | None = None
    recompute_ratios: tuple[float, ...] | None = None
    thresholds: tuple[float, ...] | None = None
    score_layers: tuple[int, ...] | NamedLayers | None = None
    sinks: int | None = None
    span: int | None = None
    chunk_budget: ChunkBudget | None = None
    probes: float | None = None
    residual: ResidualName | None = None
    residual_fraction: float | None = None
    seed: int | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(field.name for field in fields(cls))

    def given(self) -> dict[str, Any]:
        """The fields that are not left to the server."""
        values = {name: getattr(self, name) for name in self.names()}
        return {name: value for name, value in values.items() if value is not None}

    def check(self) -> None:
        """Raise RequestError for a value that no server could take; what depends on others is checked later."""
        for name, value in self.given().items():
            try:
                check_field(name, value)
            except BadSelection as error:
                raise RequestError("invalid_request", f"blend.{name}: {error.said}", f"blend.{name}") from None


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """How cached chunks are used. None means: as the server is set."""

    mode: Mode = "blend"
    recompute_ratio: float | Literal["auto"] | None = None
    selection: SelectionOptions = field(default_factory=SelectionOptions)
    on_miss: Literal["fresh", "precompute"] | None = None
    max_kl: float | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """One request: documents stand at the start of the first user message.

    In that message the server's separator parts further documents, which stand before the question. `prompt`, text or
    token ids, takes the place of messages and system prompt: it is used as it is, without a chat template.

    `system` None means the server's default system prompt. `generate` False stores the documents' KV (each behind what
    the server is set to) and answers nothing: that is what ingesting is.

    `tenant` parts the chunks of those who ask from one another. The server sets it; no field of a client's reaches it.
    `client` says who asks where there is no tenant, e.g. which connection: they share the server fairly.
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
    prompt: str | tuple[int, ...] | None = None
    tenant: str = field(default="", repr=False)
    client: str = ""


@dataclass(frozen=True, slots=True)
class LoadingDecision:
    """What the loading controller decided for one request, and on which estimates (0: not known).

    `ratio_auto`: the ratio was its to choose, from `ratio_floor` on. `load_ms` and `compute_ms` are expected times.
    `chunks_computed` stored chunks were computed, which is faster than loading them. `store_tier` is the cheapest tier
    from which the chunks stored for it will load unnoticed, "" where none was. `ratio_lowered_from` is the ratio that
    load (`ratio_lever_floor`) has lowered, None where it has not.
    """

    ratio_auto: bool = False
    ratio_floor: float = 0.0
    load_ms: float = 0.0
    compute_ms: float = 0.0
    chunks_computed: int = 0
    store_tier: str = ""
    ratio_lowered_from: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost and what was reused: `tokens_reused + tokens_recomputed + tokens_fresh = prompt_tokens`.

    Times are milliseconds since the request was accepted. `tiers` counts segments by the tier they came from;
    `tier_tokens` the tokens of those that were used, whether recomputed afterwards or not. `kl_estimate`, where the KL
    was bounded by `max_kl`, is what it is estimated not to exceed; `recompute_ratio` the share used in the end.
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
    tier_tokens: dict[str, int] = field(default_factory=dict)
    loading: LoadingDecision = field(default_factory=LoadingDecision)
    kl_estimate: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One document after ingestion. `created` is False when its KV was in the store already.

    `conditioning` is what it was computed behind: `system`, `bare`, `warm` or `neighbours`.
    """

    id: str
    tokens: int
    created: bool
    conditioning: str = ""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A stored chunk as a list shows it: its id, its length in tokens, its size in bytes where it is stored."""

    id: str
    tokens: int
    bytes: int


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
    """Generated text; several tokens when the reader was behind or a character spans tokens.

    With log probabilities there is one of `logprobs` for each token; only then the text may be empty, in the last delta
    of an answer whose last tokens have none.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


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
