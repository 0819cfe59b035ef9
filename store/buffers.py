"""Memory that layers are read into, used again: pages that the kernel must clear and map cost more than the reading."""

from __future__ import annotations

import ctypes
import mmap
import weakref


class BufferPool:
    """Hands out memory on page borders; what nobody looks at any more is kept for the next, `bytes_max` bytes at most.

    A buffer comes back when the last view of it is gone, wherever that was held, so that nobody ever sees another's
    bytes come in. It is not cleared: whoever takes one must write before others may read.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._free: dict[int, list[mmap.mmap]] = {}
        self.num_bytes = 0
        """Bytes kept for the next."""

    def allocate(self, num_bytes: int) -> memoryview:
        """Writable memory of this size; ValueError below 1 byte."""
        if num_bytes < 1:
            raise ValueError(f"a buffer of {num_bytes} bytes; it must have at least 1")
        size = size_class(num_bytes)
        kept = self._free.get(size)
        if kept:
            memory = kept.pop()
            self.num_bytes -= size
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        owner = (ctypes.c_ubyte * size).from_buffer(memory)
        weakref.finalize(owner, self._take_back, memory, size).atexit = False
        return memoryview(owner).cast("B")[:num_bytes]

    def _take_back(self, memory: mmap.mmap, size: int) -> None:
        # may run in any thread: each operation is one on a built-in, and the limit need not be exact
        if self.num_bytes + size <= self._bytes_max:
            self.num_bytes += size
            self._free.setdefault(size, []).append(memory)


def size_class(num_bytes: int) -> int:
    """What is mapped for this many bytes: at most an eighth more (pages that are never touched cost nothing)."""
    step = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step
