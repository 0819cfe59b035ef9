#!/usr/bin/env python3
"""The chunk store: start-up, look-ups and memory with many chunks, the time of an eviction, and throughput per tier.

The many chunks are valid files of one token each. Start-up is `ChunkStore.open` in a fresh process, once with its index
and once without; the files' names and headers are in the page cache. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop
from store_throughput import measure_tiers

from kvblend.store.eviction import POLICIES, make_policy
from kvblend.store.format import align, build_header, checksum
from kvblend.store.keys import ChunkKey, pack_ids
from kvblend.store.root import claim_root, release_root
from kvblend.store.store import ChunkStore, KVShape

TINY = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
FINGERPRINT = "bench"
HOST_BYTES = 64 << 20
LOOKUPS = 20_000
STARTS = 3
EVICTIONS = 200
POLICY_SIZES = [1000, 10_000, 100_000]
WARM_UP = 100


def key_of(number: int) -> ChunkKey:
    return ChunkKey.of(FINGERPRINT, "", (), (number,))


def write_tiny(root: Path, numbers: range) -> None:
    """Chunk files of one token and a layer of zeros; the zeros are a hole in the file."""
    length = TINY.layer_lengths(1)[0]
    zeros = checksum(bytes(length))
    for number in numbers:
        key = key_of(number)
        _, region = build_header(key, pack_ids((number,)), TINY, [zeros])
        with (root / "chunks" / key.id[:2] / f"{key.id}.kvc").open("wb", buffering=0) as file:
            file.write(region)
            file.truncate(len(region) + align(length))


def make_folder(root: Path, chunks: int) -> None:
    """A store folder with so many tiny chunks and no index."""
    release_root(claim_root(root))
    for number in range(256):
        (root / "chunks" / f"{number:02x}").mkdir(parents=True, exist_ok=True)
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        share = -(-chunks // threads)
        list(pool.map(lambda at: write_tiny(root, range(at, min(at + share, chunks))), range(0, chunks, share)))


def resident_mb() -> float:
    """This process's memory, MB (10^6 bytes)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


# ---- in a process of its own ----


async def look_around(root: Path, chunks: int) -> dict[str, Any]:
    """Open the store, look chunks up, close it. Times in seconds, look-ups in us."""
    before_mb = resident_mb()
    start, busy = time.perf_counter(), time.process_time()
    store = await ChunkStore.open(root, TINY, FINGERPRINT, HOST_BYTES)
    startup_s, startup_cpu_s = time.perf_counter() - start, time.process_time() - busy
    index_mb = resident_mb() - before_mb
    if store.stats().chunks != chunks:
        raise SystemExit(f"the store has {store.stats().chunks} chunks of {chunks}")
    source = random.Random(1)
    # half of them known, in no order
    keys = [key_of(source.randrange(2 * chunks)) for _ in range(LOOKUPS)]
    times_us = [time_of(lambda key=key: store.contains(key)) for key in keys]  # type: ignore[misc]
    await store.close()
    found = {"startup_s": startup_s, "startup_cpu_s": startup_cpu_s, "index_mb": index_mb}
    return {**found, "p50_us": percentile(times_us, 0.5), "p99_us": percentile(times_us, 0.99)}


def time_of(action: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start) / 1e3


async def fill_up(root: Path, chunks: int) -> dict[str, Any]:
    """Milliseconds of a put with room left, and of one that must evict another chunk first, at so many chunks."""
    found: dict[str, Any] = {}
    for name, room in (("put_ms", 2 * EVICTIONS + WARM_UP), ("put_evicting_ms", 0)):
        async with await ChunkStore.open(root, TINY, FINGERPRINT, HOST_BYTES) as store:
            file_bytes = store.stats().disk_bytes // store.stats().chunks
            budget = store.stats().disk_bytes + room * file_bytes
        opened = await ChunkStore.open(root, TINY, FINGERPRINT, HOST_BYTES, disk_bytes_budget=budget)
        async with opened as store:
            times_ms: list[float] = []
            base = chunks * 2 if room else chunks * 4
            for number in range(base, base + EVICTIONS + WARM_UP):
                start = time.perf_counter()
                await store.put(key_of(number), (number,), [bytearray(TINY.layer_bytes(1))])
                times_ms.append((time.perf_counter() - start) * 1e3)
            found[name] = round(statistics.median(times_ms[WARM_UP:]), 4)
            found.setdefault("evictions", 0)
            found["evictions"] += store.stats().evictions_disk
    if found["evictions"] < EVICTIONS:
        raise SystemExit(f"{found['evictions']} chunks were evicted; more than {EVICTIONS} were to go")
    return found


# ---- in this one ----


def in_child(job: str, root: Path, chunks: int) -> dict[str, Any]:
    """What a job measures in a fresh interpreter."""
    command = [sys.executable, __file__, "--job", job, "--folder", str(root), "--chunks", str(chunks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_policies(sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Microseconds to choose one victim (`eviction_us`) and to take a newcomer in as well (`us`), at so many chunks."""
    for chunks in sizes:
        for name in POLICIES:
            policy, source = make_policy(name), random.Random(2)
            digests = [source.randbytes(32) for _ in range(chunks + 2000)]
            for digest in digests[:chunks]:
                policy.add(digest, 8192, source.random())

            times_us, evictions_us = list[float](), list[float]()
            for newcomer in digests[chunks:]:
                cost_s, start = source.random(), time.perf_counter_ns()
                policy.pop()
                chosen = time.perf_counter_ns()
                policy.add(newcomer, 8192, cost_s)
                times_us.append((time.perf_counter_ns() - start) / 1e3)
                evictions_us.append((chosen - start) / 1e3)
            row = {"what": "choose_victim", "policy": name, "chunks": chunks, "us": statistics.median(times_us)}
            yield {**row, "us_p99": percentile(times_us, 0.99), "eviction_us": statistics.median(evictions_us)}


def measure(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    chunks: int = arguments.chunks
    say(f"writing {chunks} chunk files")
    make_folder(root / "many", chunks)
    say("starting without an index")
    rebuilt = in_child("look", root / "many", chunks)
    say("starting with an index")
    starts = [in_child("look", root / "many", chunks) for _ in range(STARTS)]
    middle = {name: statistics.median(start[name] for start in starts) for name in ("startup_s", "p50_us", "p99_us")}
    rows: list[dict[str, Any]] = list(measure_policies(POLICY_SIZES))
    for size in sorted({1000, 10_000, chunks}):
        say(f"evicting among {size} chunks")
        if size != chunks:
            make_folder(root / f"{size}", size)
        place = root / ("many" if size == chunks else f"{size}")
        rows.append({"what": "evict", "chunks": size, **in_child("evict", place, size)})
    shutil.rmtree(root / "many")
    say("throughput")
    rows += uvloop.run(measure_tiers(root / "tiers", arguments.remote))
    return {
        "chunks": chunks,
        "startup_s": round(middle["startup_s"], 4),
        "startup_s_all": [round(start["startup_s"], 4) for start in starts],
        # of all its threads: on a busy machine it says more than the wall clock does
        "startup_cpu_s": round(statistics.median(start["startup_cpu_s"] for start in starts), 4),
        "rebuilt_s": round(rebuilt["startup_s"], 4),
        "lookup_p50_us": round(middle["p50_us"], 3),
        "lookup_p99_us": round(middle["p99_us"], 3),
        "index_mb": round(max(start["index_mb"] for start in starts), 2),
        "index_mb_rebuilt": round(rebuilt["index_mb"], 2),
        "cores": os.cpu_count(),
        "rows": rows,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(found: dict[str, Any]) -> None:
    print(f"{found['chunks']} chunks: start {found['startup_s']} s, without an index {found['rebuilt_s']} s")
    print(f"look-up: median {found['lookup_p50_us']} us, p99 {found['lookup_p99_us']} us")
    print(f"memory for the index: {found['index_mb']} MB")
    show_rows(found["rows"])


def show_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            "  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to put files (default: a temporary folder)")
    parser.add_argument("--remote", help="measure a Redis-protocol server too, e.g. redis://127.0.0.1:6379")
    parser.add_argument("--evictions", action="store_true", help="measure only how long each policy takes to choose")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--job", choices=("look", "evict"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.chunks < 1000:
        parser.error("--chunks must be at least 1000")
    if arguments.job:
        job = look_around if arguments.job == "look" else fill_up
        print(json.dumps(uvloop.run(job(arguments.folder, arguments.chunks))))
        return
    if arguments.evictions:
        rows = list(measure_policies(POLICY_SIZES))
        if arguments.json:
            print(json.dumps({"rows": rows}))
        else:
            show_rows(rows)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
