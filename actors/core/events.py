"""What the actors tell each other: events into the pure cores and commands out of them. Frozen, without tensors.

Times (`at_s`) are the shell's monotonic seconds: the cores have no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvblend.actors.core.jobs import BlendShape as BlendShape
from kvblend.actors.core.jobs import Hit as Hit
from kvblend.actors.core.jobs import Job as Job
from kvblend.actors.core.jobs import SegmentKeys as SegmentKeys
from kvblend.actors.core.speeds import TierSpeed
from kvblend.actors.messages import StreamEvent, TokenLogprob
from kvblend.engine.layout import BlendPlan
from kvblend.store.keys import ChunkKey

# ---- events of the scheduler ----


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job was accepted."""

    job: Job
    at_s: float


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody wants a request to end: its client, its deadline, or a drain."""

    request_id: str
    detail: str
    at_s: float
    deadline: bool = False


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The loader's answer to `Lookup`: leases are open for the hits. `speeds` are those of the tiers, as measured."""

    request_id: str
    hits: tuple[Hit, ...]
    at_s: float
    speeds: Mapping[str, TierSpeed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FirstLayerLoaded:
    """Layer 0 of all hits is in host memory."""

    request_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Unstalled:
    """The layer a stalled request waited for is there."""

    request_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A leased chunk turned out damaged; the store has forgotten it."""

    request_id: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Figures of a finished prefill; the last three where its KL was bounded (`engine.runner.PrefillFigures`)."""

    tokens_reused: int
    tokens_recomputed: int
    tokens_fresh: int
    charged_ratio: float
    parity_error: float
    load_ms: float = 0.0
    recompute_ratio: float | None = None
    kl_estimate: float | None = None
    ratios_tried: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One output token. `text` may be empty (a character is not complete, or a stop string may be beginning)."""

    token_id: int
    text: str
    stopped: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What one step did for one request. `prefill` is set in the step that finished the prompt.

    `row_layers` counts the rows that were computed, layer by layer. `lost`: what it was to continue is not there.
    """

    request_id: str
    status: Literal["running", "stalled", "sampled", "prefilled", "cancelled", "failed", "lost"]
    rows: int = 0
    sampled: Sampled | None = None
    prefill: PrefillReport | None = None
    error: str = ""
    row_layers: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """Step `number` is finished; `compute_ms` is device time. That of a step nobody waits for any more is ignored."""

    number: int
    results: tuple[ItemResult, ...]
    compute_ms: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk is durable, or could not be written (`error` says why)."""

    request_id: str
    key: ChunkKey
    created: bool
    error: str
    at_s: float


@dataclass(frozen=True, slots=True)
class PeerCrashed:
    """Another actor was replaced by an empty one; what it held is gone."""

    name: Literal["loader", "blender"]
    at_s: float


SchedulerEvent = (
    Submitted | CancelRequested | LookedUp | FirstLayerLoaded | Unstalled | LoadFailed | StepDone | Stored | PeerCrashed
)


# ---- commands of the scheduler ----


@dataclass(frozen=True, slots=True)
class Lookup:
    """To the loader: lease what is stored of this job. `deadline_s` (monotonic) says whose layers are read first."""

    job: Job
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LookAhead:
    """To the loader: this job waits for room; lease what is stored of it and read its first layers, if nobody else
    wants to read. A `Lookup` or a `Release` follows.
    """

    job: Job
    deadline_s: float = math.inf


@dataclass(frozen=True, slots=True)
class StartLoading:
    """To the loader: bring the leased layers of these segments, if any, in order; leases of other segments close."""

    request_id: str
    segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """To the loader: stop reading, close the leases, forget what was captured and is not being stored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StoreSegment:
    """To the loader: write the captured KV of one segment under `key`, in place of what is there with `replace`.

    `cost_s` are the seconds that computing it took; `tier` is where it should lie ("": no preference).
    """

    request_id: str
    segment: int
    key: ChunkKey
    token_ids: tuple[int, ...]
    replace: bool = False
    cost_s: float = 0.0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class DropChunks:
    """To the loader: delete the chunks that this request's leased `segments` came from; their KV is wrong."""

    request_id: str
    segments: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartSequence:
    """To the blender: KV slots and state for a planned request; the store gets the segments in `captures`.

    `continues` names a sequence that was not freed, and how many of its tokens this one begins with.
    """

    job: Job
    plan: BlendPlan
    captures: tuple[int, ...]
    continues: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class StepItem:
    """At most `rows_max` new rows of one request in the next step, at most `layers_max` layers further (None: all)."""

    request_id: str
    rows_max: int
    layers_max: int | None = None


@dataclass(frozen=True, slots=True)
class RunStep:
    """To the blender: one tick over these requests. No two steps have the same number."""

    number: int
    items: tuple[StepItem, ...]


@dataclass(frozen=True, slots=True)
class FlagCancelled:
    """To the blender: leave this request at the next layer."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FreeSequence:
    """To the blender: give the KV slots back."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Emit:
    """To the request's stream."""

    request_id: str
    event: StreamEvent


LoaderCommand = Lookup | LookAhead | StartLoading | Release | StoreSegment | DropChunks
BlenderCommand = StartSequence | RunStep | FlagCancelled | FreeSequence
SchedulerCommand = LoaderCommand | BlenderCommand | Emit
