"""Keys of segments, and plans from hits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import KIND, QUESTION, SYSTEM, A, B, C, generate, key_of
from hypothesis import given
from hypothesis.strategies import integers, lists, sampled_from

from kvblend.actors.core import events as ev
from kvblend.actors.core.conditioning import ECHO, NEIGHBOURS, Conditioning, ConditioningKind
from kvblend.actors.core.planning import decide, precompute_job, rope_ids, segment_keys, storing_layout
from kvblend.actors.messages import MODES, Mode
from kvblend.engine.layout import PromptLayout, Reuse

SYSTEM_RULE, BARE_RULE = Conditioning(), Conditioning("bare")
WARM = (91, 92, 93)
WARM_RULE = Conditioning("warm", WARM, 100)
BEHIND = WARM_RULE.behind(SYSTEM, 1)
LAYOUT = generate("r", A, B).layout


def hits(**marks: int) -> list[ev.Hit]:
    return [ev.Hit(index, name.startswith("exact"), "host") for name, index in marks.items()]


def test_the_first_chunk_takes_nothing_but_its_exact_kv_and_keeps_what_it_computes() -> None:
    first = segment_keys(LAYOUT, "blend", SYSTEM_RULE, "m", "")[1]
    assert first == ev.SegmentKeys(((key_of(A), True),), keep=key_of(A))


def test_a_later_chunk_is_looked_up_exact_then_behind_the_system_prompt_then_bare() -> None:
    later = segment_keys(LAYOUT, "blend", SYSTEM_RULE, "m", "")[2]
    exact = key_of(B, (*SYSTEM, *A))
    assert later.lookup == ((exact, True), (key_of(B), False), (key_of(B, ()), False))
    assert (later.keep, later.precompute) == (None, key_of(B))


def test_with_bare_conditioning_chunks_are_computed_bare() -> None:
    keys = segment_keys(LAYOUT, "blend", BARE_RULE, "m", "")
    assert [k.precompute for k in keys] == [None, key_of(A, ()), key_of(B, ()), None]
    assert keys[1].keep == key_of(A)


def test_a_bare_server_takes_what_was_computed_behind_the_system_prompt_too() -> None:
    later = segment_keys(LAYOUT, "blend", BARE_RULE, "m", "")[2]
    assert [key for key, _ in later.lookup[1:]] == [key_of(B, ()), key_of(B)]


def test_a_warm_server_looks_behind_the_warm_text_then_the_system_prompt_then_bare() -> None:
    later = segment_keys(LAYOUT, "blend", WARM_RULE, "m", "")[2]
    warm, echo = key_of(B, BEHIND), key_of(B, (*BEHIND[:-1], *ECHO))
    assert later.lookup[1:] == ((warm, False), (echo, False), (key_of(B), False), (key_of(B, ()), False))
    assert later.precompute == warm


def test_the_first_chunk_of_a_warm_server_is_the_exact_one_and_is_computed_warm_for_later() -> None:
    first = segment_keys(LAYOUT, "blend", WARM_RULE, "m", "")[1]
    assert first == ev.SegmentKeys(((key_of(A), True),), keep=key_of(A), precompute=key_of(A, BEHIND))


def test_a_server_with_neighbours_looks_for_them_before_the_warm_text() -> None:
    rule = Conditioning("neighbours", WARM, 100)
    later = segment_keys(LAYOUT, "blend", rule, "m", "")[2]
    assert [key for key, _ in later.lookup[1:3]] == [key_of(B, (*SYSTEM, *NEIGHBOURS)), key_of(B, BEHIND)]
    assert later.precompute == key_of(B, BEHIND)


@pytest.mark.parametrize("kind", ["system", "bare", "warm"])
def test_no_other_server_takes_what_was_computed_behind_neighbours(kind: ConditioningKind) -> None:
    keys = segment_keys(LAYOUT, "blend", Conditioning(kind, WARM, 100), "m", "")
    looked_up = {key for segment in keys for key, _ in segment.lookup}
    assert key_of(B, (*SYSTEM, *NEIGHBOURS)) not in looked_up


@pytest.mark.parametrize("kind", ["system", "bare"])
def test_no_other_server_takes_what_was_computed_behind_the_warm_text(kind: ConditioningKind) -> None:
    keys = segment_keys(LAYOUT, "blend", Conditioning(kind, WARM, 100), "m", "")
    assert key_of(B, BEHIND) not in {key for segment in keys for key, _ in segment.lookup}


def test_the_question_is_nobodys_business() -> None:
    assert segment_keys(LAYOUT, "blend", SYSTEM_RULE, "m", "")[-1] == ev.SegmentKeys()


def test_full_mode_has_no_keys() -> None:
    assert set(segment_keys(LAYOUT, "full", SYSTEM_RULE, "m", "")) == {ev.SegmentKeys()}


def test_prefix_mode_looks_for_exact_kv_only() -> None:
    keys = segment_keys(LAYOUT, "prefix", SYSTEM_RULE, "m", "")
    assert all(exact for segment in keys for _, exact in segment.lookup)


@pytest.mark.parametrize("change", [("n", ""), ("m", "tenant")])
def test_model_and_salt_keep_keys_apart(change: tuple[str, str]) -> None:
    keys = segment_keys(LAYOUT, "blend", SYSTEM_RULE, *change)
    assert keys[1].keep != key_of(A)


def test_hits_become_a_plan() -> None:
    decision = decide(generate("r", A, B), hits(exact_0=0, exact_1=1, cached=2), 0)
    assert decision.plan.reuse == (Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH)
    assert (decision.used, decision.captures, decision.precomputes) == ((0, 1, 2), (), ())
    assert decision.plan.budget == 3


def test_misses_are_kept_where_exact_and_queued_elsewhere() -> None:
    decision = decide(generate("r", A, B, C), hits(cached=2), 0)
    assert (decision.captures, decision.precomputes) == ((0, 1), (3,))


def test_prefix_mode_ends_at_the_first_miss() -> None:
    decision = decide(generate("r", A, B, mode="prefix"), hits(exact_0=0, exact_2=2), 0)
    assert decision.used == (0,)


def test_reuse_mode_recomputes_nothing() -> None:
    assert decide(generate("r", A, B, mode="reuse"), hits(exact=0, cached=2), 0).plan.budget == 0


def test_too_few_cached_tokens_are_computed_fresh_and_noted() -> None:
    decision = decide(generate("r", A, B), hits(exact=0, cached=2), 6)
    assert decision.used == (0,)
    assert decision.notes == ("5 cached tokens are fewer than blend_min_tokens 6: computed fresh",)
    assert decision.precomputes == ()


def test_a_precompute_job_stands_behind_the_system_prompt() -> None:
    job = precompute_job("p", generate("r", A, B), 2, SYSTEM_RULE)
    assert job.layout.token_ids == (*SYSTEM, *B)
    assert [keys.keep for keys in job.keys] == [key_of(SYSTEM, ()), key_of(B)]
    assert job.tokens_max == len(SYSTEM) + len(B)


def test_a_bare_precompute_job_stands_alone() -> None:
    base = generate("r", A, B)
    keys = segment_keys(base.layout, "blend", BARE_RULE, "m", "")
    bare = ev.Job("r", "generate", base.layout, keys, "blend", 0.5, base.options, base.sampling)
    assert precompute_job("p", bare, 1, BARE_RULE).layout.token_ids == A


def warm_job(rule: Conditioning = WARM_RULE) -> ev.Job:
    base = generate("r", A, B)
    return replace(base, keys=segment_keys(base.layout, "blend", rule, "m", ""))


def test_a_warm_precompute_job_stands_behind_system_prompt_and_warm_text_and_keeps_all() -> None:
    job = precompute_job("p", warm_job(), 2, WARM_RULE)
    assert [segment.token_ids for segment in job.layout.segments] == [SYSTEM, WARM, B]
    assert [keys.keep for keys in job.keys] == [key_of(SYSTEM, ()), key_of(WARM, SYSTEM), key_of(B, BEHIND)]
    assert job.conditioning == "warm"


def test_the_warm_text_is_exact_where_it_is_stored() -> None:
    job = precompute_job("p", warm_job(), 2, WARM_RULE)
    decision = decide(job, hits(exact_0=0, exact_1=1), 0)
    assert decision.plan.reuse == (Reuse.EXACT, Reuse.EXACT, Reuse.FRESH)
    assert (decision.used, decision.captures) == ((0, 1), (2,))


def test_a_chunk_too_long_for_the_warm_text_is_precomputed_behind_the_system_prompt() -> None:
    rule = Conditioning("warm", WARM, len(SYSTEM) + len(WARM) + len(B) - 1)
    job = precompute_job("p", warm_job(rule), 2, rule)
    assert [segment.token_ids for segment in job.layout.segments] == [SYSTEM, B]
    assert (job.stored_key, job.conditioning) == (key_of(B), "system")


def test_a_chunk_that_is_replaced_is_not_looked_up() -> None:
    _, keys = storing_layout([SYSTEM, A], B, key_of(B, (*SYSTEM, *NEIGHBOURS)), 1, replace=True)
    assert keys[-1] == ev.SegmentKeys((), keep=key_of(B, (*SYSTEM, *NEIGHBOURS)))


def test_of_what_a_chunk_stands_behind_no_more_is_stored_than_was_asked_for() -> None:
    _, keys = storing_layout([SYSTEM, A], B, key_of(B, (*SYSTEM, *A)), 1)
    assert [segment.keep for segment in keys[:2]] == [key_of(SYSTEM, ()), None]


def test_a_segment_without_a_key_of_its_own_cannot_be_precomputed() -> None:
    with pytest.raises(ValueError, match="segment 1 of r"):
        precompute_job("p", generate("r", A, B), 1, SYSTEM_RULE)


@given(lists(sampled_from((A, B, C)), max_size=5), sampled_from(MODES), integers(0, 255), integers(0, 12))
def test_any_hits_give_a_plan_that_adds_up(
    chunks: list[tuple[int, ...]], mode: Mode, pattern: int, minimum: int
) -> None:
    job = generate("r", *chunks, mode=mode)
    found = [ev.Hit(i, k.lookup[-1][1], "disk") for i, k in enumerate(job.keys) if k.lookup and pattern >> i & 1]
    decision = decide(job, found, minimum)
    plan = decision.plan
    assert sum(plan.count(kind) for kind in Reuse) == job.layout.num_tokens
    assert plan.reuse[-1] is Reuse.FRESH
    assert set(decision.used) <= {hit.segment for hit in found}
    assert not set(decision.captures) & {hit.segment for hit in found}
    assert all(job.layout.segments[index].end <= plan.exact_end for index in decision.captures)


def test_without_a_system_prompt_the_first_chunk_is_exact_when_bare() -> None:
    layout = PromptLayout.of([(KIND.CHUNK, A), (KIND.CHUNK, B), (KIND.QUESTION, QUESTION)])
    first, second, _ = segment_keys(layout, "blend", SYSTEM_RULE, "m", "")
    assert first == ev.SegmentKeys(((key_of(A, ()), True),), keep=key_of(A, ()))
    assert second.precompute == key_of(B, ())


def test_a_prompt_of_another_rope_has_other_exact_keys_and_the_same_others() -> None:
    plain = segment_keys(LAYOUT, "blend", Conditioning(), "m", "")
    for regime in ("long", "dynamic:99"):
        long = segment_keys(LAYOUT, "blend", Conditioning(), "m", "", rope_ids(regime, 99))
        assert long[0].lookup[0] != plain[0].lookup[0]
        assert long[2].lookup[1:] == plain[2].lookup[1:]
    assert rope_ids("", 99) == ()
    assert rope_ids("dynamic:98", 98) != rope_ids("dynamic:99", 99)
