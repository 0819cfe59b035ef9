from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvblend.store.errors import StoreUnusable
from kvblend.store.format import KVShape
from kvblend.store.limits import StoreLimits, memory_bytes
from kvblend.store.store import ChunkStore


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("host_bytes_budget", 0, "it must be at least 1"),
        ("host_bytes_budget", None, "it must be at least 1"),
        ("host_bytes_budget", 1 << 60, "this machine has"),
        ("disk_bytes_budget", -1, "it must be at least 1"),
        ("disk_bytes_budget", 1.5, "it must be at least 1"),
        ("tenant_bytes_max", 0, "it must be at least 1"),
        ("host_policy", "fifo", "choose lru, cost"),
        ("disk_policy", "", "choose lru, cost"),
    ],
)
def test_a_limit_out_of_range_is_named_with_its_value(name: str, value: Any, said: str) -> None:
    values: dict[str, Any] = {"host_bytes_budget": 100, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value!r}; {said}"):
        StoreLimits(**values)


def test_all_of_the_memory_is_allowed() -> None:
    assert StoreLimits(memory_bytes()).disk_bytes_budget is None


async def test_a_disk_budget_above_the_file_system_is_refused(tmp_path: Path, shape: KVShape) -> None:
    with pytest.raises(StoreUnusable, match=f"{tmp_path}: disk_bytes_budget is {1 << 60}; the file system there has"):
        await ChunkStore.open(tmp_path, shape, "model-a", 100, disk_bytes_budget=1 << 60)


async def test_limits_are_checked_before_the_folder_is_made(tmp_path: Path, shape: KVShape) -> None:
    with pytest.raises(ValueError, match="tenant_bytes_max is 0"):
        await ChunkStore.open(tmp_path / "store", shape, "model-a", 100, tenant_bytes_max=0)
    assert os.listdir(tmp_path) == []
