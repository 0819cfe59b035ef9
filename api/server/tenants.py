"""The system as one caller sees it: its own chunks, within its own limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import TERMINAL, Generate, StreamEvent
from kvblend.api.server.forwarding import ForwardingSystem
from kvblend.api.server.keys import KeyRing, Tenant
from kvblend.api.server.port import EventStream, LibraryPort, SystemPort
from kvblend.api.server.rates import Allowance, Clock, RateLimits


class Caller:
    """Whoever has one key; or, with `tenant` None, everybody where there are no keys."""

    def __init__(self, tenant: Tenant | None, allowance: Allowance, ring: KeyRing | None) -> None:
        self.tenant = tenant
        self.allowance = allowance
        self._ring = ring

    @property
    def tenant_id(self) -> str:
        """What goes into the names of its chunks; "" for everybody."""
        return "" if self.tenant is None else self.tenant.id

    @property
    def operator(self) -> bool:
        """Whether it may read what concerns all tenants; everybody may where there are no keys."""
        return self.tenant is None or self.tenant.operator

    def check_operator(self) -> None:
        """RequestError `forbidden` for the key of a mere tenant."""
        if not self.operator:
            raise RequestError("forbidden", "these are figures of all tenants together: they want an operator's key")

    def check(self) -> None:
        """RequestError `unauthorized` where the key has been withdrawn meanwhile."""
        if self._ring is not None and self.tenant not in self._ring:
            raise RequestError("unauthorized", "this key is no longer valid")


class Callers:
    """All callers of one server, each made when it first comes. `ring` None means that no key is asked for."""

    def __init__(self, ring: KeyRing | None, rates: RateLimits, clock: Clock | None = None) -> None:
        self._ring = ring
        self._new_allowance: Callable[[], Allowance] = lambda: (
            Allowance(rates) if clock is None else Allowance(rates, clock)
        )
        self._callers: dict[str, Caller] = {}

    def find(self, token: str | None) -> Caller:
        """Whose key this is. RequestError `unauthorized` where it is nobody's."""
        if self._ring is None:
            return self._of(None)
        # an absent key takes the same way as a wrong one
        tenant = self._ring.find("" if token is None else token)
        if token is None or tenant is None:
            what = "no API key was given" if token is None else "this API key is not known"
            raise RequestError("unauthorized", f"{what}; send it as `Authorization: Bearer KEY`, never in the URL")
        return self._of(tenant)

    def _of(self, tenant: Tenant | None) -> Caller:
        name = "" if tenant is None else tenant.id
        caller = self._callers.get(name)
        if caller is None or caller.tenant != tenant:
            # a new key of the same tenant goes on with what the old one had left
            allowance = self._new_allowance() if caller is None else caller.allowance
            caller = self._callers[name] = Caller(tenant, allowance, self._ring)
        return caller


class TenantSystem(ForwardingSystem):
    """Every request is this caller's, and so is the library.

    `counted` says that each submission counts as a request of its own; over HTTP the exchange has been counted. `peer`
    is who asks, for fair shares, where a request does not say so itself and there is no key.
    """

    def __init__(self, system: SystemPort, caller: Caller, *, counted: bool, peer: str = "") -> None:
        super().__init__(system)
        self._caller = caller
        self._peer = peer
        self._counted = counted

    @property
    def library(self) -> LibraryPort:
        """See `SystemPort.library`."""
        tenant_id = self._caller.tenant_id
        return self._system.library.of(tenant_id) if tenant_id else self._system.library

    async def submit(self, request: Generate) -> EventStream:
        """See `SystemPort.submit`. RequestError beyond the caller's limits, or for a key that was withdrawn."""
        self._caller.check()
        if self._counted:
            self._caller.allowance.count()
        self._caller.allowance.enter()
        try:
            own = replace(request, tenant=self._caller.tenant_id, client=request.client or self._peer)
            stream = await self._system.submit(own)
        except BaseException:
            self._caller.allowance.leave()
            raise
        return _RunningStream(stream, self._caller.allowance)


class _RunningStream:
    """Fits `EventStream`; gives the place back at its end."""

    def __init__(self, stream: EventStream, allowance: Allowance) -> None:
        self._stream = stream
        self._allowance = allowance
        self._runs = True

    async def drain(self) -> list[StreamEvent]:
        events = await self._stream.drain()
        if not events or isinstance(events[-1], TERMINAL):
            self._leave()
        return events

    def abandon(self) -> None:
        self._stream.abandon()
        self._leave()

    def _leave(self) -> None:
        if self._runs:
            self._runs = False
            self._allowance.leave()
