"""The whole system on a tiny model: hits, misses, restarts, damage, cancels, crashes, many clients."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from small_system import TEXTS, answer, first_delta, request, running

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Accepted, Delta, Document, Failed, Finished, Planned, Sampling

SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])


async def test_chunks_stored_in_one_order_are_hit_in_another(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        _, first = await answer(system, "a", TEXTS)
        await system.settle()
        _, second = await answer(system, "b", SHUFFLED)
    assert (first.usage.chunk_hits, first.usage.chunk_misses) == (0, 4)
    assert (second.usage.chunk_hits, second.usage.chunk_misses) == (4, 0)


@pytest.mark.parametrize("conditioning", ["system", "bare"])
async def test_ratio_one_gives_the_text_of_full_prefill(
    tiny_model_path: Path, tmp_path: Path, conditioning: str
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning=conditioning) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=24)
        await answer(system, "a", TEXTS)
        await system.settle()
        blended, end = await answer(system, "b", SHUFFLED, recompute_ratio=1.0, max_tokens=24)
    assert blended == full
    assert end.usage.chunk_hits >= 3
    assert end.usage.charged_ratio == 1.0


@pytest.mark.parametrize("mode", ["blend", "full", "reuse", "prefix"])
async def test_token_counts_add_up_in_every_mode(tiny_model_path: Path, tmp_path: Path, mode: str) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await answer(system, "a", TEXTS[:3])
        await system.settle()
        _, end = await answer(system, "b", SHUFFLED, mode=mode)
    usage = end.usage
    assert usage.tokens_reused + usage.tokens_recomputed + usage.tokens_fresh == usage.prompt_tokens
    assert (usage.tokens_reused > 0) == (mode != "full")
    assert (usage.tokens_recomputed > 0) == (mode == "blend")


async def test_a_restart_serves_what_was_stored_before_it(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await answer(system, "a", TEXTS)
        await system.settle()
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        _, end = await answer(system, "b", SHUFFLED)
    assert end.usage.chunk_hits == 4
    assert end.usage.tiers.get("disk", 0) >= 4


@pytest.mark.parametrize("harm", ["flip", "cut", "foreign"])
async def test_a_damaged_chunk_file_is_a_miss_and_the_answer_stays_right(
    tiny_model_path: Path, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=16)
        await answer(system, "a", TEXTS)
        await system.settle()
    for path in sorted((tmp_path / "s").rglob("*.kvc")):
        data = bytearray(path.read_bytes())
        if harm == "flip":
            # one byte in 64, since a single one may fall into the padding between layers
            data[len(data) // 4 :: 64] = bytes(byte ^ 1 for byte in data[len(data) // 4 :: 64])
        elif harm == "cut":
            del data[len(data) // 2 :]
        else:
            data[:] = b"not ours" * 99
        path.write_bytes(data)
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        text, end = await answer(system, "b", SHUFFLED, recompute_ratio=1.0, max_tokens=16)
    assert text == full
    assert end.reason in ("length", "stop")
    assert end.usage.chunk_hits == 0


async def test_a_novel_order_of_known_chunks_stores_nothing(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await answer(system, "a", TEXTS)
        await answer(system, "warm", SHUFFLED)
        await system.settle()
        before = system.store_stats().chunks
        await answer(system, "b", (TEXTS[2], TEXTS[3], TEXTS[1], TEXTS[0]))
        await system.settle()
        assert system.store_stats().chunks == before


async def test_full_mode_neither_reads_nor_writes_the_store(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        await answer(system, "a", TEXTS, mode="full")
        await system.settle()
        assert system.store_stats().chunks == 0


async def test_few_cached_tokens_are_computed_fresh_and_the_usage_says_so(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, blend_min_tokens=10_000) as system:
        await answer(system, "a", TEXTS)
        await system.settle()
        _, end = await answer(system, "b", SHUFFLED)
    assert end.usage.tokens_recomputed == 0
    assert any("blend_min_tokens" in note for note in end.usage.notes)


async def test_on_miss_precompute_blends_at_first_sight(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        _, end = await answer(system, "a", TEXTS, on_miss="precompute")
    assert end.usage.chunk_hits >= 3


async def test_ingested_chunks_are_hit_by_text_and_by_id(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        _, end = await answer(system, "i", TEXTS, "", generate=False)
        assert [chunk.created for chunk in end.chunks] == [True] * 4
        _, again = await answer(system, "j", TEXTS, "", generate=False)
        assert [chunk.created for chunk in again.chunks] == [False] * 4
        by_text, _ = await answer(system, "t", SHUFFLED)
        ids = [Document(id=end.chunks[index].id) for index in (2, 0, 3, 1)]
        by_id, used = await answer(system, "u", ids)
    assert by_text == by_id
    assert used.usage.chunk_hits == 4


async def test_events_come_in_order_and_end_once(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("a", TEXTS))
        events = [event async for event in stream]
    kinds = [type(event) for event in events if not isinstance(event, Delta)]
    assert kinds == [Accepted, Planned, Finished]


async def test_requests_for_the_same_new_chunk_compute_it_once(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        ends = await asyncio.gather(*(answer(system, f"r{n}", TEXTS) for n in range(4)))
        await system.settle()
        assert system.store_stats().chunks == 5
    assert sum(end.usage.chunk_hits == 0 for _, end in ends) == 1


async def test_a_cancelled_request_ends_with_reason_cancelled(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("a", TEXTS, max_tokens=900))
        await first_delta(stream)
        system.cancel_nowait("a")
        _, end = await stream.result()
        assert end.reason == "cancelled"
        await system.settle()


async def test_an_abandoned_stream_frees_everything(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("a", TEXTS, max_tokens=900))
        await first_delta(stream)
        stream.abandon()
        await system.settle()
        details = system.ready().details
        assert details["kv_tokens_used"] == 0
        assert details["requests"] == 0
        assert system.store_stats().leases == 0


async def test_a_deadline_fails_the_request_by_name(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("a", TEXTS, max_tokens=1500, deadline_ms=60.0))
        with pytest.raises(RequestError, match="deadline_ms 60") as caught:
            await stream.result()
    assert caught.value.code == "deadline_exceeded"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no question": ({"question": ""}, "input"),
    "ratio": ({"recompute_ratio": 1.5}, "blend.recompute_ratio"),
    "mode": ({"mode": "magic"}, "blend.mode"),
    "tokens": ({"max_tokens": 0}, "max_output_tokens"),
    "temperature": ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
    "unknown chunk": ({"texts": [Document(id="ab" * 32)]}, "documents[0].id"),
    "blank chunk": ({"texts": ["x", "  "]}, "documents[1].text"),
    "other model": ({"model": "gpt"}, "model"),
    "too long": ({"question": "word " * 9000}, "input"),
    "too many out": ({"max_tokens": 2047}, "max_output_tokens"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_are_refused_before_work_with_the_field_named(tiny_model_path: Path, name: str) -> None:
    changes, param = BAD[name]
    async with running(tiny_model_path) as system:
        with pytest.raises(RequestError) as caught:
            await system.submit(request("a", **{"texts": TEXTS, **changes}))
        assert caught.value.param == param
        assert system.ready().details["jobs"] == 0


async def test_a_full_queue_refuses_with_retry_after(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, queue_requests_max=2, max_num_seqs=1) as system:
        streams = [await system.submit(request(f"r{n}", TEXTS)) for n in range(2)]
        with pytest.raises(RequestError) as caught:
            await system.submit(request("r3", TEXTS))
        assert (caught.value.code, caught.value.retry_after_s) == ("overloaded", 1.0)
        for stream in streams:
            await stream.result()


async def test_packed_requests_give_the_texts_of_single_ones(tiny_model_path: Path) -> None:
    questions = [f"what did the miller do on day {n}?" for n in range(6)]
    async with running(tiny_model_path) as system:
        await answer(system, "warm", TEXTS, "", generate=False)
        single = [(await answer(system, f"s{n}", SHUFFLED, q))[0] for n, q in enumerate(questions)]
        packed = await asyncio.gather(*(answer(system, f"p{n}", SHUFFLED, q) for n, q in enumerate(questions)))
    assert [text for text, _ in packed] == single


async def test_fifty_clients_a_third_of_them_leaving_end_once_each(tiny_model_path: Path, tmp_path: Path) -> None:
    chance = random.Random(7)

    async def client(system: object, number: int) -> str:
        texts = chance.sample(TEXTS, 3)
        stream = await system.submit(request(f"r{number}", texts, max_tokens=chance.randint(1, 20)))  # type: ignore[attr-defined]
        if number % 3 == 0:
            await stream.drain()
            if number % 2:
                stream.abandon()
            else:
                system.cancel_nowait(f"r{number}")  # type: ignore[attr-defined]
        terminals = [event async for event in stream if isinstance(event, Finished | Failed)]
        assert len(terminals) == 1
        return "failed" if isinstance(terminals[0], Failed) else terminals[0].reason

    async with running(tiny_model_path, store=tmp_path / "s", max_num_seqs=8, kv_tokens_max=4096) as system:
        ends = await asyncio.gather(*(client(system, number) for number in range(50)))
        await system.settle()
        details, stats = system.ready().details, system.store_stats()
    assert "failed" not in ends
    assert (details["jobs"], details["kv_tokens_used"], details["requests"], stats.leases) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["scheduler", "loader", "blender"])
async def test_a_crashed_actor_fails_its_requests_and_the_system_goes_on(tiny_model_path: Path, name: str) -> None:
    async with running(tiny_model_path) as system:
        await answer(system, "warm", TEXTS)
        await system.settle()
        stream = await system.submit(request("a", TEXTS, max_tokens=1200))
        await first_delta(stream)
        getattr(system._troupe, name).tell_nowait("a message nobody knows", "system")
        if name == "loader":
            stream.abandon()
        else:
            with pytest.raises(RequestError) as caught:
                await stream.result()
            assert caught.value.code == "internal"
        text, _ = await answer(system, "b", SHUFFLED)
        assert isinstance(text, str)
        await system.settle()
        assert system.ready().details["kv_tokens_used"] == 0


async def test_drain_lets_running_requests_finish_and_refuses_new_ones(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("a", TEXTS, max_tokens=5))
        draining = asyncio.create_task(system.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="no new requests"):
            await system.submit(request("b", TEXTS))
        _, end = await stream.result()
        assert end.reason in ("stop", "length")
        await draining
