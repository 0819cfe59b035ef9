"""The device pool under random sequences of everything that can happen to it and to the chunks below."""

from __future__ import annotations

import asyncio

from core_driver import key_of
from device_pool_rig import CHUNKS, lease, pool_of, read, take
from hypothesis import given, settings
from hypothesis import strategies as st
from shell_rig import SHAPE, payloads

from kvblend.actors.device_pool import LayerLease

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "lease", "take", "take", "release", "put", "replace", "delete", "evict"]),
        st.integers(0, 40),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 3), st.sampled_from(["lru", "cost"]))
def test_whatever_happens_the_budget_holds_and_only_what_is_stored_is_served(
    steps: list[tuple[str, int]], chunks: int, policy: str
) -> None:
    asyncio.run(live(steps, chunks, policy))


async def live(steps: list[tuple[str, int]], chunks: int, policy: str) -> None:
    """Each lease reads what was stored when it was made, whatever became of the chunk since."""
    held: list[tuple[LayerLease, int]] = []
    async with pool_of(chunks, policy) as (pool, store):
        now = dict.fromkeys(CHUNKS, 1)
        for step, pick in steps:
            ids = CHUNKS[pick % len(CHUNKS)]
            key = key_of(ids)
            if step == "lease" and store.contains(key):
                held.append((await lease(pool, store, ids), now[ids]))
            elif step == "take" and held:
                one, value = held[pick % len(held)]
                layer = pick % SHAPE.num_layers
                got = take(one, layer)
                assert bytes(got if isinstance(got, memoryview) else got.tolist()) == bytes(payloads(4, value)[layer])
            elif step == "release" and held:
                held.pop(pick % len(held))[0].release()
            elif step in ("put", "replace"):
                if await store.put(key, ids, payloads(4, pick + 1), replace=step == "replace"):
                    now[ids] = pick + 1
            elif step == "delete":
                await store.delete(key.id)
            elif step == "evict":
                store.evict_nowait(key.id)
            pool.validate()
        for one, _ in held:
            one.release()
        pool.validate()
        assert pool.stats().pinned_bytes == 0
        for ids in CHUNKS:
            found = pool.lease(key_of(ids))
            if found is not None:
                assert store.contains(key_of(ids))
                assert read(found) == [bytes(layer) for layer in payloads(4, now[ids])]
                found.release()
