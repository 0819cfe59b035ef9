"""The whole system when things fail or hang: every request ends once and rightly, nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path
from typing import Any

import pytest
from faulty_system import NONSENSE, SHUFFLED, failure, running_on, store_all, until, until_quiet
from shell_rig import GatedDisk
from small_system import TEXTS, answer, request, running

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Accepted, Failed, Finished, IngestProgress
from kvblend.actors.system import System


async def crash(system: System, name: str) -> None:
    """Crash an actor and wait for the next one, or for the end of all."""
    actor, statistics = getattr(system._troupe, name), system._troupe._supervisor.statistics
    before = statistics()[name].restarts
    actor.tell_nowait(NONSENSE, "system")
    await until(lambda: (statistics()[name].restarts > before and actor.alive) or system.fatal.done())


async def test_a_crash_of_the_loader_fails_who_loads_and_gives_the_leases_back(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path) as system:
        await store_all(system, tmp_path)
        disk.reads.clear()
        stream = await system.submit(request("a", SHUFFLED))
        await disk.reading.acquire()
        system._troupe.loader.tell_nowait(NONSENSE)
        assert (await failure(stream)).message == "the loader failed and was restarted"
        disk.reads.set()
        _, end = await answer(system, "b", SHUFFLED)
        assert end.usage.chunk_hits == 4
        await until_quiet(system)


@pytest.mark.parametrize("name", ["scheduler", "loader", "blender"])
async def test_past_the_restart_limit_everything_ends(tiny_model_path: Path, name: str) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("a", TEXTS, max_tokens=1500))
        ingest = await system.submit(request("i", TEXTS, "", generate=False))
        for _ in range(4):
            await crash(system, name)
        assert system.fatal.done()
        assert (await failure(stream)).code == "internal"
        assert isinstance(ingest.terminal, Failed)
        assert not system.ready().ok
        with pytest.raises(RequestError) as caught:
            await system.submit(request("b", TEXTS))
        assert caught.value.code == "overloaded"


async def test_a_full_disk_spoils_no_answer_and_fails_an_ingest_by_name(tiny_model_path: Path, tmp_path: Path) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path) as system:
        full, _ = await answer(system, "f", TEXTS, mode="full", max_tokens=12)
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        text, end = await answer(system, "a", TEXTS, max_tokens=12)
        assert text == full
        assert any("No space left on device" in note for note in end.usage.notes)
        ingest = await system.submit(request("i", TEXTS, "", generate=False))
        assert "No space left on device" in (await failure(ingest)).message
        waiting, _ = await answer(system, "p", TEXTS, on_miss="precompute", max_tokens=12)
        assert waiting == full
        await until_quiet(system)
        disk.error = None
        _, stored = await answer(system, "j", TEXTS, "", generate=False)
        assert [chunk.created for chunk in stored.chunks] == [True] * 4


async def test_a_request_whose_read_hangs_can_be_cancelled(tiny_model_path: Path, tmp_path: Path) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path) as system:
        await store_all(system, tmp_path)
        disk.reads.clear()
        stream = await system.submit(request("a", SHUFFLED))
        await disk.reading.acquire()
        system.cancel_nowait("a")
        _, end = await stream.result()
        assert end.reason == "cancelled"
        assert system.ready().details["kv_tokens_used"] == 0
        disk.reads.set()
        await until_quiet(system)


async def test_a_request_that_waits_for_a_layer_holds_up_nobody_and_is_right_in_the_end(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path, prefetch_layers_max=1) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=12)
        await store_all(system, tmp_path)
        disk.reads.clear()
        stalled = asyncio.create_task(answer(system, "a", SHUFFLED, recompute_ratio=1.0, max_tokens=12))
        await disk.reading.acquire()
        other, _ = await answer(system, "b", TEXTS, mode="full", max_tokens=12)
        assert other
        assert not stalled.done()
        disk.reads.set()
        text, end = await stalled
        assert (text, end.usage.chunk_hits) == (full, 4)
        await until_quiet(system)


async def test_requests_that_share_chunks_share_what_is_stored_and_read(tiny_model_path: Path, tmp_path: Path) -> None:
    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path) as system:
        await store_all(system, tmp_path)
        assert system.store_stats().chunks == 5
        ends = await asyncio.gather(*(answer(system, f"r{n}", SHUFFLED) for n in range(4)))
        assert [end.usage.chunk_hits for _, end in ends] == [4] * 4
        layers = system._engine.config.num_layers
        assert system.store_stats().layers_read == 5 * layers
        assert system.store_stats().chunks == 5


@pytest.mark.parametrize("name", ["scheduler", "loader", "blender"])
async def test_an_ingest_ends_once_whoever_crashes_and_can_be_repeated(tiny_model_path: Path, name: str) -> None:
    async with running(tiny_model_path) as system:
        stream = await system.submit(request("i", TEXTS, "", generate=False))
        getattr(system._troupe, name).tell_nowait(NONSENSE, "system")
        events = [event async for event in stream]
        assert isinstance(events[0], Accepted)
        assert sum(isinstance(event, Failed | Finished) for event in events) == 1
        assert all(isinstance(event, Accepted | IngestProgress | Failed | Finished) for event in events)
        _, end = await answer(system, "i", TEXTS, "", generate=False)
        assert len(end.chunks) == 4
        await until_quiet(system)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_storm_of_clients_cancels_and_crashes_ends_every_request_once(
    tiny_model_path: Path, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)

    async def client(system: System, number: int) -> int:
        changes: dict[str, Any] = {"on_miss": chance.choice(("fresh", "precompute"))}
        texts, question = chance.sample(TEXTS, chance.randint(1, 4)), "what?"
        if number % 5 == 0:
            question, changes = "", {"generate": False}
        await asyncio.sleep(chance.random() * 0.2)
        while True:
            try:
                stream = await system.submit(request(f"r{number % 7}-{number}", texts, question, **changes))
                break
            except RequestError as error:
                if error.code != "overloaded":
                    raise
                await asyncio.sleep(0.01)
        if number % 4 == 1:
            await asyncio.sleep(chance.random() * 0.05)
            system.cancel_nowait(stream.request_id)
        return sum([isinstance(event, Finished | Failed) async for event in stream])

    disk = GatedDisk()
    async with running_on(disk, tiny_model_path, tmp_path, max_num_seqs=4, kv_tokens_max=4096) as system:
        clients = [asyncio.create_task(client(system, number)) for number in range(30)]
        for name in chance.sample(("scheduler", "loader", "blender", "loader", "blender"), 5):
            await asyncio.sleep(chance.random() * 0.1)
            if getattr(system._troupe, name).alive:
                getattr(system._troupe, name).tell_nowait(NONSENSE, chance.choice(("user", "system")))
        assert await asyncio.gather(*clients) == [1] * 30
        await until_quiet(system)
