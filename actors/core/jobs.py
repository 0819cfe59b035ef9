"""What is scheduled: one prompt with its keys, what is wanted of it, and what the store has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvblend.actors.messages import DRAFT_TOKENS, BlendOptions, Mode, Sampling
from kvblend.engine.layout import PromptLayout
from kvblend.store.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class SegmentKeys:
    """How one segment is looked up and stored.

    `lookup`: keys in order of preference, each with whether a hit is exact at this place. `keep`: the key under which
    its KV may be stored when this request computes it behind exact tokens. `precompute`: the key of its KV behind the
    server's conditioning, for a job of its own; None where that is nobody's business (question, system prompt).
    """

    lookup: tuple[tuple[ChunkKey, bool], ...] = ()
    keep: ChunkKey | None = None
    precompute: ChunkKey | None = None


@dataclass(frozen=True, slots=True)
class BlendShape:
    """What loading can hide behind, of one request's selector: its first `full_layers` layers are computed for every
    cached row; `waits` where its last pass begins only when a pass over all layers is done, so that nothing of it is
    hidden behind loading. `auto_ratio`: the ratio may be raised to what loading hides. `fixed_ratio`: how many rows are
    recomputed is said row set by row set or by thresholds, and not by one ratio.
    """

    full_layers: int = 2
    waits: bool = False
    auto_ratio: bool = False
    fixed_ratio: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of scheduling. "generate" answers a request; "precompute" computes and stores the last segment's KV.

    `recompute_ratio` is the lowest where `shape` says that it may be raised. `deadline_ms` counts from its acceptance.
    `note` is said with its figures. Of a precompute job: `conditioning` names what the chunk is computed behind, `note`
    says why it is not what the server is set to, `replace` makes the new KV take the place of what is stored. `client`
    is who asked: clients share the server fairly. `salt` and `regime` are those of its keys.
    """

    request_id: str
    kind: Literal["generate", "precompute"]
    layout: PromptLayout
    keys: tuple[SegmentKeys, ...]
    mode: Mode
    recompute_ratio: float
    options: BlendOptions
    sampling: Sampling
    on_miss: Literal["fresh", "precompute"] = "fresh"
    conditioning: str = ""
    replace: bool = False
    echo: bool = False
    note: str = ""
    shape: BlendShape = BlendShape()
    deadline_ms: float | None = None
    client: str = ""
    salt: str = ""
    regime: tuple[int, ...] = ()

    @property
    def stored_key(self) -> ChunkKey:
        """The key under which a precompute job stores its chunk. Raises ValueError for other jobs."""
        key = self.keys[-1].keep
        if self.kind != "precompute" or key is None:
            raise ValueError(f"job {self.request_id} stores no chunk")
        return key

    @property
    def tokens_max(self) -> int:
        """KV slots the job needs at most."""
        answer = self.sampling.max_tokens if self.kind == "generate" else 0
        if self.echo:
            answer += len(self.layout.segments[-1].token_ids)
        return self.layout.num_tokens + (answer if self.options.max_kl is None else max(answer, DRAFT_TOKENS))


@dataclass(frozen=True, slots=True)
class Hit:
    """A leased segment: its index in the layout, whether it is exact there, the tier it lay in and what is to be read.

    `num_bytes` are those of its layers that are neither in host memory nor on the device.
    """

    segment: int
    exact: bool
    tier: str
    num_bytes: int = 0
