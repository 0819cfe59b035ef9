"""The loader on a real store: leases, layers in order, captured chunks, and requests that go away meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from core_driver import SYSTEM, A, B, generate, key_of
from recorder import Stage, open_stage

from kvblend.actors.core import events as ev
from kvblend.actors.loader import Loader
from kvblend.actors.signals import LayerLoaded, Reset
from kvblend.actors.tables import SideTables
from kvblend.store.errors import ChunkDamaged
from kvblend.store.format import KVShape
from kvblend.store.lease import ChunkLease
from kvblend.store.store import ChunkStore

SHAPE = KVShape(3, 1, 2, "float32")
JOB = generate("r", A, B)


def payloads(ids: tuple[int, ...], mark: int = 7) -> list[memoryview]:
    """One payload per layer; each byte of layer n is `mark + n`."""
    return [memoryview(bytearray([mark + n] * SHAPE.layer_bytes(len(ids)))) for n in range(SHAPE.num_layers)]


class World:
    """A loader between two recorders, and a store in memory that knows the system prompt and both chunks."""

    def __init__(self, stage: Stage, store: ChunkStore) -> None:
        self.stage, self.store, self.tables = stage, store, SideTables()
        scheduler, blender = stage.listen("scheduler"), stage.listen("blender")
        self.loader = stage.play("loader", lambda: Loader(store, self.tables, scheduler, blender, 2))
        self.syncs = 0

    async def tell(self, *messages: Any) -> None:
        for message in messages:
            await self.loader.tell(message)

    async def hear(self, kind: type[Any]) -> Any:
        return await self.stage.hear("scheduler", kind)

    async def handled(self) -> list[Any]:
        """Wait until all that was told is handled; what the scheduler heard meanwhile."""
        self.syncs += 1
        name = f"sync {self.syncs}"
        await self.tell(ev.StoreSegment(name, 0, key_of(A), A))
        return await self.stage.hear_until(
            "scheduler", lambda message: isinstance(message, ev.Stored) and message.request_id == name
        )

    async def look_up(self) -> ev.LookedUp:
        await self.tell(ev.Lookup(JOB))
        found = await self.hear(ev.LookedUp)
        assert isinstance(found, ev.LookedUp)
        return found


@asynccontextmanager
async def open_world(budget: int = 1 << 20, filled: bool = True) -> AsyncIterator[World]:
    async with await ChunkStore.open(None, SHAPE, "m", budget) as store:
        if filled:
            await store.put(key_of(SYSTEM, ()), SYSTEM, payloads(SYSTEM, 1))
            await store.put(key_of(A), A, payloads(A, 11))
            await store.put(key_of(B), B, payloads(B, 21))
        async with open_stage() as stage:
            world = World(stage, store)
            await world.handled()  # it has started: that clears the table of captured chunks
            yield world


async def test_a_look_up_leases_what_is_stored_and_says_whether_it_is_exact() -> None:
    async with open_world() as world:
        found = await world.look_up()
        assert found.hits == (ev.Hit(0, True, "host"), ev.Hit(1, True, "host"), ev.Hit(2, False, "host"))
        assert world.store.stats().leases == 3


async def test_the_first_key_that_is_stored_is_taken_and_no_other() -> None:
    async with open_world() as world:
        await world.store.put(key_of(B, (*SYSTEM, *A)), B, payloads(B))
        found = await world.look_up()
        assert found.hits[2:] == (ev.Hit(2, True, "host"),)


async def test_what_is_not_stored_is_no_hit() -> None:
    async with open_world(filled=False) as world:
        assert (await world.look_up()).hits == ()


async def test_layers_come_in_order() -> None:
    async with open_world() as world:
        await world.look_up()
        await world.tell(ev.StartLoading("r", (0, 1, 2)))
        heard = [await world.stage.hear("blender", LayerLoaded) for _ in range(3)]
        assert heard == [LayerLoaded("r", layer) for layer in range(3)]


async def test_a_layer_lies_in_the_table_before_the_blender_hears_of_it() -> None:
    async with open_world() as world:
        await world.look_up()
        await world.tell(ev.StartLoading("r", (1, 2)))
        await world.stage.hear("blender", LayerLoaded)
        parts = world.tables.layers["r"].take(0)
        assert parts is not None
        assert [(start, bytes(part)[0]) for start, part in parts] == [(len(SYSTEM), 11), (len(SYSTEM) + len(A), 21)]


async def test_leases_of_segments_that_are_not_used_close_at_once() -> None:
    async with open_world() as world:
        await world.look_up()
        await world.tell(ev.StartLoading("r", (0,)))
        await world.handled()
        assert world.store.stats().leases == 1


@pytest.mark.parametrize("message", [ev.Release("r"), Reset()])
async def test_leases_close_and_layers_go_with_a_release(message: ev.Release | Reset) -> None:
    async with open_world() as world:
        await world.look_up()
        await world.tell(ev.StartLoading("r", (0, 1, 2)))
        await world.stage.hear("blender", LayerLoaded)
        await world.tell(message)
        await world.handled()
        assert (world.store.stats().leases, world.tables.layers) == (0, {})


async def test_a_release_during_the_look_up_closes_its_leases_and_no_answer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_world() as world:
        entered, gate, lease = asyncio.Event(), asyncio.Event(), world.store.lease

        async def slow(*args: Any) -> ChunkLease | None:
            entered.set()
            await gate.wait()
            return await lease(*args)

        monkeypatch.setattr(world.store, "lease", slow)
        await world.tell(ev.Lookup(JOB))
        await entered.wait()
        await world.tell(ev.Release("r"))
        await world.handled()
        gate.set()
        assert await world.handled() == []
        assert world.store.stats().leases == 0


async def test_a_second_look_up_of_a_released_request_is_not_mixed_up_with_the_first() -> None:
    async with open_world() as world:
        await world.look_up()
        await world.tell(ev.Release("r"))
        await world.look_up()
        assert world.store.stats().leases == 3


async def test_a_damaged_layer_is_told_once_and_nothing_more_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def damaged(leases: list[ChunkLease], _: range) -> list[ChunkDamaged]:
        return [ChunkDamaged("flipped bits") for _ in leases]

    async with open_world() as world:
        await world.look_up()
        monkeypatch.setattr("kvblend.actors.loader.prefetch_all", damaged)
        monkeypatch.setattr(ChunkLease, "layer_nowait", lambda *_: None)
        await world.tell(ev.StartLoading("r", (0, 1)))
        heard = await world.hear(ev.LoadFailed)
        assert (heard.request_id, heard.reason) == ("r", "flipped bits")
        assert await world.handled() == []
        assert world.stage.heard["blender"].empty()


async def test_a_request_loads_anew_while_a_read_of_its_last_load_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = asyncio.Event(), asyncio.Event()

    async def slow(leases: list[ChunkLease], _: range) -> list[None]:
        entered.set()
        await gate.wait()
        return [None for _ in leases]

    async with open_world() as world:
        await world.look_up()
        with monkeypatch.context() as patch:
            patch.setattr("kvblend.actors.loader.prefetch_all", slow)
            patch.setattr(ChunkLease, "layer_nowait", lambda *_: None)
            await world.tell(ev.StartLoading("r", (0,)))
            await entered.wait()
        await world.tell(ev.Release("r"))
        await world.look_up()
        await world.tell(ev.StartLoading("r", (0,)))
        assert await world.stage.hear("blender", LayerLoaded) == LayerLoaded("r", 0)
        gate.set()


async def test_payloads_leave_the_table_for_the_store() -> None:
    async with open_world(filled=False) as world:
        world.tables.captured["r", 1] = payloads(A)
        await world.tell(ev.StoreSegment("r", 1, key_of(A), A))
        await world.hear(ev.Stored)
        assert world.tables.captured == {}


async def test_captured_payloads_are_stored() -> None:
    async with open_world(filled=False) as world:
        world.tables.captured["r", 1] = payloads(A)
        await world.tell(ev.StoreSegment("r", 1, key_of(A), A))
        heard = await world.hear(ev.Stored)
        assert (heard.key, heard.created, heard.error) == (key_of(A), True, "")
        assert world.store.contains(key_of(A))


async def test_a_chunk_that_was_stored_meanwhile_is_not_created() -> None:
    async with open_world() as world:
        world.tables.captured["r", 1] = payloads(A)
        await world.tell(ev.StoreSegment("r", 1, key_of(A), A))
        heard = await world.hear(ev.Stored)
        assert (heard.created, heard.error) == (False, "")


async def test_a_release_right_behind_does_not_take_the_payloads_away() -> None:
    async with open_world(filled=False) as world:
        world.tables.captured["r", 1] = payloads(A)
        await world.tell(ev.StoreSegment("r", 1, key_of(A), A), ev.Release("r"))
        assert (await world.hear(ev.Stored)).created


async def test_a_release_drops_what_was_captured_and_not_asked_for() -> None:
    async with open_world() as world:
        world.tables.captured = {("r", 1): payloads(A), ("other", 1): payloads(A)}
        await world.tell(ev.Release("r"))
        await world.handled()
        assert list(world.tables.captured) == [("other", 1)]


async def test_payloads_that_are_gone_are_an_error_of_the_write() -> None:
    async with open_world() as world:
        await world.tell(ev.StoreSegment("r", 1, key_of(A), A))
        assert (await world.hear(ev.Stored)).error == "the captured KV is gone"


async def test_a_store_that_cannot_write_is_an_error_of_the_write() -> None:
    async with open_world(budget=1, filled=False) as world:
        world.tables.captured["r", 1] = payloads(A)
        await world.tell(ev.StoreSegment("r", 1, key_of(A), A))
        heard = await world.hear(ev.Stored)
        assert (heard.created, heard.error.startswith("not stored: ")) == (False, True)


async def test_a_fresh_loader_forgets_what_was_captured_for_the_last_one() -> None:
    async with open_world() as world:
        world.tables.captured["r", 1] = payloads(A)
        await world.tell("a message nobody knows")
        await world.stage.crashes.get()
        await world.handled()
        assert world.tables.captured == {}


async def test_all_leases_close_when_the_loader_stops() -> None:
    async with open_world() as world:
        await world.look_up()
        await world.stage.supervisor.close()
        assert world.store.stats().leases == 0


@pytest.mark.parametrize("replace", [True, False])
async def test_a_chunk_is_replaced_where_that_is_asked_for(replace: bool) -> None:
    async with open_world() as world:
        world.tables.captured[("r", 2)] = payloads(B, 90)
        await world.tell(ev.StoreSegment("r", 2, key_of(B), B, replace))
        stored = await world.hear(ev.Stored)
        lease = await world.store.lease(key_of(B), B)
        assert lease is not None
        kept = lease.layer_nowait(0)
        assert kept is not None
        assert (stored.created, stored.error, kept[0]) == (replace, "", 90 if replace else 21)
        lease.release()


async def test_chunks_that_are_wrong_are_deleted_though_they_are_leased(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world() as world:
        await world.look_up()
        await world.tell(ev.DropChunks("r", (2,), "wrong keys"), ev.DropChunks("nobody", (0,), ""), ev.Release("r"))
        await world.handled()
        assert not world.store.contains(key_of(B))
        assert world.store.contains(key_of(A))
        assert world.store.stats().leases == 0
    assert f"chunk {key_of(B).id} is dropped: wrong keys" in caplog.text
