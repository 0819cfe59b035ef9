"""The link to a Redis or Valkey server: a time limit on everything, few calls at once, and pauses when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from kvblend.store.errors import StoreError
from kvblend.store.remote_address import RemoteAddress
from kvblend.store.remote_breaker import Breaker

log = logging.getLogger("kvblend.store")

READS_MAX = 4
WRITES_MAX = 2
REFUSALS = ("WRONGTYPE", "MISCONF", "no such key")
"""How errors begin that a server in good health answers with."""

Command = tuple[str | bytes | int | memoryview, ...]


class RemoteUnavailable(StoreError):
    """The server was not asked, or gave no answer in time. For the caller: a miss."""


class RemoteSkipped(RemoteUnavailable):
    """The server was not asked: it is left alone for a while, or the link is closed."""


class RemoteRefused(StoreError):
    """The server is well and will not do this."""


class Answer(NamedTuple):
    """What the server answered, and after how many seconds, without the wait for a turn."""

    value: Any
    seconds: float


class RedisLink:
    """Runs commands; connects when the first one comes. Answers are as the server gave them, of any type."""

    def __init__(self, address: RemoteAddress, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout_s` limits each call, connecting included. `clock` (seconds) is the breaker's and the stop-watch."""
        self.address = address
        self._timeout_s = timeout_s
        self._clock = clock
        self._breaker = Breaker(clock)
        self._reads = asyncio.Semaphore(READS_MAX)
        self._writes = asyncio.Semaphore(WRITES_MAX)
        self._client = Redis(connection_pool=_make_pool(address, timeout_s))
        self._limits: set[asyncio.Timeout] = set()
        self.answered = False
        self.closed = False

    @property
    def is_down(self) -> bool:
        """True while the server is left alone, and until a probe has shown that it is back."""
        return self._breaker.state != "closed"

    async def read(self, *command: str) -> Answer:
        """Run one command that reads. Raises RemoteUnavailable or RemoteRefused."""
        return await self._run(self._reads, lambda: self._client.execute_command(*command))

    async def write(self, commands: Sequence[Command], *, is_atomic: bool = False) -> list[Any]:
        """Run commands in one go, as a transaction if `is_atomic`; an answer each.

        Raises RemoteUnavailable, and RemoteRefused when the server refuses one of them.
        """

        async def work() -> list[Any]:
            async with self._client.pipeline(transaction=is_atomic) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                # its own way to raise would put megabytes of arguments into the message
                answers: list[Any] = await pipe.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        answers: list[Any] = (await self._run(self._writes, work)).value
        return answers

    async def close(self) -> None:
        """Let nothing more go, and close the connections; calls under way fail."""
        self.closed = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
        try:
            await self._client.aclose(close_connection_pool=True)
        except Exception as error:  # a connection that will not close in order is gone all the same
            log.debug("remote tier %s: %s", self.address, self._explain(error))

    async def _run(self, turns: asyncio.Semaphore, work: Callable[[], Awaitable[Any]]) -> Answer:
        async with turns:
            if self.closed:
                raise RemoteSkipped("the remote tier is closed")
            if not self._breaker.admit():
                raise RemoteSkipped("the remote tier is left alone for a while")
            begin = self._clock()
            try:
                value = await self._limit(work)
            except Exception as error:  # anything at all: the other side may be no Redis server
                reason = self._explain(error)
                if _is_refusal(error):
                    self._succeed()
                    raise RemoteRefused(reason) from None
                self._fail(reason)
                raise RemoteUnavailable(reason) from None
            except BaseException:
                self._breaker.abandon()
                raise
            self._succeed()
            return Answer(value, self._clock() - begin)

    async def _limit(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(self._timeout_s) as limit:
            self._limits.add(limit)
            try:
                return await work()
            finally:
                self._limits.discard(limit)

    def _succeed(self) -> None:
        self.answered = True
        if self._breaker.succeed():
            log.warning("remote tier %s answers again", self.address)

    def _fail(self, reason: str) -> None:
        if self.closed:
            return
        if self._breaker.fail():
            log.warning("remote tier %s is left alone for a while: %s", self.address, reason)
        else:
            log.debug("remote tier %s: %s", self.address, reason)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, TimeoutError) and not str(error):
            return f"no answer within {self._timeout_s:g} s"
        # crossed out before it is cut: a part of a password would not be found
        return self.address.scrub(f"{error}")[:500] or type(error).__name__


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, OutOfMemoryError | ReadOnlyError):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(REFUSALS)


def _make_pool(address: RemoteAddress, timeout_s: float) -> ConnectionPool:
    options: dict[str, Any] = {
        "db": address.database,
        "username": address.username or None,
        "password": address.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # the oldest protocol, without extra commands at the start: any server speaks it
        "protocol": 2,
        "driver_info": None,
        # a connection that the server closed while idle is opened anew, once
        "retry": Retry(NoBackoff(), 1, supported_errors=(LostConnection,)),
    }
    kind: type[Connection | UnixDomainSocketConnection] = Connection
    if address.path:
        kind = UnixDomainSocketConnection
        options["path"] = address.path
    else:
        options |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if address.is_tls:
        kind = SSLConnection
        options |= address.tls_files
    # calls are counted by the semaphores; the pool must only never be the narrower place
    return ConnectionPool(connection_class=kind, max_connections=4 * (READS_MAX + WRITES_MAX), **options)
