"""What an entry says of its job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import REPORT, A, B, generate, store

from kvblend.actors.core.entry import Entry
from kvblend.actors.core.events import Hit
from kvblend.actors.core.lifecycle import IllegalTransition, Phase
from kvblend.actors.core.planning import decide


def planned() -> Entry:
    entry = Entry(generate("r", A, B, B), accepted_s=1.0, admitted_s=1.5)
    entry.hits = (Hit(0, True, "disk"), Hit(1, True, "host"), Hit(2, False, "host"))
    entry.decision = decide(entry.job, entry.hits, 0)
    return entry


def test_a_new_entry_may_be_admitted() -> None:
    assert Entry(generate(), 0.0).eligible


def test_who_is_looked_up_or_waits_may_not_be_admitted() -> None:
    entry = Entry(generate(), 0.0, waits_for="other")
    assert not entry.eligible
    assert not replace(entry, waits_for=None, looking_up=True).eligible
    assert not replace(entry, waits_for=None, phase=Phase.DECODING).eligible


def test_moves_follow_the_table() -> None:
    with pytest.raises(IllegalTransition):
        Entry(generate(), 0.0).move(Phase.DECODING)


def test_ended_means_terminal() -> None:
    assert Entry(generate(), 0.0, phase=Phase.FAILED).ended
    assert not Entry(generate(), 0.0).ended


def test_usage_before_the_plan_counts_everything_as_fresh() -> None:
    usage = Entry(generate("r", A), 1.0).usage(1.25)
    assert (usage.prompt_tokens, usage.tokens_fresh, usage.total_ms) == (9, 9, 250.0)


def test_planned_usage_adds_up() -> None:
    usage = planned().usage(2.0)
    assert (usage.tokens_reused, usage.tokens_recomputed, usage.tokens_fresh) == (9, 3, 7)
    assert usage.tokens_reused + usage.tokens_recomputed + usage.tokens_fresh == usage.prompt_tokens
    assert (usage.chunk_hits, usage.chunk_misses, usage.tiers) == (2, 1, {"disk": 1, "host": 2})
    assert usage.queue_ms == 500.0


def test_usage_after_the_prefill_has_the_devices_figures() -> None:
    entry = planned()
    entry.first_token_s = 3.0
    entry.prefill = replace(REPORT, tokens_reused=5, tokens_recomputed=4, tokens_fresh=10, load_ms=7.0)
    usage = entry.usage(4.0)
    assert (usage.tokens_reused, usage.tokens_recomputed, usage.tokens_fresh) == (5, 4, 10)
    assert (usage.ttft_ms, usage.total_ms, usage.load_ms) == (2000.0, 3000.0, 7.0)


def test_the_tokens_of_a_document_are_those_of_its_chunk() -> None:
    assert Entry(store("s", A), 0.0).last_chunk_tokens() == len(A)
    assert Entry(generate(), 0.0).last_chunk_tokens() == 0
