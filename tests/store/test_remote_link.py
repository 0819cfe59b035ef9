from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fault_proxy import FaultProxy, GarbageServer
from redis_server import RedisServer
from remote_rig import SHORT_S

from kvblend.store.remote_address import RemoteAddress
from kvblend.store.remote_breaker import FAILURES_MAX, PAUSE_MIN_S
from kvblend.store.remote_link import READS_MAX, RedisLink, RemoteRefused, RemoteSkipped, RemoteUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


OpenLink = Callable[..., RedisLink]


@pytest.fixture
async def open_link() -> AsyncIterator[OpenLink]:
    links: list[RedisLink] = []

    def open_one(url: str, timeout_s: float = 5.0, clock: Clock | None = None) -> RedisLink:
        address = RemoteAddress.parse(url)
        links.append(RedisLink(address, timeout_s) if clock is None else RedisLink(address, timeout_s, clock))
        return links[-1]

    yield open_one
    for link in links:
        await link.close()


async def fails(work: Awaitable[object]) -> RemoteUnavailable:
    with pytest.raises(RemoteUnavailable) as caught:
        await work
    return caught.value


async def break_down(link: RedisLink) -> None:
    for _ in range(FAILURES_MAX):
        await fails(link.read("GET", "a"))


@pytest.mark.uvloop
async def test_a_command_is_answered_over_tcp(proxy: FaultProxy, open_link: OpenLink) -> None:
    link = open_link(proxy.url)
    assert await link.write([("SET", "a", memoryview(b"\x00\xff")), ("GET", "a")]) == [True, b"\x00\xff"]
    assert (await link.read("GET", "a")).value == b"\x00\xff"


async def test_a_command_is_answered_over_a_unix_socket(redis_server: RedisServer, open_link: OpenLink) -> None:
    assert (await open_link(redis_server.url).read("GET", "a")).value is None


async def test_nothing_is_contacted_before_the_first_command(proxy: FaultProxy, open_link: OpenLink) -> None:
    link = open_link(proxy.url)
    assert (proxy.connections, link.answered) == (0, False)
    await link.read("GET", "a")
    assert (proxy.connections, link.answered) == (1, True)


async def test_a_transaction_that_is_refused_changes_nothing(redis_server: RedisServer, open_link: OpenLink) -> None:
    with pytest.raises(RemoteRefused):
        await open_link(redis_server.url).write([("RENAME", "no", "key")], is_atomic=True)
    assert redis_server.keys() == []


async def test_a_wrong_type_is_a_refusal_and_the_server_counts_as_well(
    redis_server: RedisServer, open_link: OpenLink
) -> None:
    redis_server.call("SET", "a", "text")
    link = open_link(redis_server.url)
    for _ in range(2 * FAILURES_MAX):
        with pytest.raises(RemoteRefused, match="WRONGTYPE"):
            await link.read("HGET", "a", "field")
    assert not link.is_down


async def test_a_stalled_answer_ends_at_the_time_limit(proxy: FaultProxy, open_link: OpenLink) -> None:
    link = open_link(proxy.url, SHORT_S)
    proxy.stall_at = 0
    assert str(SHORT_S) in str(await fails(link.read("GET", "a")))


async def test_a_server_that_takes_no_connection_ends_at_the_time_limit(open_link: OpenLink) -> None:
    async with GarbageServer(b"") as silent:
        await fails(open_link(silent.url, SHORT_S).read("GET", "a"))


async def test_a_late_answer_never_goes_to_the_next_command(
    redis_server: RedisServer, proxy: FaultProxy, open_link: OpenLink
) -> None:
    redis_server.call("MSET", "a", "of a", "b", "of b")
    link = open_link(proxy.url, SHORT_S)
    proxy.stall_at = 2
    await fails(link.read("GET", "a"))
    proxy.heal()
    assert (await link.read("GET", "b")).value == b"of b"


async def test_a_cancelled_command_leaves_no_answer_behind(
    redis_server: RedisServer, proxy: FaultProxy, open_link: OpenLink
) -> None:
    redis_server.call("MSET", "a", "of a", "b", "of b")
    link = open_link(proxy.url)
    proxy.stall_at = 2
    task = asyncio.create_task(link.read("GET", "a"))
    await proxy.faulted.wait()
    task.cancel()
    await asyncio.wait({task})
    proxy.heal()
    assert (await link.read("GET", "b")).value == b"of b"


async def test_a_connection_that_was_closed_while_idle_is_no_failure(proxy: FaultProxy, open_link: OpenLink) -> None:
    link = open_link(proxy.url)
    await link.read("GET", "a")
    proxy.drop_connections()
    await link.read("GET", "a")
    assert proxy.connections == 2


async def test_reads_in_flight_are_bounded(proxy: FaultProxy, open_link: OpenLink) -> None:
    link = open_link(proxy.url)
    await asyncio.gather(*(link.read("GET", "a") for _ in range(10 * READS_MAX)))
    assert proxy.connections <= READS_MAX


async def test_a_failing_server_is_left_alone_with_one_warning(
    proxy: FaultProxy, open_link: OpenLink, caplog: pytest.LogCaptureFixture
) -> None:
    link = open_link(proxy.url, SHORT_S, Clock())
    proxy.stall_at = 0
    with caplog.at_level(logging.WARNING, "kvblend.store"):
        await break_down(link)
        tried = proxy.connections
        for _ in range(20):
            with pytest.raises(RemoteSkipped):
                await link.read("GET", "a")
    assert link.is_down
    assert proxy.connections == tried
    assert len(caplog.records) == 1


async def test_after_the_pause_it_is_asked_again(proxy: FaultProxy, open_link: OpenLink) -> None:
    clock = Clock()
    link = open_link(proxy.url, SHORT_S, clock)
    proxy.stall_at = 0
    await break_down(link)
    proxy.heal()
    clock.now += PAUSE_MIN_S
    await link.read("GET", "a")
    assert not link.is_down


async def test_a_cancelled_probe_is_followed_by_another(proxy: FaultProxy, open_link: OpenLink) -> None:
    clock = Clock()
    link = open_link(proxy.url, SHORT_S, clock)
    proxy.stall_at = 0
    await break_down(link)
    clock.now += PAUSE_MIN_S
    proxy.heal()
    proxy.stall_at = 0
    probe = asyncio.create_task(link.read("GET", "a"))
    await proxy.faulted.wait()
    probe.cancel()
    await asyncio.wait({probe})
    proxy.heal()
    await link.read("GET", "a")


async def test_nobody_there_is_unavailable(redis_server: RedisServer, open_link: OpenLink) -> None:
    await fails(open_link(f"unix://{redis_server.folder}/none.sock").read("GET", "a"))


GARBAGE = (
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x00\x01\x02\r\n",
    b"$abc\r\n",
    b"$5\r\nab",
    b"*2\r\n$1\r\na\r\n",
    b"-NOAUTH Authentication required.\r\n",
    b"-LOADING the data set\r\n",
    b"-ERR unknown command\r\n",
    b"*1\r\n" * 3000,
    b"$-7\r\n\r\n\r\n",
)


@pytest.mark.parametrize("answer", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_is_unavailable_if_it_is_no_answer(open_link: OpenLink, answer: bytes) -> None:
    async with GarbageServer(answer, hangs_up=True) as server:
        link = open_link(server.url, SHORT_S)
        for _ in range(FAILURES_MAX):
            with contextlib.suppress(RemoteUnavailable):
                await link.read("HMGET", "a", "b")


async def test_a_password_that_the_server_quotes_is_in_no_error_and_no_log(
    open_link: OpenLink, caplog: pytest.LogCaptureFixture
) -> None:
    async with GarbageServer(b"-ERR unknown command 'AUTH', with args beginning with: 'hunter2'\r\n") as server:
        link = open_link(server.url.replace("redis://", "redis://:hunter2@"), SHORT_S)
        with caplog.at_level(logging.DEBUG):
            errors = [str(await fails(link.read("GET", "a"))) for _ in range(FAILURES_MAX)]
    assert "***" in errors[0]
    assert "hunter2" not in caplog.text + "".join(errors)


async def test_no_part_of_a_password_is_left_where_a_long_answer_is_cut(open_link: OpenLink) -> None:
    async with GarbageServer(b"-ERR " + b"x" * 496 + b"hunter2\r\n") as server:
        link = open_link(server.url.replace("redis://", "redis://:hunter2@"), SHORT_S)
        assert set(str(await fails(link.read("GET", "a")))) <= set("x*")


async def test_a_wrong_password_is_unavailable(own_server: RedisServer, open_link: OpenLink) -> None:
    own_server.call("CONFIG", "SET", "requirepass", "right")
    await fails(open_link(own_server.url.replace("unix://", "unix://:wrong@")).read("GET", "a"))
    assert (await open_link(own_server.url.replace("unix://", "unix://:right@")).read("GET", "a")).value is None


async def test_a_closed_link_asks_nothing(redis_server: RedisServer, open_link: OpenLink) -> None:
    link = open_link(redis_server.url)
    await link.read("GET", "a")
    await link.close()
    with pytest.raises(RemoteSkipped, match="closed"):
        await link.read("GET", "a")


async def test_closing_ends_a_call_under_way(proxy: FaultProxy, open_link: OpenLink) -> None:
    link = open_link(proxy.url)
    proxy.stall_at = 0
    task = asyncio.create_task(link.read("GET", "a"))
    await proxy.faulted.wait()
    await link.close()
    await fails(task)
