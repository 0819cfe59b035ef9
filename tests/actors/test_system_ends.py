"""Submits, drains, closes and ingests that meet at a bad moment: one end each, nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from faulty_system import failure, running_on, until_quiet
from shell_rig import GatedDisk
from small_system import TEXTS, answer, first_delta, request, running

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Failed, Finished
from kvblend.actors.streams import TokenStream


async def test_a_submit_that_is_cancelled_leaves_nothing(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        submitting = asyncio.create_task(system.submit(request("a", TEXTS)))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert system.ready().details["requests"] == 0
        await answer(system, "a", TEXTS)


async def test_of_two_submits_of_one_id_one_is_taken(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        pair = [system.submit(request("a", TEXTS)) for _ in range(2)]
        one, other = await asyncio.gather(*pair, return_exceptions=True)
        assert isinstance(one, TokenStream)
        assert isinstance(other, RequestError)
        assert other.param == "request_id"
        await one.result()


async def test_an_id_can_be_used_again_at_once(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        for _ in range(6):
            stream = await system.submit(request("a", TEXTS, max_tokens=900))
            system.cancel_nowait("a")
            system.cancel_nowait("a")
            _, end = await stream.result()
            assert end.reason == "cancelled"
        _, end = await answer(system, "a", TEXTS, max_tokens=2)
        assert end.reason in ("stop", "length")
        await until_quiet(system)


@pytest.mark.parametrize("name", ["", "/a", "x" * 300])
async def test_ids_that_jobs_of_our_own_could_have_are_refused(tiny_model_path: Path, name: str) -> None:
    async with running(tiny_model_path) as system:
        with pytest.raises(RequestError, match="request_id"):
            await system.submit(request(name, TEXTS))


async def test_a_request_may_use_all_slots_there_are(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, kv_tokens_max=1001) as system:
        text = "word " * 30
        tokens = (await answer(system, "probe", [text], mode="full", max_tokens=1))[1].usage.prompt_tokens
        stream = await system.submit(request("a", [text], mode="full", max_tokens=1001 - tokens))
        await first_delta(stream)
        system.cancel_nowait("a")
        await stream.result()


async def test_a_drain_lets_an_ingest_finish(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("i", TEXTS, "", generate=False))
        await system.drain(30.0)
        assert isinstance(stream.terminal, Finished)
        assert len(stream.terminal.chunks) == 4


async def test_past_its_grace_a_drain_cancels_answers_and_ingests(tiny_model_path: Path, tmp_path: Path) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path) as system:
        disk.writes.clear()
        streams = [
            await system.submit(request("a", TEXTS, max_tokens=1500)),
            await system.submit(request("i", [text.upper() for text in TEXTS], "", generate=False)),
        ]
        draining = asyncio.create_task(system.drain(0.05))
        for stream in streams:
            _, end = await stream.result()
            assert (end.reason, end.detail) == ("cancelled", "the server is shutting down")
        disk.writes.set()
        await draining
        await until_quiet(system)


async def test_close_ends_a_running_ingest_and_a_running_answer(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        first = await system.submit(request("a", TEXTS, max_tokens=1500))
        second = await system.submit(request("i", TEXTS, "", generate=False))
    assert first.terminal == Failed("a", "internal", "the system was closed")
    assert isinstance(second.terminal, Finished)
    assert second.terminal.reason == "cancelled"


async def test_an_ingest_can_be_cancelled_and_started_again_under_its_id(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("i", TEXTS, "", generate=False))
        system.cancel_nowait("i", "enough")
        _, end = await stream.result()
        assert (end.reason, end.detail) == ("cancelled", "enough")
        _, again = await answer(system, "i", TEXTS, "", generate=False)
        assert len(again.chunks) == 4
        await until_quiet(system)


async def test_an_ingest_that_misses_its_deadline_fails_by_name(tiny_model_path: Path, tmp_path: Path) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path) as system:
        disk.writes.clear()
        stream = await system.submit(request("i", TEXTS, "", generate=False, deadline_ms=50.0))
        error = await failure(stream)
        assert (error.code, error.message) == ("deadline_exceeded", "not finished within deadline_ms 50")
        disk.writes.set()
        await until_quiet(system)
