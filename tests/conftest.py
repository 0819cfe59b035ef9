"""Fixtures and options of the whole suite: leaks, blocking calls, stress runs, the embedded model."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import blockbuster
import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, settings

# before anything imports torch: on tiny models a second thread costs more than it brings, most of all on busy cores
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["browser", "redis_server", "remote_rig"]

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
STRESS_FACTOR = 40
LEAK_GRACE_S = 3.0

# threads of libraries that live as long as the process, by the beginning of their names
POOL_THREADS = ("tqdm", "TMonitor", "pytest_timeout", "AnyIO worker thread")
# descriptors that libraries open once and keep
KEPT_FILES = ("/dev/null", "/dev/urandom", "/dev/shm", "/dev/nvidia", "/proc/", "/sys/")
KEPT_FONTS = "/matplotlib/mpl-data/fonts/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="full crash loops, soaks and fuzz runs")
    parser.addoption("--fuzz", type=int, help="how many hostile frames and requests (1,000; 200,000 with --stress)")
    parser.addoption("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop of the async tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stress: runs only with --stress")
    config.addinivalue_line("markers", "uvloop: an async test that runs on asyncio's loop and on uvloop")
    uvloop.new_event_loop().close()  # libuv's signal pipe is opened once per process and kept: not a test's leak
    slow = [HealthCheck.too_slow]
    settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=slow)
    settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
    settings.register_profile("stress", settings.get_profile("default"), max_examples=1500)
    settings.load_profile("stress" if config.getoption("--stress") else "ci" if in_ci() else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--stress"):
        return
    for item in items:
        if item.get_closest_marker("stress"):
            item.add_marker(pytest.mark.skip(reason="runs only with --stress"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
    if item.get_closest_marker("uvloop"):
        return factories
    name = config.getoption("--loop")
    return {name: factories[name]}


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


@pytest.fixture(scope="session")
def stress_factor(request: pytest.FixtureRequest) -> int:
    """By how much to multiply the rounds of a loop: 1, or more under --stress."""
    return STRESS_FACTOR if request.config.getoption("--stress") else 1


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file, put there by `kvblend pull smollm2`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    path = cache / "kvblend" / "models" / SMOLLM2_FILE
    if not path.is_file():
        reason = f"the embedded model is not at {path}: run `kvblend pull smollm2`"
        if in_ci():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return path


def open_files() -> set[tuple[int, str]]:
    """Descriptor and target of every open file that a test could have left behind."""
    found: set[tuple[int, str]] = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if not target.startswith(KEPT_FILES) and KEPT_FONTS not in target:
            found.add((int(entry), target))
    return found


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(POOL_THREADS)}


def settle(look: Callable[[], set[str]]) -> set[str]:
    """What `look` still finds after a collection and a short grace."""
    found = look()
    if found:
        gc.collect()
    end = time.monotonic() + LEAK_GRACE_S
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def describe_task(task: asyncio.Task[object]) -> str:
    return f"{task.get_name()}: {task.get_coro()!r}"


@pytest_asyncio.fixture
async def _no_leaked_tasks() -> AsyncIterator[None]:
    """Set up before and torn down after every other async fixture of the test."""
    before = asyncio.all_tasks()
    yield
    mine = asyncio.current_task()

    def left() -> set[asyncio.Task[object]]:
        return {task for task in asyncio.all_tasks() if task not in before and task is not mine}

    if ending := left():
        await asyncio.wait(ending, timeout=LEAK_GRACE_S)
    if found := left():
        pytest.fail("tasks left running: " + "; ".join(map(describe_task, found)), pytrace=False)


@pytest.fixture(scope="session")
def _blocking_detector() -> blockbuster.BlockBuster:
    # only stacks with a frame of ours count: a test may well read a file between two awaits
    return blockbuster.BlockBuster(scanned_modules=["kvblend"])


@pytest.fixture
def _no_leaked_resources() -> Iterator[None]:
    """Outside the event loop's own fixture: its descriptors and executor threads are gone at teardown."""
    threads, files = own_threads(), open_files()
    yield
    if found := settle(lambda: {f"{t.name} ({t!r})" for t in own_threads() - threads}):
        pytest.fail("threads left running: " + "; ".join(sorted(found)), pytrace=False)
    if found := settle(lambda: {f"{number} -> {target}" for number, target in open_files() - files}):
        pytest.fail("files left open: " + "; ".join(sorted(found)), pytrace=False)


@pytest.fixture(autouse=True)
def _guard(
    request: pytest.FixtureRequest, _no_leaked_resources: None, _blocking_detector: blockbuster.BlockBuster
) -> Iterator[None]:
    """Around every test: no thread or file is left; around async ones also no task, and nothing blocks the loop."""
    if not pytest_asyncio.is_async_test(request.node):
        yield
        return
    request.getfixturevalue("_no_leaked_tasks")
    _blocking_detector.activate()
    yield
    _blocking_detector.deactivate()
