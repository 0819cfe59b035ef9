"""Storing many documents: a few at a time, progress, the first failure, and an early end."""

from __future__ import annotations

import asyncio

from core_driver import A, B, C, store

from kvblend.actors.core.events import Job
from kvblend.actors.ingest import IngestRun
from kvblend.actors.messages import Failed, Finished, IngestProgress, StoredChunk, StreamEvent, Usage
from kvblend.actors.streams import TokenStream

IDS = {"d0": A, "d1": B, "d2": C}


class World:
    """Streams by job id, posted jobs and what the run emitted. Nothing ends by itself."""

    def __init__(self, at_once: int = 8) -> None:
        self.streams: dict[str, TokenStream] = {}
        self.posted: asyncio.Queue[str] = asyncio.Queue()
        self.emitted: list[StreamEvent] = []
        self.news = asyncio.Event()
        self.abandoned: list[str] = []
        jobs = [store(name, ids) for name, ids in IDS.items()]
        self.run = IngestRun("i#1", jobs, at_once, self.open, self.post, self.emit)

    def open(self, name: str) -> TokenStream:
        self.streams[name] = TokenStream(name, self.abandoned.append)
        return self.streams[name]

    def post(self, job: Job) -> None:
        self.posted.put_nowait(job.request_id)

    async def wait_posted(self, count: int) -> list[str]:
        return [await self.posted.get() for _ in range(count)]

    def store(self, name: str, created: bool = True) -> None:
        chunk = StoredChunk(f"id of {name}", len(IDS[name]), created)
        self.streams[name].push_nowait(Finished(name, "stop", Usage(), chunks=(chunk,)))

    def emit(self, event: StreamEvent) -> None:
        self.emitted.append(event)
        self.news.set()


async def stored(*names: str) -> tuple[World, asyncio.Task[None]]:
    """A run in which all jobs are posted and these documents are stored already."""
    world = World()
    task = asyncio.create_task(world.run.run())
    await world.wait_posted(3)
    for name in names:
        world.news.clear()
        world.store(name)
        await world.news.wait()
    return world, task


async def test_no_more_jobs_are_posted_at_a_time_than_may() -> None:
    world = World(at_once=2)
    task = asyncio.create_task(world.run.run())
    assert await world.wait_posted(2) == ["d0", "d1"]
    assert world.posted.empty()
    world.store("d1")
    assert await world.wait_posted(1) == ["d2"]
    world.store("d0")
    world.store("d2")
    await task


async def test_each_stored_document_is_progress_under_the_ingests_id() -> None:
    world, task = await stored("d2", "d0", "d1")
    await task
    assert world.emitted[:3] == [IngestProgress("i#1", done, 3) for done in (1, 2, 3)]


async def test_chunks_are_listed_in_the_order_of_the_documents() -> None:
    world, task = await stored("d2", "d0", "d1")
    await task
    end = world.emitted[-1]
    assert isinstance(end, Finished)
    assert [chunk.id for chunk in end.chunks] == ["id of d0", "id of d1", "id of d2"]


async def test_the_usage_counts_hits_misses_and_tokens() -> None:
    world, task = await stored("d0")
    world.store("d1", created=False)
    world.store("d2")
    await task
    end = world.emitted[-1]
    assert isinstance(end, Finished)
    usage = end.usage
    assert (usage.chunk_hits, usage.chunk_misses, usage.prompt_tokens) == (1, 2, len(A) + len(B) + len(C))


async def test_the_first_failure_ends_the_run_with_its_code() -> None:
    world, task = await stored("d0")
    world.streams["d1"].push_nowait(Failed("d1", "too_large", "it does not fit"))
    await task
    assert world.emitted[-1] == Failed("i#1", "too_large", "it does not fit")


async def test_a_failure_abandons_the_jobs_under_way() -> None:
    world, task = await stored("d0")
    world.streams["d1"].push_nowait(Failed("d1", "internal", "broken"))
    await task
    assert world.abandoned == ["d2"]


async def test_a_job_that_was_cancelled_fails_the_run_with_its_document() -> None:
    world, task = await stored("d0")
    chunk = StoredChunk("id of d2", 3, True)
    world.streams["d2"].push_nowait(Finished("d2", "cancelled", Usage(), (chunk,), "shutting down"))
    await task
    assert world.emitted[-1] == Failed("i#1", "internal", "document 2 was not stored: shutting down")


async def test_a_job_that_stored_nothing_fails_the_run() -> None:
    world, task = await stored("d0")
    world.streams["d1"].push_nowait(Finished("d1", "stop", Usage()))
    await task
    assert world.emitted[-1] == Failed("i#1", "internal", "document 1 was not stored: stop")


async def test_a_cancelled_run_abandons_its_jobs_and_emits_no_end() -> None:
    world, task = await stored("d1")
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), sorted(world.abandoned)) == (True, ["d0", "d2"])
    assert world.emitted == [IngestProgress("i#1", 1, 3)]


async def test_an_early_end_names_what_is_stored() -> None:
    world, task = await stored("d1")
    task.cancel()
    await asyncio.wait([task])
    end = world.run.ended_early("enough", deadline=False)
    assert isinstance(end, Finished)
    assert (end.reason, end.detail, [chunk.id for chunk in end.chunks]) == ("cancelled", "enough", ["id of d1"])


async def test_an_early_end_by_deadline_is_a_failure() -> None:
    assert World().run.ended_early("too slow", deadline=True) == Failed("i#1", "deadline_exceeded", "too slow")
