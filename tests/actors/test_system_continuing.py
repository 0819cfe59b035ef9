"""Turns of a conversation on a whole system: what the last one left on the device is begun with, and says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_system import TEXTS, answer, request, running

from kvblend.actors.core import events as ev
from kvblend.actors.messages import BlendOptions, ChatMessage, Document, Finished, Generate, Sampling
from kvblend.actors.system import System

FIRST = "who held the key?"


async def next_answer(system: System, name: str, said: str, **changes: Any) -> tuple[str, Finished]:
    """The question asked first, what was answered, and another question, over the same documents."""
    turns = (ChatMessage("user", FIRST), ChatMessage("assistant", said), ChatMessage("user", "and who sold bread?"))
    blend = BlendOptions(**{key: changes.pop(key) for key in ("mode", "recompute_ratio") if key in changes})
    documents = tuple(Document(text) for text in TEXTS)
    asked = Generate(name, turns, documents, sampling=Sampling(max_tokens=6), blend=blend, **changes)
    return await (await system.submit(asked)).result()


@pytest.mark.parametrize("mode", ["blend", "prefix"])
async def test_the_next_turn_says_what_it_says_where_nothing_is_kept(tiny_model_path: Path, mode: str) -> None:
    said: list[str] = []
    for kept in (0, 4096):
        async with running(tiny_model_path, kept_tokens_max=kept) as system:
            # with nothing stored beforehand all of it is exact
            first, _ = await answer(system, "first", TEXTS, mode="full")
            await system.settle()
            text, end = await next_answer(system, "next", first, mode=mode, recompute_ratio=1.0)
        said.append(text)
        assert ("device" in end.usage.tiers) is bool(kept)
    assert said[0] == said[1]


async def test_a_turn_over_a_blended_context_computes_only_what_is_new(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, kept_tokens_max=4096) as system:
        await answer(system, "store", TEXTS, "something else?")
        await system.settle()
        first, blended = await answer(system, "first", TEXTS)
        _, end = await next_answer(system, "next", first)
        _, exact = await next_answer(system, "exact", first, mode="prefix")
        assert system.ready().details["kv_tokens_used"] == 0
        assert int(str(system.ready().details["kv_tokens_kept"])) > end.usage.prompt_tokens
    assert blended.usage.tokens_recomputed > 0
    usage = end.usage
    assert usage.tiers == {"device": len(TEXTS)}
    assert usage.chunk_hits == len(TEXTS)
    assert usage.tokens_recomputed == 0
    assert usage.tokens_fresh < blended.usage.tokens_fresh + 40
    assert "device" not in exact.usage.tiers


async def test_a_tenant_does_not_begin_with_the_kv_of_another(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, kept_tokens_max=4096) as system:
        first, _ = await answer(system, "first", TEXTS, tenant="one")
        _, own = await next_answer(system, "own", first, tenant="one")
        _, other = await next_answer(system, "other", first, tenant="two")
    assert "device" in own.usage.tiers
    assert "device" not in other.usage.tiers


async def test_the_same_question_asked_again_is_blended_again(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, kept_tokens_max=4096) as system:
        await answer(system, "store", TEXTS, "something else?")
        await system.settle()
        _, first = await answer(system, "first", TEXTS)
        _, again = await answer(system, "again", TEXTS)
    assert "device" not in again.usage.tiers
    assert again.usage.tokens_recomputed == first.usage.tokens_recomputed


async def test_a_turn_whose_kept_kv_is_gone_is_computed_anew_and_nobody_else_notices(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, kept_tokens_max=4096) as system:
        await answer(system, "store", TEXTS, "something else?")
        await system.settle()
        first, _ = await answer(system, "first", TEXTS)
        # as where the blender was replaced and the scheduler has not heard of it yet
        troupe: Any = system._troupe
        for kept in troupe._state.continuing.kept:
            troupe.blender.tell_nowait(ev.FreeSequence(kept.request_id))
        beside = await system.submit(request("beside", TEXTS, max_tokens=40))
        _, end = await next_answer(system, "next", first)
        _, other = await beside.result()
        restarts = troupe._supervisor.statistics()["blender"].restarts
    assert "planned again: the KV of its earlier turn is not on the device any more" in end.usage.notes
    assert (end.usage.chunk_hits, end.usage.tokens_recomputed > 0) == (len(TEXTS), True)
    assert (other.reason, other.usage.output_tokens, restarts) == ("length", 40, 0)
