"""The running system: three actors, one device thread, one store, and the streams of all accepted requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kvblend.actors.core import events as ev
from kvblend.actors.core.events import Job
from kvblend.actors.errors import RequestError
from kvblend.actors.gate import ServingGate
from kvblend.actors.ingest import IngestRun
from kvblend.actors.library import Library
from kvblend.actors.messages import Accepted, Failed, Generate
from kvblend.actors.open_requests import OpenRequests
from kvblend.actors.precision import StoreForm, choose_store_form, keep_check
from kvblend.actors.profiling import PrefillSpeed, profile_prefill
from kvblend.actors.requests import JobBuilder, check_request
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.runtime.freed_memory import keep_freed_memory
from kvblend.actors.runtime.mailbox import MailboxClosed, MailboxFull
from kvblend.actors.selection import check_settings_for
from kvblend.actors.settings import Settings, tenant_salt
from kvblend.actors.signals import WhenIdle
from kvblend.actors.stores import check_remote, open_store, stored_shape
from kvblend.actors.streams import TokenStream
from kvblend.actors.troupe import Troupe
from kvblend.engine.assembly import Engine, assemble_engine
from kvblend.store.files import DiskIO
from kvblend.store.stats import StoreStats
from kvblend.store.store import ChunkStore

T = TypeVar("T")
log = logging.getLogger("kvblend.system")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests are taken, and why not, or why they are answered in a worse way."""

    ok: bool
    reasons: tuple[str, ...]
    details: dict[str, object] = field(default_factory=dict)


class System:
    """Takes requests, answers with streams. Make it with `start`, end it with `close`, all on one loop.

    Every accepted request's stream ends with exactly one terminal event, whatever crashes.
    """

    def __init__(
        self,
        settings: Settings,
        model: str,
        engine: Engine,
        device: DeviceThread,
        store: ChunkStore,
        form: StoreForm | None = None,
        profile: PrefillSpeed | None = None,
    ) -> None:
        """Use `start`."""
        self.settings = settings
        self.model = model
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._device = device
        self._store = store
        self.library = Library(store, settings.salt)
        self._form = form or StoreForm(engine.stored, "set")
        self._jobs = JobBuilder(settings, engine)
        self._gate = ServingGate(settings, engine, device)
        self._open = OpenRequests(lambda name: self._cancel(name, "the client went away", deadline=False))
        self._ingests: dict[str, asyncio.Task[None]] = {}
        self._endings: dict[str, tuple[str, bool]] = {}
        self._draining = self._closed = False
        self._prompts = ThreadPoolExecutor(2, thread_name_prefix="kvblend-prompt")
        push, lost = self._open.push_of_job, self._open.fail_all
        self._troupe = Troupe(settings, engine, device, store, push, lost, self._gate.bounds, profile)
        self._troupe.fatal.add_done_callback(self._give_up)
        self._gate.start()

    @classmethod
    async def start(cls, settings: Settings, model_path: Path, model_name: str, io: DiskIO | None = None) -> System:
        """Load the model, open the store (on `io` in place of the local file system), start the actors.

        Raises what loaders raise for a bad model (ValueError), StoreUnusable, RequestError for a remote tier's bad URL.
        """
        check_remote(settings)
        keep_freed_memory(wanted=settings.keep_freed_memory)
        device = DeviceThread(capacity=8 * settings.max_num_seqs + 64)
        await device.start()
        store = None
        try:
            engine = await device.submit(
                assemble_engine,
                model_path,
                settings.dtype,
                settings.device,
                settings.attention,
                settings.kv_tokens_max,
                settings.threads,
                lambda config: check_settings_for(settings, config.num_layers),
            )
            form = await choose_store_form(settings, engine, device)
            engine = await device.submit(engine.storing, form.dtype)
            store = await open_store(settings, stored_shape(engine), engine.store_fingerprint, io)
            profile = await device.submit(profile_prefill, settings, engine)
            await asyncio.to_thread(keep_check, settings, engine, form)
            log.info("attention: %s; chunks are stored as %s: %s", engine.attention, form.dtype, form.reason)
            return cls(settings, model_name, engine, device, store, form, profile)
        except BaseException:
            if store is not None:
                await store.close()
            await device.close()
            raise

    async def submit(self, request: Generate) -> TokenStream:
        """Check a request and take it; the stream's first event is `Accepted`.

        Raises RequestError before anything is accepted. Cancelled, it leaves nothing behind.
        """
        self._check_open(request.request_id)
        check_request(request, self.settings, self.model)
        request, note = await self._gate.admit(request)
        self._check_open(request.request_id)
        stored = await self._stored_ids(request)
        job_id = self._open.new_job_id(request.request_id)
        if request.generate:
            numbered = replace(request, request_id=job_id)
            jobs = [await self._off_loop(lambda: self._jobs.answer(numbered, stored, note))]
            self._troupe.check_deadline(jobs[0])
        else:
            # no request can have an id that begins like these
            names = [self._open.new_job_id(f"/{job_id}/{index}") for index in range(len(request.documents))]
            jobs = await self._off_loop(lambda: self._jobs.stores(request, stored, names))
        self._check_open(request.request_id)
        stream = self._open.open(job_id)
        stream.push_nowait(Accepted(request.request_id, self.model))
        if request.generate:
            self._post(jobs[0])
        else:
            self._run_ingest(job_id, jobs)
        if request.deadline_ms is not None:
            self._arm(request.request_id, request.deadline_ms)
        return stream

    def cancel_nowait(self, request_id: str, detail: str = "cancelled by the client") -> None:
        """End this request soon with a terminal event; ids that are unknown or have ended are ignored."""
        self._cancel(request_id, detail, deadline=False)

    def ready(self) -> Readiness:
        """The state now, with figures of the store, the actors and the model."""
        reasons = []
        if self._gate.state == "running":
            reasons.append("gate running: the model is being judged before it is served")
        if self._draining or self._closed:
            reasons.append("draining: no new requests are taken")
        if self.fatal.done():
            reasons.append("an actor failed too often")
        details = {
            "model": self.model,
            "attention": self._engine.attention,
            "store_dtype": {"dtype": self._form.dtype, "reason": self._form.reason},
            "requests": len(self._open),
            **self.library.details(),
            "gate": self._gate.figures(),
            **self._troupe.figures(),
        }
        # a model that failed is served all the same, by full prefill
        failures = tuple(f"gate failed: {reason}" for reason in self._gate.reasons)
        return Readiness(not reasons, (*reasons, *failures), details)

    def figures(self) -> dict[str, dict[str, float]]:
        """Numbers of the engine, the actors and the store, for metrics."""
        return {**self._troupe.numbers(), "store": self.library.figures()}

    def store_stats(self) -> StoreStats:
        """Figures of the chunk store."""
        return self._store.stats()

    def evict_host_nowait(self, chunk_id: str) -> bool:
        """Take a chunk out of host memory (not off the disk); False where it is not there or in use."""
        return self._store.evict_nowait(chunk_id, self.settings.salt)

    def story(self, request_id: str) -> str:
        """What the scheduler saw of one request, an event a line."""
        return self._troupe.story(request_id)

    async def settle(self, deadline_s: float = 600.0) -> None:
        """Wait until nothing is queued, running or being stored. Raises AskTimeout."""
        await self._troupe.scheduler.ask(WhenIdle, deadline_s)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; let what runs finish for `grace_s` seconds, then cancel it."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._open.until_quiet()
        except TimeoutError:
            for request_id in self._open.ids():
                self.cancel_nowait(request_id, "the server is shutting down")
            async with asyncio.timeout(grace_s + 60.0):
                await self._open.until_quiet()

    async def close(self) -> None:
        """Cancel what runs, stop the actors, close the store and the device. Idempotent."""
        if self._closed:
            return
        self._closed = self._draining = True
        await self._gate.close()
        for ingest in self._ingests.values():
            ingest.cancel()
        await asyncio.gather(*self._ingests.values(), return_exceptions=True)
        await self._troupe.close()
        self._open.fail_all("the system was closed")
        await self._device.close()
        await self._store.close()
        await asyncio.get_running_loop().run_in_executor(None, self._prompts.shutdown)

    def _give_up(self, cause: asyncio.Future[BaseException]) -> None:
        self._open.fail_all(f"the system failed: {cause.result()}" if not cause.cancelled() else "the system failed")
        if not self.fatal.done():
            self.fatal.set_result(None)

    # ---- intake ----

    def _check_open(self, request_id: str) -> None:
        if self._draining or self._closed or self.fatal.done():
            raise RequestError("overloaded", "the server takes no new requests: it is shutting down", retry_after_s=5.0)
        if request_id in self._open:
            raise RequestError("invalid_request", f"request id {request_id!r} is in use", "request_id")
        if len(self._open) >= self.settings.queue_requests_max:
            limit = self.settings.queue_requests_max
            raise RequestError("overloaded", f"{limit} requests are waiting or running; try later", retry_after_s=1.0)

    async def _stored_ids(self, request: Generate) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        salt = tenant_salt(self.settings.salt, request.tenant)
        for index, document in enumerate(request.documents):
            if document.id is None:
                continue
            ids = await self._store.token_ids(document.id, salt)
            if ids is None:
                param = f"documents[{index}].id"
                raise RequestError("not_found", f"{param} is {document.id[:80]!r}; there is no such chunk", param)
            found[index] = ids
        return found

    async def _off_loop(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._prompts, function)

    def _post(self, job: Job) -> None:
        try:
            self._troupe.scheduler.tell_nowait(ev.Submitted(job, time.monotonic()))
        except (MailboxFull, MailboxClosed) as error:
            text = f"the scheduler does not take the request: {error}"
            self._open.push_of_job(Failed(job.request_id, "overloaded", text))

    def _cancel(self, request_id: str, detail: str, deadline: bool) -> None:
        request = self._open.get(request_id)
        if request is None or request.cancelling:
            return
        request.cancelling = True
        if request.job_id in self._ingests:
            self._endings[request.job_id] = (detail, deadline)
            self._ingests[request.job_id].cancel()
            return
        try:
            self._troupe.scheduler.tell_nowait(ev.CancelRequested(request.job_id, detail, time.monotonic(), deadline))
        except (MailboxFull, MailboxClosed):
            log.warning("request %s could not be cancelled: the scheduler is not there", request_id)

    def _arm(self, request_id: str, deadline_ms: float) -> None:
        detail = f"not finished within deadline_ms {deadline_ms:g}"
        self._open.arm(request_id, deadline_ms / 1e3, lambda: self._cancel(request_id, detail, deadline=True))

    def _run_ingest(self, job_id: str, jobs: list[Job]) -> None:
        push = self._open.push_of_job
        run = IngestRun(job_id, jobs, self.settings.max_num_seqs, self._open.open, self._post, push)
        task = asyncio.get_running_loop().create_task(run.run(), name=f"ingest {job_id}")
        self._ingests[job_id] = task

        def end(done: asyncio.Task[None]) -> None:
            # not in the task itself: cancelled before its first step, it would never get there
            del self._ingests[job_id]
            detail, deadline = self._endings.pop(job_id, ("the system was closed", False))
            if done.cancelled():
                push(run.ended_early(detail, deadline))
            elif done.exception() is not None:
                log.error("ingest %s failed", job_id, exc_info=done.exception())
                push(Failed(job_id, "internal", f"storing failed: {done.exception()}"))

        task.add_done_callback(end)
