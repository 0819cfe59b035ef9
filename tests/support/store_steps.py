"""What many tests of a store do with the samples of `tests/store/conftest.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvblend.store.keys import pack_ids
from kvblend.store.store import ChunkStore

if TYPE_CHECKING:
    from fake_remote import FakeRemote

    from tests.store.conftest import Sample

FILE_BYTES = 5 * 4096
"""What a sample takes on disk."""


def keep(remote: FakeRemote, one: Sample) -> None:
    """Put a sample into the remote tier, as another server would."""
    remote.keep(one.key, pack_ids(one.ids), one.layers)


async def put(store: ChunkStore, *samples: Sample) -> None:
    """Store samples, one after the other."""
    for one in samples:
        await store.put(one.key, one.ids, one.layers)


async def read_all(store: ChunkStore, one: Sample) -> list[bytes]:
    """The layers of a sample through a lease."""
    lease = await store.lease(one.key, one.ids)
    assert lease is not None
    with lease:
        await lease.prefetch(range(4))
        return [bytes(await lease.layer(index)) for index in range(4)]
