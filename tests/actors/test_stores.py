"""Systems that share chunks through a remote tier on a real server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from redis_server import RedisServer
from small_system import TEXTS, answer, running

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.actors.stores import check_remote, open_store
from kvblend.actors.system import System
from kvblend.store.errors import StoreUnusable
from kvblend.store.format import KVShape

SHAPE = KVShape(1, 1, 1, "float32")
SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])


def remote_state(system: System) -> object:
    figures = system.ready().details["remote"]
    assert isinstance(figures, dict)
    return figures["state"]


async def test_a_second_server_serves_what_the_first_one_computed(
    tiny_model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with running(tiny_model_path, store=tmp_path / "a", remote=redis_server.url) as system:
        await answer(system, "a", TEXTS)
        await system.settle()
    async with running(tiny_model_path, store=tmp_path / "b", remote=redis_server.url) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=16)
        blended, end = await answer(system, "b", SHUFFLED, recompute_ratio=1.0, max_tokens=16)
        _, again = await answer(system, "c", SHUFFLED)
    assert end.usage.chunk_hits == 4
    assert end.usage.tiers.get("remote", 0) >= 3
    assert blended == full
    assert again.usage.tiers.get("remote", 0) == 0


async def test_servers_without_a_folder_share_chunks(tiny_model_path: Path, redis_server: RedisServer) -> None:
    async with running(tiny_model_path, remote=redis_server.url) as system:
        await answer(system, "a", TEXTS)
        await system.settle()
    async with running(tiny_model_path, remote=redis_server.url) as system:
        _, end = await answer(system, "b", SHUFFLED)
    assert end.usage.chunk_hits == 4


async def test_another_salt_finds_nothing(tiny_model_path: Path, redis_server: RedisServer) -> None:
    async with running(tiny_model_path, remote=redis_server.url, salt="one") as system:
        await answer(system, "a", TEXTS)
        await system.settle()
    async with running(tiny_model_path, remote=redis_server.url, salt="two") as system:
        _, end = await answer(system, "b", TEXTS)
    assert end.usage.chunk_hits == 0


@pytest.mark.parametrize("fault", ["cut_at", "stall_at", "flip_at"])
async def test_a_remote_tier_that_fails_while_chunks_load_fails_no_request(
    tiny_model_path: Path, tmp_path: Path, redis_server: RedisServer, fault: str
) -> None:
    async with running(tiny_model_path, store=tmp_path / "a", remote=redis_server.url) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=12)
        await answer(system, "a", TEXTS)
        await system.settle()
    async with (
        FaultProxy(redis_server.path) as proxy,
        running(tiny_model_path, store=tmp_path / "b", remote=proxy.url, remote_timeout_ms=150) as system,
    ):
        # behind the four headers of 4 KiB, within a layer
        setattr(proxy, fault, 4 * 4096 + 3000)
        blended, _ = await answer(system, "b", SHUFFLED, recompute_ratio=1.0, max_tokens=12)
        assert proxy.faulted.is_set()
    assert blended == full


async def test_a_server_that_is_not_there_stops_nothing(
    tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"unix://:hunter2@{tmp_path}/nobody.sock"
    with caplog.at_level(logging.WARNING):
        async with running(tiny_model_path, store=tmp_path / "s", remote=url) as system:
            await answer(system, "a", TEXTS)
            await system.settle()
            _, end = await answer(system, "b", SHUFFLED)
            state = remote_state(system)
    assert end.usage.chunk_hits == 4
    assert state == "down"
    told = [record.getMessage() for record in caplog.records if "remote tier" in record.getMessage()]
    assert len(told) == 1
    assert "hunter2" not in caplog.text


async def test_readiness_shows_the_remote_tier(tiny_model_path: Path, redis_server: RedisServer) -> None:
    async with running(tiny_model_path, remote=redis_server.url) as system:
        await answer(system, "a", TEXTS[:1])
        await system.settle()
        assert remote_state(system) == "up"


async def test_without_a_remote_tier_there_is_none(tiny_model_path: Path) -> None:
    async with running(tiny_model_path) as system:
        assert "remote" not in system.ready().details


@pytest.mark.parametrize("url", ["redis://h:port", "redis://user:hunter2/@h", "unix://x", "redis://h?timeout=3"])
def test_a_url_that_cannot_be_used_is_an_error_that_names_the_setting(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_remote(Settings(remote=url))
    assert caught.value.param == "remote"
    assert "hunter2" not in caught.value.message


def test_no_remote_tier_is_no_error() -> None:
    check_remote(Settings())


async def test_a_store_that_cannot_be_opened_leaves_no_remote_tier_behind(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnusable):
        await open_store(Settings(store=tmp_path / "file", remote="redis://127.0.0.1:1"), SHAPE, "model")


async def test_limits_reach_the_store(tmp_path: Path) -> None:
    settings = Settings(
        store=tmp_path, disk_bytes_budget=1 << 20, tenant_bytes_max=1 << 19, host_policy="cost", disk_policy="lru"
    )
    async with await open_store(settings, SHAPE, "model-a") as store:
        limits, stats = store.limits, store.stats()
    assert (limits.host_policy, limits.disk_policy) == ("cost", "lru")
    assert (stats.disk_bytes_budget, stats.tenant_bytes_max) == (1 << 20, 1 << 19)


async def test_more_memory_than_the_machine_has_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(RequestError, match="host_bytes_budget is 1125899906842624; this machine has") as caught:
        await open_store(Settings(host_bytes_budget=1 << 50), SHAPE, "model-a")
    assert caught.value.param == "host_bytes_budget"
