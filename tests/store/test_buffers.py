"""Memory used again once nobody looks at it, and not a moment earlier."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from kvblend.store.buffers import BufferPool, size_class

MB = 1 << 20


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_memory_is_writable_and_on_a_page() -> None:
    view = BufferPool(MB).allocate(5000)
    view[:] = b"x" * 5000
    assert (len(view), view.format, view.readonly, address(view) % mmap.PAGESIZE) == (5000, "B", False, 0)


def test_memory_that_nobody_looks_at_is_used_again() -> None:
    pool = BufferPool(MB)
    view = pool.allocate(10_000)
    before = address(view)
    del view
    assert pool.num_bytes == size_class(10_000)
    again = pool.allocate(9_000)
    assert (address(again), pool.num_bytes) == (before, 0)


def test_memory_is_not_used_again_while_any_part_of_it_is_looked_at() -> None:
    pool = BufferPool(MB)
    view = pool.allocate(10_000)
    part = view[100:200]
    part[:] = b"y" * 100
    del view
    other = pool.allocate(10_000)
    other[:] = b"z" * 10_000
    assert bytes(part) == b"y" * 100


def test_no_more_is_kept_than_the_limit() -> None:
    pool = BufferPool(3 * mmap.PAGESIZE)
    views = [pool.allocate(mmap.PAGESIZE) for _ in range(5)]
    views.clear()
    assert pool.num_bytes == 3 * mmap.PAGESIZE


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 100_000, 23 * MB, 23 * MB + 1, 1 << 30])
def test_at_most_an_eighth_or_a_page_is_mapped_in_vain(num_bytes: int) -> None:
    assert num_bytes <= size_class(num_bytes) <= max(num_bytes + mmap.PAGESIZE, num_bytes * 9 // 8)


def test_a_buffer_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BufferPool(MB).allocate(0)
