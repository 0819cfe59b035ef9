"""Opening the store that settings describe, remote tier included."""

from __future__ import annotations

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.store.files import DiskIO
from kvblend.store.format import KVShape
from kvblend.store.remote_address import RemoteAddress
from kvblend.store.store import ChunkStore
from kvblend.store.tiers import LowerTier


def check_remote(settings: Settings) -> None:
    """Raises RequestError where the remote tier's URL cannot be used; nothing is contacted."""
    try:
        if settings.remote:
            RemoteAddress.parse(settings.remote)
    except ValueError as error:
        raise RequestError("invalid_request", str(error), "remote") from None


def stored_shape(engine: Engine) -> KVShape:
    """The shape and the dtype of an engine's chunks."""
    config = engine.config
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, engine.stored)


async def open_store(settings: Settings, shape: KVShape, fingerprint: str, io: DiskIO | None = None) -> ChunkStore:
    """The store for chunks of this shape and model, on `io` in place of the local file system.

    The remote tier is not contacted yet. Raises StoreUnusable, and RequestError as `check_remote`.
    """
    check_remote(settings)
    remote = await _open_remote(settings, shape, fingerprint)
    try:
        return await ChunkStore.open(
            settings.store,
            shape,
            fingerprint,
            settings.host_bytes_budget,
            io,
            disk_bytes_budget=settings.disk_bytes_budget,
            host_policy=settings.host_policy,
            disk_policy=settings.disk_policy,
            tenant_bytes_max=settings.tenant_bytes_max,
            remote=remote,
        )
    except BaseException as error:
        if remote is not None:
            await remote.close()
        if isinstance(error, ValueError):
            # a limit that only this machine finds too large; the message begins with its name
            raise RequestError("invalid_request", str(error), str(error).partition(" ")[0]) from None
        raise


async def _open_remote(settings: Settings, shape: KVShape, fingerprint: str) -> LowerTier | None:
    if not settings.remote:
        return None
    # half a second of imports that only those pay who have a remote tier
    from kvblend.store.remote import RemoteTier

    return await RemoteTier.open(
        settings.remote,
        shape,
        fingerprint,
        timeout_s=settings.remote_timeout_ms / 1000,
        ttl_s=settings.remote_ttl_s,
    )
