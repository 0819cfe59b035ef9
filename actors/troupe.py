"""The three actors and their supervisor: who is made how, and what a crash of one means for the others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvblend.actors.blender import Blender
from kvblend.actors.bounds import KLBounds
from kvblend.actors.core import events as ev
from kvblend.actors.core.jobs import Job
from kvblend.actors.core.limits import Limits
from kvblend.actors.core.scheduler import SchedulerState
from kvblend.actors.device_pool import make_device_pool
from kvblend.actors.errors import RequestError
from kvblend.actors.loader import Loader
from kvblend.actors.messages import StreamEvent
from kvblend.actors.profiling import PrefillSpeed
from kvblend.actors.requests import server_conditioning
from kvblend.actors.runtime.actor import ActorRef
from kvblend.actors.runtime.device_thread import DeviceThread
from kvblend.actors.runtime.mailbox import MailboxClosed
from kvblend.actors.runtime.supervisor import Supervisor
from kvblend.actors.scheduler import Scheduler
from kvblend.actors.settings import Settings
from kvblend.actors.signals import BlenderMessage, LoaderMessage, SchedulerMessage
from kvblend.actors.specs import SpecBuilder
from kvblend.actors.tables import SideTables
from kvblend.engine.assembly import Engine
from kvblend.engine.kv import PAGE_TOKENS, pages_of
from kvblend.store.store import ChunkStore

log = logging.getLogger("kvblend.actors")
PROBE_S = 0.05
"""How long the speed of each lower tier is looked at when the loader starts."""


class Troupe:
    """Scheduler, loader and blender under one supervisor.

    A crashed loader or blender fails what it held (the scheduler is told); a crashed scheduler fails every request
    (`lost` is called with the reason), and the next one resets the other two.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        device: DeviceThread,
        store: ChunkStore,
        emit: Callable[[StreamEvent], None],
        lost: Callable[[str], None],
        bounds: KLBounds | None = None,
        profile: PrefillSpeed | None = None,
    ) -> None:
        """`profile` is how fast the engine computes, as measured before; None: the first requests tell.

        Raises RequestError for a device pool that the device cannot have.
        """
        self._device_pool = pool = make_device_pool(settings, engine, store)
        self._lost = lost
        self._profile = profile
        self._check = settings.debug
        self._limits = Limits(
            pages=pages_of(settings.kv_tokens_max),
            page_tokens=PAGE_TOKENS,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            blend_min_tokens=settings.blend_min_tokens,
            conditioning=server_conditioning(settings, engine),
            num_layers=engine.config.num_layers,
            layer_token_bytes=store.shape.layer_bytes(1),
            lookahead_requests_max=settings.lookahead_requests_max,
            ratio_floor=settings.ratio_floor,
            computes_slow_loads=settings.slow_loads == "compute",
            itl_ms_max=settings.itl_ms_max or None,
            policy=settings.policy,
            ratio_lever_floor=settings.ratio_lever_floor,
            kept_pages_max=min(settings.kept_tokens_max, settings.kv_tokens_max) // PAGE_TOKENS,
        )
        self._numbers = itertools.count(1)
        self._tables = SideTables()
        self._state = self._new_state()
        self._supervisor = Supervisor(self._crashed)
        specs = SpecBuilder(settings, engine.tokenizer, bounds)
        tables, runner = self._tables, engine.runner
        # every request has at most a submit and a cancel on their way, so has every document that is being stored
        requests = 4 * settings.queue_requests_max + 4 * settings.documents_max + 64
        # and every sequence a look-up, a layer, a failure and some writes
        feedback = 8 * settings.max_num_seqs + 1024
        self.scheduler: ActorRef[SchedulerMessage] = self._supervisor.spawn(
            lambda: self._new_scheduler(emit), requests, "scheduler", feedback
        )
        self.blender: ActorRef[BlenderMessage] = self._supervisor.spawn(
            lambda: Blender(runner, device, specs, tables, self.scheduler), 256, "blender"
        )
        self.loader: ActorRef[LoaderMessage] = self._supervisor.spawn(
            lambda: Loader(
                store,
                tables,
                self.scheduler,
                self.blender,
                settings.prefetch_layers_max,
                ahead_bytes_max=settings.host_bytes_budget // 4,
                probe_s=PROBE_S,
                pool=pool,
            ),
            256,
            "loader",
        )

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """Resolves when an actor crashed past its restart limit and everything has ended."""
        return self._supervisor.fatal

    def figures(self) -> dict[str, object]:
        """Queue, KV slots, actors and the device pool where there is one, for `/ready`."""
        state = self._state
        kept = state.continuing.kept.pages
        return {
            "jobs": len(state.entries),
            "sequences": state.num_running,
            "kv_tokens_used": (state.pages_used - kept) * PAGE_TOKENS,
            "kv_tokens_kept": kept * PAGE_TOKENS,
            "parity_failures": state.parity_failures,
            "actors": {name: _plain(figures) for name, figures in self._supervisor.statistics().items()},
            **({} if self._device_pool is None else {"device_pool": asdict(self._device_pool.stats())}),
        }

    def numbers(self) -> dict[str, dict[str, float]]:
        """What runs and waits (`engine`), each actor's mailbox depth and restarts (`actors`: `name.depth`), and the
        figures of the device pool where there is one (`device_pool`).
        """
        state = self._state
        running, kept = state.num_running, state.continuing.kept.pages
        engine: dict[str, float] = {
            "num_requests_running": running,
            "num_requests_waiting": len(state.entries) - running,
            "kv_tokens_used": (state.pages_used - kept) * PAGE_TOKENS,
            "kv_tokens_kept": kept * PAGE_TOKENS,
        }
        if state.lever.floor is not None:
            engine["ratio_lever"] = state.lever.level
        actors: dict[str, float] = {}
        for name, actor in self._supervisor.statistics().items():
            actors[f"{name}.depth"] = actor.mailbox.depth + actor.mailbox.system_depth
            actors[f"{name}.restarts"] = actor.restarts
        pool = {} if self._device_pool is None else {"device_pool": asdict(self._device_pool.stats())}
        return {"engine": engine, "actors": actors, **pool}

    def check_deadline(self, job: Job) -> None:
        """Raise RequestError where this job's deadline would pass before its last token."""
        late = self._state.admission.refusal(job, time.monotonic())
        if late is not None:
            raise RequestError("overloaded", late.message, "deadline_ms", retry_after_s=late.retry_after_s)

    def story(self, request_id: str) -> str:
        """What the scheduler saw of one request."""
        return self._state.story(request_id)

    async def close(self) -> None:
        """Stop all three."""
        await self._supervisor.close()

    def _new_state(self) -> SchedulerState:
        state = SchedulerState(self._limits, lambda: next(self._numbers))
        if self._profile is not None:
            state.controller.compute.profile(*self._profile)
        return state

    def _new_scheduler(self, emit: Callable[[StreamEvent], None]) -> Scheduler:
        self._state = self._new_state()
        return Scheduler(self._state, lambda: self.loader, lambda: self.blender, emit, check=self._check)

    def _crashed(self, name: str, error: BaseException, dropped: tuple[Any, ...]) -> None:
        if name == "scheduler":
            self._lost(f"the scheduler failed and was restarted: {type(error).__name__}")
        elif name in ("loader", "blender"):
            crash = ev.PeerCrashed("loader" if name == "loader" else "blender", time.monotonic())
            try:
                self.scheduler.tell_nowait(crash, "system")
            except MailboxClosed:
                log.warning("the scheduler was not there to hear of a crash of the %s", name)


def _plain(figures: Any) -> dict[str, object]:
    return {key: value for key, value in asdict(figures).items() if isinstance(value, int | float | str)}
