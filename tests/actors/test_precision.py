"""In which dtype a system stores chunks: what decides it, what is remembered, and what stays apart in one folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from model_files import save_llama
from small_system import TEXTS, answer, running

from kvblend.actors import precision as subject
from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.actors.system import System
from kvblend.engine.capture import payload_tensors, tensor_bytes
from kvblend.engine.evaluation.gate_report import GateCheck
from kvblend.engine.precision import STORE_DTYPES, Precision
from kvblend.engine.runner import Runner
from kvblend.store.format import parse_header
from kvblend.store.notes import read_note

GOOD = GateCheck.of("store_dtype", 1e-5, 1e-3, "mean KL")
BAD = GateCheck.of("store_dtype", 1e-2, 1e-3, "mean KL")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose context holds the probes."""
    return save_llama(tmp_path_factory.mktemp("large"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose context does not."""
    return save_llama(tmp_path_factory.mktemp("small"), max_position_embeddings=512)


def judged(monkeypatch: pytest.MonkeyPatch, check: GateCheck) -> list[None]:
    """Takes the place of the check; grows by an entry whenever it is run."""
    calls: list[None] = []

    def begin(_: object) -> Any:
        calls.append(None)
        return iter([None, check])

    monkeypatch.setattr(subject, "begin_store_check", begin)
    return calls


def form_of(system: System) -> Any:
    return system.ready().details["store_dtype"]


async def store_all(system: System) -> None:
    await answer(system, "store", TEXTS, "", generate=False)
    await system.settle()


def headers(root: Path) -> list[Any]:
    raw = [(path.read_bytes(), path.stat().st_size) for path in sorted(root.rglob("*.kvc"))]
    return [parse_header(data, size) for data, size in raw]


async def payload_bytes(model: Path, root: Path, **changes: Any) -> int:
    """Bytes of one layer of all chunks that a system stores."""
    async with running(model, store=root, **changes) as system:
        await store_all(system)
    return sum(header.layers[0].length for header in headers(root))


async def test_auto_runs_the_check_and_stores_bfloat16_where_it_passes(large: Path, tmp_path: Path) -> None:
    async with running(large, store_dtype="auto", store=tmp_path / "s") as system:
        form = form_of(system)
        assert form["dtype"] == "bfloat16"
        assert "mean KL of plain reuse of KV stored as bfloat16" in form["reason"]
        await store_all(system)
    assert {header.shape.dtype for header in headers(tmp_path / "s")} == {"bfloat16"}


async def test_auto_falls_back_to_the_compute_dtype_where_it_fails(
    large: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged(monkeypatch, BAD)
    async with running(large, store_dtype="auto") as system:
        assert form_of(system) == {"dtype": "float32", "reason": BAD.reason}
    assert "chunks are stored as float32" in caplog.text


async def test_a_model_that_cannot_be_asked_the_probes_stores_as_it_computes(small: Path) -> None:
    async with running(small, store_dtype="auto") as system:
        assert form_of(system)["dtype"] == "float32"
        assert "cannot be asked" in form_of(system)["reason"]


async def test_a_check_that_breaks_does_not_keep_the_system_from_starting(
    large: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(_: object) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(subject, "begin_store_check", begin)
    async with running(large, store_dtype="auto") as system:
        assert form_of(system)["dtype"] == "float32"
    assert "could not be run" in caplog.text


@pytest.mark.parametrize(("check", "dtype"), [(GOOD, "bfloat16"), (BAD, "float32")])
async def test_a_decision_is_remembered_in_the_folder_whatever_else_is_set(
    large: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: GateCheck, dtype: str
) -> None:
    calls = judged(monkeypatch, check)
    root = tmp_path / "s"
    for changes in ({}, {"recompute_ratio": 0.5, "conditioning": "bare"}):
        async with running(large, store_dtype="auto", store=root, **changes) as system:
            assert form_of(system)["dtype"] == dtype
    assert len(calls) == 1


@pytest.mark.parametrize("text", ["{}", '{"checks": 3}', '{"checks": {"KEY": {}}}', "no json"])
async def test_a_note_that_cannot_be_used_is_replaced(
    large: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    calls = judged(monkeypatch, GOOD)
    root = tmp_path / "s"
    async with running(large, store_dtype="auto", store=root):
        pass
    (key,) = (await asyncio.to_thread(read_note, root, "precision"))["checks"]
    (root / "kvblend-precision.json").write_text(text.replace("KEY", key))
    for _ in range(2):
        async with running(large, store_dtype="auto", store=root):
            pass
    assert len(calls) == 2


async def test_a_dtype_that_was_asked_for_is_not_judged_before_the_start(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = judged(monkeypatch, BAD)
    async with running(large, store_dtype="int8") as system:
        assert form_of(system) == {"dtype": "int8", "reason": "set"}
    async with running(large, store_dtype="auto", dtype="bfloat16") as system:
        assert form_of(system)["dtype"] == "bfloat16"
    assert calls == []


async def test_a_dtype_that_was_asked_for_and_fails_is_served_by_full_prefill_with_the_reason(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvblend.engine.evaluation.gate.STORE_KL_MAX", 0.0)
    async with running(large, store_dtype="int8", gate="auto", gate_kl_max=1e6, kv_tokens_max=16384) as system:
        _, end = await answer(system, "r", TEXTS)
        assert end.usage.mode == "full"
        assert any("store_dtype: mean KL" in note for note in end.usage.notes)
        assert any("KV stored as int8" in reason for reason in system.ready().reasons)


async def test_files_of_bfloat16_hold_half_and_of_int8_a_quarter_and_scales(small: Path, tmp_path: Path) -> None:
    wide, half, quarter = [
        await payload_bytes(small, tmp_path / dtype, store_dtype=dtype) for dtype in ("float32", "bfloat16", "int8")
    ]
    assert wide == 2 * half
    tokens = [(h.num_tokens, h.shape) for h in headers(tmp_path / "int8")]
    scales = sum(4 * shape.num_kv_heads * (shape.head_dim + count) for count, shape in tokens)
    assert quarter == wide // 4 + scales


async def test_chunks_of_different_dtypes_lie_in_one_folder_and_stay_apart(small: Path, tmp_path: Path) -> None:
    root = tmp_path / "s"
    dtypes: list[dict[str, str]] = [{"store_dtype": name} for name in ("float32", "bfloat16", "int8")]
    dtypes += [{"dtype": "bfloat16", "store_dtype": name} for name in ("bfloat16", "int8")]
    counts = []
    for dtype in dtypes:
        async with running(small, store=root, **dtype) as system:
            assert system.store_stats().chunks == 0
            await store_all(system)
            counts.append(len(list(root.rglob("*.kvc"))))
    assert counts == [counts[0] * n for n in range(1, 6)]
    for dtype in dtypes:
        async with running(small, store=root, **dtype) as system:
            assert system.store_stats().chunks == counts[0]
            _, end = await answer(system, "r", TEXTS, mode="reuse")
            assert end.usage.tokens_reused > 0
    assert len(list(root.rglob("*.kvc"))) >= counts[-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("mode", ["blend", "reuse", "prefix"])
async def test_answers_are_those_of_chunks_stored_wide(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, mode: Any
) -> None:
    wide = await _logits(small, tmp_path / "wide", monkeypatch, "float32", mode)
    narrow = await _logits(small, tmp_path / "narrow", monkeypatch, dtype, mode)
    limit = {"bfloat16": 0.02, "int8": 0.05}[dtype]
    assert float((wide - narrow).abs().max()) <= limit * float(wide.abs().max())
    assert float((wide - narrow).abs().max()) > 0.0


async def _logits(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, mode: Any) -> torch.Tensor:
    """float32 logits behind the prompt, over chunks that were stored before."""
    seen: list[torch.Tensor] = []
    sample = Runner._sample

    def watch(runner: Runner, pairs: Any) -> Any:
        seen.extend(runner.model.logits(outcome.hidden[None])[0] for _, outcome in pairs if outcome.hidden is not None)
        return sample(runner, pairs)

    async with running(model, store=root, store_dtype=dtype) as system:
        await answer(system, "first", TEXTS)
        await store_all(system)
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "_sample", watch)
            _, end = await answer(system, "r", TEXTS, mode=mode, max_tokens=1)
        assert end.usage.tokens_reused > 0
        assert system.ready().details["parity_failures"] == 0
    return seen[-1]


async def test_kv_that_cannot_be_stored_fails_to_be_stored_and_nothing_else(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = Precision.encode

    def spoil(form: Precision, payload: memoryview, tokens: int) -> memoryview:
        kv = torch.stack(payload_tensors(payload, form.kv_heads, form.head_dim, form.compute, tokens))
        kv[0, 0, 0, 0] = torch.inf
        return encode(form, tensor_bytes(kv), tokens)

    async with running(small, store_dtype="int8") as system:
        monkeypatch.setattr(Precision, "encode", spoil)
        _, end = await answer(system, "r", TEXTS)
        assert end.reason in ("stop", "length")
        await system.settle()
        with pytest.raises(RequestError, match="not stored: K or V holds numbers that int8 cannot"):
            await answer(system, "s", TEXTS[:1], "", generate=False)
        assert system.store_stats().chunks == 0
    assert "is not stored" in caplog.text


def test_settings_know_the_dtypes_and_refuse_one_wider_than_the_computation() -> None:
    with pytest.raises(RequestError, match="store_dtype is 'int4'; choose auto, float32, bfloat16, int8"):
        Settings(store_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="store_dtype is 'float32'; it is wider than dtype 'bfloat16'"):
        Settings(store_dtype="float32", dtype="bfloat16")
    assert get_args(get_type_hints(Settings)["store_dtype"]) == ("auto", *STORE_DTYPES)
