"""What follows from a job: the key it stores under and the KV slots it may need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_driver import QUESTION, SYSTEM, A, generate, key_of, store

from kvblend.actors.messages import DRAFT_TOKENS


def test_a_job_that_stores_a_chunk_has_its_key() -> None:
    assert store("s", A).stored_key == key_of(A)
    with pytest.raises(ValueError, match="stores no chunk"):
        _ = generate("r", A).stored_key


def test_a_question_needs_slots_for_its_prompt_and_its_answer() -> None:
    prompt = len(SYSTEM) + len(A) + len(QUESTION)
    assert generate("r", A, max_tokens=4).tokens_max == prompt + 4
    assert store("s", A).tokens_max == len(SYSTEM) + len(A)


def test_an_echoed_question_needs_its_slots_twice() -> None:
    job = generate("r", A, max_tokens=4)
    assert replace(job, echo=True).tokens_max == job.tokens_max + len(QUESTION)


def test_a_bounded_question_has_room_for_its_draft() -> None:
    job = generate("r", A, max_tokens=1)
    bounded = replace(job, options=replace(job.options, max_kl=0.1))
    assert bounded.tokens_max == job.layout.num_tokens + max(1, DRAFT_TOKENS)
