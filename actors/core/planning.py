"""From a prompt and what the store has of it to a plan: keys to look up, reuse marks, what to keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvblend.actors.core.conditioning import Conditioning, Ids
from kvblend.actors.core.events import Hit, Job, SegmentKeys
from kvblend.actors.messages import Mode
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.store.keys import TOKEN_ID_MAX, ChunkKey, ids_digest


def rope_ids(regime: str, num_tokens: int) -> Ids:
    """Ids that no vocabulary has for the RoPE regime of a prompt (`ModelConfig.rope_regime`); none for the base one."""
    if not regime:
        return ()
    return (TOKEN_ID_MAX - 1, num_tokens if "dynamic" in regime else 0)


def segment_keys(
    layout: PromptLayout, mode: Mode, conditioning: Conditioning, fingerprint: str, salt: str, regime: Ids = ()
) -> tuple[SegmentKeys, ...]:
    """The keys of every segment (algorithm.md, "Prompt, segments and keys").

    Order of lookup: exact for this prompt, the server's conditioning, behind the system prompt, bare. The first chunk
    takes nothing but its exact variant: it is computed fresh once and stored. `full` neither looks up nor stores;
    `prefix` takes exact hits. `regime` names the rotation of a prompt where its length decides it (`rope_ids`): what
    was computed in prompts of another one is exact nowhere here, so it has other exact keys.
    """
    if mode == "full":
        return tuple(SegmentKeys() for _ in layout.segments)
    system: Ids = ()
    before: list[int] = []
    keys: list[SegmentKeys] = []
    for index, segment in enumerate(layout.segments):
        exact = ChunkKey.of(fingerprint, salt, [*before, *regime], segment.token_ids)
        if segment.kind is SegmentKind.SYSTEM:
            system = segment.token_ids
            keys.append(SegmentKeys(((exact, True),), keep=exact))
        elif segment.kind is SegmentKind.CHUNK:
            ids = segment.token_ids
            own = ChunkKey.of(fingerprint, salt, conditioning.behind(system, len(ids)), ids)
            first = not before or before == list(system)
            variants = () if first or mode == "prefix" else conditioning.variants(system, len(ids))
            others = [key for behind in variants if (key := ChunkKey.of(fingerprint, salt, behind, ids)) != exact]
            keys.append(
                SegmentKeys(
                    ((exact, True), *((key, False) for key in others)),
                    keep=exact if first else None,
                    precompute=None if own == exact else own,
                )
            )
        else:
            keys.append(SegmentKeys())
        if index + 1 < len(layout.segments):
            before.extend(segment.token_ids)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request does with its hits. `used` segments are loaded, `captures` kept, `precomputes` queued after it."""

    plan: BlendPlan
    used: tuple[int, ...]
    captures: tuple[int, ...]
    precomputes: tuple[int, ...]
    notes: tuple[str, ...]


def decide(
    job: Job,
    hits: Sequence[Hit],
    blend_min_tokens: int,
    ratio: float | None = None,
    computed: Collection[int] = (),
) -> Decision:
    """Turn hits into a plan; with another `ratio` than the job's, and with the `computed` segments not loaded.

    In `prefix` mode hits behind the first miss are dropped: a prefix ends there. In `blend` mode fewer B-rows than
    `blend_min_tokens` are not worth the passes and are computed fresh, which the notes say.
    """
    layout, notes = job.layout, []
    marks = [Reuse.FRESH] * len(layout.segments)
    for hit in hits:
        if hit.segment not in computed:
            marks[hit.segment] = Reuse.EXACT if hit.exact else Reuse.CACHED
    if job.mode == "prefix":
        end = next((i for i, mark in enumerate(marks) if mark is not Reuse.EXACT), len(marks))
        marks = [mark if i < end else Reuse.FRESH for i, mark in enumerate(marks)]
    if ratio is None:
        ratio = job.recompute_ratio
    ratio = ratio if job.mode == "blend" else 0.0
    if job.kind == "precompute":
        marks[-1] = Reuse.FRESH
    plan = BlendPlan.of(layout, marks, ratio)
    cached = plan.count(Reuse.CACHED)
    if job.mode == "blend" and 0 < cached < blend_min_tokens:
        notes.append(f"{cached} cached tokens are fewer than blend_min_tokens {blend_min_tokens}: computed fresh")
        marks = [Reuse.FRESH if mark is Reuse.CACHED else mark for mark in plan.reuse]
        plan = BlendPlan.of(layout, marks, ratio)
    found = {hit.segment for hit in hits}
    captures, precomputes = [], []
    for index, (segment, keys) in enumerate(zip(layout.segments, job.keys, strict=True)):
        if index in found:
            continue
        if keys.keep is not None and segment.end <= plan.exact_end:
            captures.append(index)
        if keys.precompute is not None and job.kind == "generate":
            precomputes.append(index)
    used = tuple(i for i, mark in enumerate(plan.reuse) if mark is not Reuse.FRESH)
    return Decision(plan, used, tuple(captures), tuple(precomputes), tuple(notes))


def precompute_job(request_id: str, job: Job, segment: int, conditioning: Conditioning) -> Job:
    """The job that computes one missed chunk behind the server's conditioning and stores it."""
    ids = job.layout.segments[segment].token_ids
    key = job.keys[segment].precompute
    if key is None:
        raise ValueError(f"segment {segment} of {job.request_id} has no KV of its own to compute")
    head = job.layout.segments[0]
    system = head.token_ids if head.kind is SegmentKind.SYSTEM else ()
    behind = conditioning.parts(system, len(ids))
    layout, keys = storing_layout(behind, ids, key, len(behind))
    label, echo = conditioning.label(system, len(ids)), conditioning.echoes(system, len(ids))
    computed = Job(request_id, "precompute", layout, keys, "blend", 0.0, job.options, job.sampling)
    return replace(computed, conditioning=label, echo=echo, client=job.client)


def storing_layout(
    behind: Sequence[Ids], ids: Ids, key: ChunkKey, kept: int, *, replace: bool = False
) -> tuple[PromptLayout, tuple[SegmentKeys, ...]]:
    """The prompt in which a chunk's KV is computed to be stored under `key`, with the keys of its segments.

    The first `kept` pieces that it stands behind are stored too, for the next chunk to find. With `replace` the chunk
    is not looked up: whatever is stored under its key is of no use.
    """
    parts = [(SegmentKind.SYSTEM, piece) for piece in behind]
    keys: list[SegmentKeys] = []
    before: list[int] = []
    for index, piece in enumerate(behind):
        above = ChunkKey(key.fingerprint, key.tenant, ids_digest(before), ids_digest(piece))
        keys.append(SegmentKeys(((above, True),), keep=above) if index < kept else SegmentKeys())
        before.extend(piece)
    keys.append(SegmentKeys(() if replace else ((key, True),), keep=key))
    return PromptLayout.of([*parts, (SegmentKind.CHUNK, ids)]), tuple(keys)
