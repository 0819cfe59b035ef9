"""Room on disk: who must go so that a new chunk fits the store's budget and its tenant's quota. Numbers only.

Only chunks that nobody has leased may go. A tenant beyond its quota pays with its own chunks, never with another's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from kvblend.store.errors import SpillFailed, StoreWriteFailed
from kvblend.store.eviction import COST_S_PER_TOKEN, EvictionPolicy, make_policy
from kvblend.store.index import ChunkIndex, IndexRow, collector_paused

FAILED_EVICTIONS_MAX = 3
"""After so many files that cannot be removed, a write gives up."""

KEPT_MAX = 4
"""After so many chunks that the remote tier did not take, a write stands back before it tries again."""
PAUSE_S = 0.1
"""The first of these pauses; each is twice as long as the one before."""

Evict = Callable[[bytes], Awaitable[bool]]


class _Scope(NamedTuple):
    """One limit: its name for messages, its bytes, what is taken, and who may go for it."""

    name: str
    limit: int
    taken: int
    policy: EvictionPolicy


class DiskSpace:
    """The budget of a store's folder (bytes, None: none) and of each tenant in it, with the order in which chunks go.

    Room is taken by `reserve` before a file is written and given back by `release` when the row is listed, or never
    will be.
    """

    def __init__(
        self,
        index: ChunkIndex,
        bytes_budget: int | None = None,
        policy: str = "cost",
        tenant_bytes_max: int | None = None,
    ) -> None:
        """Raises ValueError for a limit below one byte and an unknown policy."""
        for name, limit in (("disk_bytes_budget", bytes_budget), ("tenant_bytes_max", tenant_bytes_max)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is {limit}; it must be at least 1, or None for no limit")
        self.bytes_budget = bytes_budget
        self.tenant_bytes_max = tenant_bytes_max
        self.reserved_bytes = 0
        self.evictions = 0
        self.tenant_evictions: Counter[str] = Counter()
        self._index = index
        self._policy_name = policy
        self._all = make_policy(policy)
        self._tenants: dict[str, EvictionPolicy] = {}
        self._reserved: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._costed_tokens = 0
        self._costs_s = 0.0
        self._apart: set[bytes] = set()
        self.is_pinned: Callable[[bytes], bool] = lambda _: False
        """Whether a chunk is in use."""
        if self.is_limited:
            self._add_all()

    @property
    def is_limited(self) -> bool:
        """Whether anything ever has to go."""
        return self.bytes_budget is not None or self.tenant_bytes_max is not None

    def add(self, digest: bytes, row: IndexRow) -> None:
        """A chunk was listed."""
        if row.cost_s > 0:
            self._costs_s += row.cost_s
            self._costed_tokens += row.num_tokens
        self._line_up(digest, row)

    def discard(self, digest: bytes, row: IndexRow) -> None:
        """A chunk was unlisted."""
        for policy in self._policies(row.tenant):
            policy.discard(digest)
        if row.tenant in self._tenants and not len(self._tenants[row.tenant]):
            del self._tenants[row.tenant]
        self._notify()

    def set_apart(self, digest: bytes, row: IndexRow) -> None:
        """A listed chunk is being replaced: it goes for nobody until `rejoin`."""
        self._apart.add(digest)
        self.discard(digest, row)

    def is_apart(self, digest: bytes) -> bool:
        """Whether the chunk is being replaced."""
        return digest in self._apart

    def rejoin(self, digest: bytes) -> None:
        """Undo `set_apart`."""
        self._apart.discard(digest)
        row = self._index.get(digest)
        if row is not None:
            self._line_up(digest, row)

    def demote(self, digest: bytes) -> None:
        """Let a chunk go before all others, until it is used."""
        row = self._index.get(digest)
        if row is not None:
            for policy in self._policies(row.tenant):
                policy.demote(digest)

    def use(self, digest: bytes, row: IndexRow) -> None:
        """A chunk was leased."""
        for policy in self._policies(row.tenant):
            policy.use(digest)

    def hold(self, digest: bytes) -> None:
        """A chunk is in use: it stays."""
        row = self._index.get(digest)
        if row is not None:
            for policy in self._policies(row.tenant):
                policy.hold(digest)

    def free(self, digest: bytes) -> None:
        """A chunk is in use no longer."""
        row = self._index.get(digest)
        if row is not None:
            for policy in self._policies(row.tenant):
                policy.free(digest)
            self._notify()

    async def reserve(self, name: str, tenant: str, num_bytes: int, wait_s: float, evict: Evict) -> None:
        """Take room for a file, evicting others for it; what is leased is waited for, `wait_s` seconds at most.

        `evict` unlists a chunk and says whether the file went; where not, it lists it again. A chunk of which it raises
        SpillFailed stays listed; others are tried, and it again after a pause.
        Raises StoreWriteFailed naming chunk `name` and the limit, with no room taken.
        """
        limits = ("disk_bytes_budget", self.bytes_budget), ("tenant_bytes_max", self.tenant_bytes_max)
        for limit_name, limit in limits:
            if limit is not None and num_bytes > limit:
                raise StoreWriteFailed(f"chunk {name} takes {num_bytes} bytes; {limit_name} is {limit}")
        end_s = asyncio.get_running_loop().time() + wait_s
        self._take(tenant, num_bytes)
        kept: dict[bytes, IndexRow] = {}
        try:
            failures = evicted = 0
            pause_s = PAUSE_S
            while scopes := self._exceeded(tenant):
                # nobody goes for a chunk that would not fit all the same
                stuck = [scope for scope in scopes if scope.taken - scope.limit > scope.policy.free_bytes]
                if not stuck and len(kept) < KEPT_MAX:
                    before = len(kept)
                    if await self._evict_one(scopes[0].policy, evict, kept):
                        evicted += 1
                    elif len(kept) == before and (failures := failures + 1) == FAILED_EVICTIONS_MAX:
                        raise StoreWriteFailed(f"no room for chunk {name}: {failures} files could not be removed")
                elif kept:
                    self._put_back(kept)
                    left_s = end_s - asyncio.get_running_loop().time()
                    if left_s <= 0:
                        raise StoreWriteFailed(f"no room for chunk {name}: the remote tier does not take what would go")
                    # by time alone: each attempt changes something, and two who heard of that would never rest
                    self._take(tenant, -num_bytes)
                    try:
                        await asyncio.sleep(min(pause_s, left_s))
                    finally:
                        self._take(tenant, num_bytes)
                    pause_s *= 2
                elif not await self._wait(tenant, num_bytes, end_s, tell_others=evicted > 0):
                    scope = stuck[0]
                    raise StoreWriteFailed(
                        f"chunk {name} takes {num_bytes} bytes; of the {scope.limit} of {scope.name}, "
                        f"{scope.taken - num_bytes - scope.policy.free_bytes} are leased or being written"
                    )
                else:
                    evicted = 0
        except BaseException:
            self.release(tenant, num_bytes)
            raise
        finally:
            self._put_back(kept)

    def release(self, tenant: str, num_bytes: int) -> None:
        """Give back what `reserve` took."""
        self._take(tenant, -num_bytes)
        self._notify()

    async def trim(self, evict: Evict) -> None:
        """Evict what exceeds the limits from the start, as far as nobody has leased it."""
        for tenant in list(self._index.tenants):
            with contextlib.suppress(StoreWriteFailed):
                await self.reserve("", tenant, 0, 0.0, evict)

    def _take(self, tenant: str, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self._reserved[tenant] += num_bytes
        if not self._reserved[tenant]:
            del self._reserved[tenant]

    def _exceeded(self, tenant: str) -> list[_Scope]:
        """The limits that are exceeded just now, the tenant's own first."""
        scopes = []
        if self.tenant_bytes_max is not None:
            own = self._tenants.get(tenant) or make_policy(self._policy_name)
            taken = self._index.tenant_bytes(tenant) + self._reserved[tenant]
            scopes.append(_Scope("tenant_bytes_max", self.tenant_bytes_max, taken, own))
        if self.bytes_budget is not None:
            taken = self._index.file_bytes + self.reserved_bytes
            scopes.append(_Scope("disk_bytes_budget", self.bytes_budget, taken, self._all))
        return [scope for scope in scopes if scope.taken > scope.limit]

    async def _evict_one(self, policy: EvictionPolicy, evict: Evict, kept: dict[bytes, IndexRow]) -> bool:
        digest = policy.pop()
        row = None if digest is None else self._index.get(digest)
        if digest is None or row is None:
            return False
        try:
            if not await evict(digest):
                return False
        except SpillFailed:
            kept[digest] = row
            return False
        self.evictions += 1
        self.tenant_evictions[row.tenant] += 1
        return True

    def _line_up(self, digest: bytes, row: IndexRow) -> None:
        """Have a listed chunk go when its turn comes, as just used."""
        if digest not in self._apart:
            cost_s = row.cost_s or row.num_tokens * self._cost_s_per_token
            for policy in self._policies(row.tenant):
                policy.add(digest, row.file_bytes, cost_s, row.hits)
                if self.is_pinned(digest):
                    policy.hold(digest)
        self._notify()

    def _put_back(self, kept: dict[bytes, IndexRow]) -> None:
        """Line those up again that had been chosen and stay."""
        for digest, row in kept.items():
            if self._index.get(digest) is row:
                self._line_up(digest, row)
        kept.clear()

    async def _wait(self, tenant: str, num_bytes: int, end_s: float, *, tell_others: bool = False) -> bool:
        """Stand back until something changes; False when the time is over."""
        # who waits takes no room, so that a smaller one may pass
        self._take(tenant, -num_bytes)
        if tell_others:
            self._notify()
        self._changed.clear()
        try:
            async with asyncio.timeout_at(end_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._take(tenant, num_bytes)
        return True

    def _policies(self, tenant: str) -> Iterator[EvictionPolicy]:
        if self.bytes_budget is not None:
            yield self._all
        if self.tenant_bytes_max is not None:
            if tenant not in self._tenants:
                self._tenants[tenant] = make_policy(self._policy_name)
            yield self._tenants[tenant]

    def _add_all(self) -> None:
        """Know the chunks that are there from the start, the longest unused first."""
        rows = self._index.rows.values()
        self._costs_s = sum(row.cost_s for row in rows)
        self._costed_tokens = sum(row.num_tokens for row in rows if row.cost_s > 0)
        token_s = self._cost_s_per_token
        by_tenant: dict[str, list[tuple[bytes, int, float, int]]] = {}
        items = []
        with collector_paused():
            for digest, row in sorted(self._index.rows.items(), key=lambda item: item[1].used_s):
                item = (digest, row.file_bytes, row.cost_s or row.num_tokens * token_s, row.hits)
                items.append(item)
                by_tenant.setdefault(row.tenant, []).append(item)
            if self.bytes_budget is not None:
                self._all.fill(items)
            if self.tenant_bytes_max is not None:
                for tenant, own in by_tenant.items():
                    self._tenants[tenant] = make_policy(self._policy_name)
                    self._tenants[tenant].fill(own)

    @property
    def _cost_s_per_token(self) -> float:
        return self._costs_s / self._costed_tokens if self._costed_tokens else COST_S_PER_TOKEN

    def _notify(self) -> None:
        self._changed.set()
