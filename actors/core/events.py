"""What the actors tell each other: events into the pure cores and commands out of them. Frozen, without tensors.

Times (`at_s`) are the shell's monotonic seconds: the cores have no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvblend.actors.messages import BlendOptions, Mode, Sampling, StreamEvent
from kvblend.engine.layout import BlendPlan, PromptLayout
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
class Job:
    """One unit of scheduling. "generate" answers a request; "precompute" computes and stores the last segment's KV.

    `note` is said with its figures. Of a precompute job: `conditioning` names what the chunk is computed behind, `note`
    says why it is not what the server is set to, `replace` makes the new KV take the place of what is stored.
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
    note: str = ""

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
        return self.layout.num_tokens + (self.sampling.max_tokens if self.kind == "generate" else 0)


@dataclass(frozen=True, slots=True)
class Hit:
    """A leased segment: its index in the layout, whether it is exact there, and the tier it lay in."""

    segment: int
    exact: bool
    tier: str


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
    """The loader's answer to `Lookup`: leases are open for the hits."""

    request_id: str
    hits: tuple[Hit, ...]
    at_s: float


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
    """Figures of a finished prefill."""

    tokens_reused: int
    tokens_recomputed: int
    tokens_fresh: int
    charged_ratio: float
    parity_error: float
    load_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One output token. `text` may be empty (a character is not complete, or a stop string may be beginning)."""

    token_id: int
    text: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What one step did for one request. `prefill` is set in the step that finished the prompt."""

    request_id: str
    status: Literal["running", "stalled", "sampled", "prefilled", "cancelled", "failed"]
    rows: int = 0
    sampled: Sampled | None = None
    prefill: PrefillReport | None = None
    error: str = ""


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
    """To the loader: lease what is stored of this job."""

    job: Job


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
    """To the loader: write the captured KV of one segment under `key`, in place of what is there with `replace`."""

    request_id: str
    segment: int
    key: ChunkKey
    token_ids: tuple[int, ...]
    replace: bool = False


@dataclass(frozen=True, slots=True)
class DropChunks:
    """To the loader: delete the chunks that this request's leased `segments` came from; their KV is wrong."""

    request_id: str
    segments: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartSequence:
    """To the blender: KV slots and state for a planned request; the store gets the segments in `captures`."""

    job: Job
    plan: BlendPlan
    captures: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepItem:
    """At most `rows_max` new rows of one request in the next step."""

    request_id: str
    rows_max: int


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


LoaderCommand = Lookup | StartLoading | Release | StoreSegment | DropChunks
BlenderCommand = StartSequence | RunStep | FlagCancelled | FreeSequence
SchedulerCommand = LoaderCommand | BlenderCommand | Emit
