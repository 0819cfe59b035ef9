"""Memory that a computation frees stays with the process and serves the next one (docs/adr/0013)."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("kvblend.memory")
# names of glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
KEPT_BYTES_MAX = 1 << 30
"""More than this, free at the end of the heap, goes back to the kernel."""

# nothing mapped for itself: such memory goes back when it is freed. One arena, because those of threads are cut into
# heaps of 64 MiB, which go back whole whatever is asked for
_OPTIONS = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEPT_BYTES_MAX), (M_TOP_PAD, 64 << 20))


def has_glibc() -> bool:
    """Whether this process allocates with glibc, the only library that `keep_freed_memory` knows."""
    try:
        return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    except (OSError, TypeError):
        return False


def keep_freed_memory(*, wanted: bool = True) -> bool:
    """Have glibc keep freed memory; for the whole process, before the threads that compute start.

    Whether that was done: False, and nothing changed, where it is not `wanted` or, with a warning, there is no glibc.
    """
    if not wanted:
        return False
    if not has_glibc():
        log.warning("keep_freed_memory does nothing here: this process does not allocate with glibc")
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    refused = [option for option, value in _OPTIONS if mallopt(option, value) != 1]
    return not refused
