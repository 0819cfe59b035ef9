"""The gate of a served model: who waits for it, what a failure changes, what is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from small_system import TEXTS, answer, request, running

from kvblend.actors.errors import RequestError
from kvblend.actors.gate import ServingGate
from kvblend.actors.system import System
from kvblend.engine.evaluation.gate_report import GateCheck, GateReport
from kvblend.store.notes import read_note

GOOD = GateReport((GateCheck.of("kl_mean", 0.1, 0.5, "mean KL"),))
BAD = GateReport((GateCheck.of("kl_mean", 0.9, 0.5, "mean KL"),))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose context holds the probes."""
    return save_llama(tmp_path_factory.mktemp("large"), max_position_embeddings=4096)


class Judge:
    """Takes the place of the judging: says `report` once `go` is set, and counts."""

    def __init__(self, report: GateReport | Exception) -> None:
        self.report = report
        self.calls = 0
        self.go = asyncio.Event()

    async def __call__(self, _: ServingGate) -> GateReport:
        self.calls += 1
        await self.go.wait()
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judge]:
    def make(report: GateReport | Exception, *, waits: bool = False) -> Judge:
        made = Judge(report)
        if not waits:
            made.go.set()
        monkeypatch.setattr(ServingGate, "judge", lambda self: made(self))
        return made

    return make


async def note_of(root: Path) -> dict[str, Any]:
    return await asyncio.to_thread(read_note, root, "gate")


def details(system: System) -> Any:
    return system.ready().details["gate"]


async def test_a_model_is_judged_in_the_device_thread_before_it_is_served(large: Path) -> None:
    async with running(large, gate="auto", gate_kl_max=1e6, kv_tokens_max=16384) as system:
        ready = system.ready()
        assert not ready.ok
        assert "gate running" in ready.reasons[0]
        _, end = await answer(system, "r", TEXTS)
        assert end.usage.mode == "blend"
        assert system.ready().ok
        assert (details(system)["state"], details(system)["reasons"]) == ("passed", [])
        report = system._gate.report
        assert report is not None
        assert [check.name for check in report.checks][-1] == "kl_mean"


async def test_random_weights_above_the_limit_are_served_by_full_prefill(
    large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(large, gate="auto", gate_kl_max=0.0, kv_tokens_max=16384) as system:
        _, end = await answer(system, "r", TEXTS, mode="reuse")
        assert end.usage.mode == "full"
        assert end.usage.tokens_fresh == end.usage.prompt_tokens
        assert any("failed its gate" in note and "kl_mean" in note for note in end.usage.notes)
        ready = system.ready()
        assert ready.ok
        assert ready.reasons[0].startswith("gate failed: kl_mean")
        assert (details(system)["state"], details(system)["requests_served_full"]) == ("failed", 1)
    assert "served by full prefill" in caplog.text


async def test_force_blend_overrides_a_failure_and_says_so(
    large: Path, judge: Callable[..., Judge], caplog: pytest.LogCaptureFixture
) -> None:
    judge(BAD)
    async with running(large, gate="auto", force_blend=True) as system:
        _, end = await answer(system, "r", TEXTS)
        assert (end.usage.mode, end.usage.notes) == ("blend", ())
        assert (details(system)["forced"], details(system)["requests_served_full"]) == (True, 0)
    assert "blended all the same" in caplog.text


async def test_a_gate_that_is_off_holds_nobody_back(large: Path, judge: Callable[..., Judge]) -> None:
    never = judge(BAD)
    async with running(large, gate="off") as system:
        assert system.ready().ok
        assert details(system)["state"] == "off"
        _, end = await answer(system, "r", TEXTS)
        assert end.usage.mode == "blend"
    assert never.calls == 0


async def test_findings_are_remembered_in_the_stores_folder(
    large: Path, judge: Callable[..., Judge], tmp_path: Path
) -> None:
    counted = judge(GOOD)
    root = tmp_path / "store"
    for changes in ({}, {}, {"recompute_ratio": 0.3}, {"gate_kl_max": 0.7}, {}):
        async with running(large, gate="auto", store=root, **changes) as system:
            await answer(system, "r", TEXTS)
            assert details(system)["state"] == "passed"
    assert counted.calls == 3
    assert len((await note_of(root))["reports"]) == 3


async def test_damaged_findings_are_found_anew(large: Path, judge: Callable[..., Judge], tmp_path: Path) -> None:
    counted = judge(GOOD)
    root = tmp_path / "store"
    async with running(large, gate="auto", store=root) as system:
        await answer(system, "r", TEXTS)
    key = next(iter((await note_of(root))["reports"]))
    (root / "kvblend-gate.json").write_text(f'{{"reports": {{"{key}": [{{}}]}}}}')
    async with running(large, gate="auto", store=root) as system:
        await answer(system, "r", TEXTS)
        assert details(system)["state"] == "passed"
    assert counted.calls == 2


async def test_storing_and_full_prefill_do_not_wait(large: Path, judge: Callable[..., Judge]) -> None:
    judge(GOOD, waits=True)
    async with running(large, gate="auto") as system:
        await answer(system, "store", TEXTS, "", generate=False)
        _, end = await answer(system, "full", TEXTS, mode="full")
        assert end.usage.notes == ()
        assert details(system)["state"] == "running"


async def test_a_deadline_counts_while_the_gate_runs(large: Path, judge: Callable[..., Judge]) -> None:
    judge(GOOD, waits=True)
    async with running(large, gate="auto") as system:
        with pytest.raises(RequestError, match="while the model's gate ran") as caught:
            await system.submit(request("r", TEXTS, deadline_ms=5.0))
        assert caught.value.code == "deadline_exceeded"


async def test_no_more_wait_than_may_queue(large: Path, judge: Callable[..., Judge]) -> None:
    held = judge(GOOD, waits=True)
    async with running(large, gate="auto", queue_requests_max=1) as system:
        first = asyncio.create_task(answer(system, "a", TEXTS))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="wait for the model's gate"):
            await system.submit(request("b", TEXTS))
        held.go.set()
        _, end = await first
        assert end.reason in ("stop", "length")


async def test_closing_ends_the_gate_and_those_who_wait(large: Path, judge: Callable[..., Judge]) -> None:
    judge(GOOD, waits=True)
    async with running(large, gate="auto") as system:
        waiting = asyncio.create_task(system.submit(request("a", TEXTS)))
        await asyncio.sleep(0)
        await system.close()
        with pytest.raises(RequestError, match="shutting down"):
            await waiting


async def test_a_model_that_cannot_be_asked_the_probes_fails(tmp_path: Path) -> None:
    model = save_llama(tmp_path, max_position_embeddings=512)
    async with running(model, gate="auto") as system:
        _, end = await answer(system, "r", TEXTS[:1])
        assert end.usage.mode == "full"
        assert "gate failed: probes" in system.ready().reasons[0]


async def test_a_gate_that_breaks_counts_as_failed(
    large: Path, judge: Callable[..., Judge], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    judge(RuntimeError("no memory"))
    async with running(large, gate="auto", store=tmp_path / "store") as system:
        _, end = await answer(system, "r", TEXTS)
        assert end.usage.mode == "full"
        assert "could not be run: RuntimeError: no memory" in details(system)["reasons"][0]
    assert "the gate could not be run" in caplog.text
    assert await note_of(tmp_path / "store") == {}


async def test_wrong_stored_keys_are_dropped_and_the_answer_is_that_of_a_full_prefill(
    large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(large) as system:
        await answer(system, "store", TEXTS, "", generate=False)
        await system.settle()
        wanted, _ = await answer(system, "full", TEXTS, mode="full")
        spoil_first_layers(system)
        text, end = await answer(system, "r", TEXTS)
        assert text == wanted
        assert any("layer 0" in note for note in end.usage.notes)
        assert system.ready().details["parity_failures"] == 1
    assert "is dropped: layer 0" in caplog.text


def spoil_first_layers(system: System) -> None:
    """Turn the keys that the pool holds of layer 0 into other numbers, some of which are none."""
    for entry in system._store._pool._idle.values():
        layer = entry.layers[0]
        assert layer is not None
        layer[:] = bytes(layer)[: len(layer) // 2][::-1] + bytes(layer)[len(layer) // 2 :]
