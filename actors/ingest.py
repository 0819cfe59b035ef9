"""Storing many documents for one request: a job each, a few at a time, progress on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvblend.actors.core.events import Job
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Failed, Finished, IngestProgress, StoredChunk, StreamEvent, Usage
from kvblend.actors.streams import TokenStream


class IngestRun:
    """One ingest. `emit` gets its events, under `job_id`; each job's events come through the stream opened for it.

    Documents that are stored already count at once; the first failure ends the run.

    Cancelled, it abandons the jobs under way; what is durable stays.
    """

    def __init__(
        self,
        job_id: str,
        jobs: Sequence[Job],
        at_once: int,
        open_stream: Callable[[str], TokenStream],
        post: Callable[[Job], None],
        emit: Callable[[StreamEvent], None],
    ) -> None:
        self._job_id = job_id
        self._jobs = jobs
        self._limit = asyncio.Semaphore(max(1, at_once))
        self._open_stream = open_stream
        self._post = post
        self._emit = emit
        self._began_s = time.monotonic()
        self._chunks: dict[int, StoredChunk] = {}

    async def run(self) -> None:
        """Run all jobs; ends the request's stream unless it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, job in enumerate(self._jobs):
                    group.create_task(self._run_one(index, job))
        except* RequestError as errors:
            first = errors.exceptions[0]
            code = first.code if isinstance(first, RequestError) else "internal"
            self._emit(Failed(self._job_id, code, str(first)))
        else:
            self._emit(Finished(self._job_id, "stop", self._usage(), self._stored()))

    def ended_early(self, detail: str, deadline: bool) -> Finished | Failed:
        """The terminal event of a run that was cancelled; what was stored by then is named."""
        if deadline:
            return Failed(self._job_id, "deadline_exceeded", detail)
        return Finished(self._job_id, "cancelled", self._usage(), self._stored(), detail)

    def _stored(self) -> tuple[StoredChunk, ...]:
        return tuple(self._chunks[index] for index in sorted(self._chunks))

    async def _run_one(self, index: int, job: Job) -> None:
        async with self._limit:
            stream = self._open_stream(job.request_id)
            try:
                self._post(job)
                _, finished = await stream.result()
            finally:
                stream.abandon()
        if finished.reason != "stop" or not finished.chunks:
            raise RequestError("internal", f"document {index} was not stored: {finished.detail or finished.reason}")
        self._chunks[index] = finished.chunks[0]
        self._emit(IngestProgress(self._job_id, len(self._chunks), len(self._jobs)))

    def _usage(self) -> Usage:
        tokens = sum(chunk.tokens for chunk in self._chunks.values())
        created = sum(chunk.created for chunk in self._chunks.values())
        total_ms = 1e3 * (time.monotonic() - self._began_s)
        return Usage(
            prompt_tokens=tokens,
            chunk_hits=len(self._chunks) - created,
            chunk_misses=created,
            tokens_fresh=tokens,
            total_ms=total_ms,
            notes=tuple(self._jobs[index].note for index in sorted(self._chunks) if self._jobs[index].note),
        )
