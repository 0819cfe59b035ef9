"""A whole system with a device pool on a pretended device: the same answers, nothing read for what the pool has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_pool_rig import new_block
from small_system import TEXTS, answer, request, running

from kvblend.actors import troupe
from kvblend.actors.device_pool import DevicePool
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Delta, Sampling
from kvblend.actors.settings import Settings
from kvblend.actors.system import System

SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])
SAMPLING = Sampling(max_tokens=8, temperature=0.0, logprobs=3)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[DevicePool]:
    """Systems get a pool on the CPU, which settings refuse; the pools that were made."""
    pools: list[DevicePool] = []

    def make(_settings: Settings, _engine: Any, store: Any) -> DevicePool:
        pools.append(DevicePool(store, 1 << 24, new_block))
        return pools[-1]

    monkeypatch.setattr(troupe, "make_device_pool", make)
    return pools


def evict_all(system: System, folder: Path) -> None:
    """Nothing is left in host memory."""
    for path in folder.rglob("*.kvc"):
        system.evict_host_nowait(path.stem)


async def answers(system: System, **options: Any) -> list[tuple[str, list[Any]]]:
    """Text and log-probabilities of the same question twice, cold and hot."""
    found = []
    for name in ("cold", "hot"):
        stream = await system.submit(_request(name, **options))
        deltas = [event async for event in stream if isinstance(event, Delta)]
        found.append(("".join(delta.text for delta in deltas), [one for delta in deltas for one in delta.logprobs]))
        assert len(found[-1][1]) == SAMPLING.max_tokens
    return found


def _request(name: str, **options: Any) -> Any:
    return request(name, SHUFFLED, sampling=SAMPLING, **options)


@pytest.mark.parametrize("store_dtype", ["float32", "bfloat16", "int8"])
async def test_answers_are_the_same_to_the_last_bit(
    tiny_model_path: Path, tmp_path: Path, store_dtype: str, pretended: list[DevicePool], monkeypatch: Any
) -> None:
    settings = {"store": tmp_path / "s", "store_dtype": store_dtype, "conditioning": "warm", "recompute_ratio": 0.3}
    with monkeypatch.context() as patch:
        patch.setattr(troupe, "make_device_pool", lambda *_: None)
        async with running(tiny_model_path, **settings) as system:
            # the second one still brings a variant of its own: what stands first is exact there
            for name, texts in (("a", TEXTS), ("b", SHUFFLED)):
                await answer(system, name, texts)
                await system.settle()
            plain = await answers(system)
    async with running(tiny_model_path, **settings) as system:
        pooled = await answers(system)
    assert pretended[0].stats().hits > 0
    assert pooled == plain
    assert plain[0][1] == plain[1][1]


async def test_a_hot_chunk_comes_from_the_pool_and_is_not_read(
    tiny_model_path: Path, tmp_path: Path, pretended: list[DevicePool]
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await answer(system, "a", TEXTS)
        await system.settle()
        evict_all(system, tmp_path / "s")
        _, cold = await answer(system, "b", SHUFFLED)
        evict_all(system, tmp_path / "s")
        before = system.store_stats()
        _, hot = await answer(system, "c", SHUFFLED)
        after = system.store_stats()
        (pool,) = pretended
        pool.validate()
        ready, numbers = system.ready().details["device_pool"], system.figures()["device_pool"]
    # four chunks, and the system prompt, which the first answers brought already
    assert (cold.usage.tiers, hot.usage.tiers) == ({"device_pool": 1, "disk": 4}, {"device_pool": 5})
    assert (after.layers_read, after.bytes_read, after.leases) == (before.layers_read, before.bytes_read, 0)
    assert (hot.usage.chunk_hits, hot.usage.chunk_misses) == (4, 0)
    assert isinstance(ready, dict)
    for found in (ready, numbers):
        assert (found["hits"], found["chunks"], found["evictions"]) == (6, 5, 0)
        assert 0 < found["num_bytes"] <= found["bytes_budget"]
        assert found["pinned_bytes"] == 0


async def test_a_deleted_chunk_is_a_miss(tiny_model_path: Path, tmp_path: Path, pretended: list[DevicePool]) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await answer(system, "a", TEXTS)
        await system.settle()
        await answer(system, "b", SHUFFLED)
        for path in (tmp_path / "s").rglob("*.kvc"):
            assert await system.library.delete(path.stem)
        assert pretended[0].stats().num_bytes == 0
        _, end = await answer(system, "c", SHUFFLED)
        await system.settle()
    assert (end.usage.chunk_hits, end.usage.chunk_misses) == (0, 4)


async def test_tenants_do_not_share_what_is_on_the_device(
    tiny_model_path: Path, tmp_path: Path, pretended: list[DevicePool]
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        for name in "ab":
            await answer(system, name, TEXTS, tenant="one")
            await system.settle()
        hits = pretended[0].stats().hits
        _, end = await answer(system, "c", TEXTS, tenant="two")
        await system.settle()
        assert pretended[0].stats().hits == hits
    assert (end.usage.chunk_hits, end.usage.chunk_misses) == (0, 4)


async def test_nothing_is_left_in_use_when_requests_are_cancelled(
    tiny_model_path: Path, tmp_path: Path, pretended: list[DevicePool]
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await answer(system, "a", TEXTS)
        await system.settle()
        streams = [await system.submit(_request(f"r{number}")) for number in range(6)]
        for number in range(0, 6, 2):
            system.cancel_nowait(f"r{number}")
        ends = [(await stream.result())[1].reason for stream in streams]
        await system.settle()
        await system.drain(5.0)
        pretended[0].validate()
        assert pretended[0].stats().pinned_bytes == 0
    assert ends[1::2] == ["length"] * 3


def test_a_cpu_has_no_device_pool() -> None:
    with pytest.raises(RequestError, match=r"device_pool_bytes is 4096; on device 'cpu' it must be 0") as caught:
        Settings(device_pool_bytes=4096)
    assert caught.value.param == "device_pool_bytes"
    assert Settings(device="cuda:1", device_pool_bytes=4096).device_pool_bytes == 4096


async def test_there_is_none_unless_asked_for(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        assert "device_pool" not in system.ready().details
        assert "device_pool" not in system.figures()


async def test_a_system_whose_device_cannot_have_it_does_not_start(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RequestError("invalid_request", "device_pool_bytes is too large", "device_pool_bytes")

    with monkeypatch.context() as patch:
        patch.setattr(troupe, "make_device_pool", refuse)
        with pytest.raises(RequestError, match="too large"):
            async with running(tiny_model_path, store=tmp_path / "s"):
                pass
    # the folder is free again
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        assert system.ready().ok
