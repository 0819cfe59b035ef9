"""`max_kl` through the whole system: measured once, raised where needed, said in the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from model_files import save_llama
from small_system import TEXTS, answer, request, running

from kvblend.actors import bounds
from kvblend.actors.bounds import kind_of
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions, Finished, SelectionOptions
from kvblend.actors.settings import Settings
from kvblend.actors.system import System
from kvblend.engine.bound import Shown
from kvblend.engine.evaluation.calibration import Sample, Unfit, calibration_questions
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.store.notes import read_note

SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose context holds the probes."""
    return save_llama(tmp_path_factory.mktemp("large"), max_position_embeddings=4096)


class Probes:
    """In place of the built-in probes: the same samples whatever the model."""

    def __init__(self, kl: float) -> None:
        self.kl = kl
        self.calls = 0

    def __call__(self, *_: object) -> Iterator[Sample | None]:
        self.calls += 1
        for index in range(8):
            yield None
            yield Sample(Shown(0.15, 0.0, 0.01 + 0.001 * index, 1.0), self.kl)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    made = Probes(0.01)
    monkeypatch.setattr(bounds, "begin_samples", made)
    return made


async def ask(system: System, name: str, **blend: object) -> tuple[str, Finished]:
    given = replace(request(name, SHUFFLED), blend=BlendOptions(**blend))  # type: ignore[arg-type]
    return await (await system.submit(given)).result()


async def stored(system: System) -> None:
    await answer(system, "store", TEXTS)
    await system.settle()


async def test_a_bound_that_nothing_holds_gives_the_text_of_a_full_prefill(
    tiny_model_path: Path, probes: Probes
) -> None:
    async with running(tiny_model_path) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full")
        await stored(system)
        text, end = await ask(system, "b", max_kl=0.0, recompute_ratio=0.2)
    assert (text, end.usage.recompute_ratio, end.usage.kl_estimate) == (full, 1.0, 0.0)
    assert end.usage.tokens_reused + end.usage.tokens_recomputed + end.usage.tokens_fresh == end.usage.prompt_tokens
    assert "max_kl 0: recompute_ratio was raised from 0.2 to 1" in end.usage.notes
    assert end.usage.charged_ratio > 1.0


async def test_a_wide_bound_changes_nothing_but_the_figures(tiny_model_path: Path, probes: Probes) -> None:
    async with running(tiny_model_path) as system:
        await stored(system)
        text, plain = await ask(system, "p")
        bounded, end = await ask(system, "b", max_kl=1000.0)
    assert (bounded, end.usage.recompute_ratio) == (text, 0.15)
    assert (plain.usage.kl_estimate, plain.usage.notes, end.usage.notes) == (None, (), ())
    assert end.usage.kl_estimate is not None
    assert 0.0 < end.usage.kl_estimate < 1000.0


async def test_raised_requests_run_beside_others(tiny_model_path: Path, probes: Probes) -> None:
    async with running(tiny_model_path) as system:
        await stored(system)
        wanted = [(await ask(system, f"w{i}", recompute_ratio=ratio))[0] for i, ratio in enumerate((0.15, 1.0, 0.5))]
        together = [
            ask(system, "a"),
            ask(system, "b", max_kl=0.0, selection=SelectionOptions(selector="query")),
            ask(system, "c", recompute_ratio=0.5),
        ]
        got = [text for text, _ in await asyncio.gather(*together)]
    assert got == wanted


async def test_a_short_answer_has_room_for_the_draft(tiny_model_path: Path, probes: Probes) -> None:
    async with running(tiny_model_path) as system:
        await stored(system)
        given = replace(request("b", SHUFFLED, max_tokens=1), blend=BlendOptions(max_kl=0.0))
        _, end = await (await system.submit(given)).result()
    assert end.usage.output_tokens == 1


async def test_the_server_bounds_requests_that_do_not(tiny_model_path: Path, probes: Probes) -> None:
    async with running(tiny_model_path, max_kl=0.0) as system:
        await stored(system)
        _, end = await ask(system, "b")
        _, wide = await ask(system, "c", max_kl=1000.0)
    assert (end.usage.recompute_ratio, wide.usage.recompute_ratio) == (1.0, 0.15)


async def test_each_way_of_choosing_rows_is_measured_once(
    tiny_model_path: Path, tmp_path: Path, probes: Probes
) -> None:
    for _ in range(2):
        async with running(tiny_model_path, store=tmp_path) as system:
            await ask(system, "a", max_kl=1.0)
            await ask(system, "b", max_kl=1.0, recompute_ratio=0.4)
            await ask(system, "c", max_kl=1.0, selection=SelectionOptions(selector="query"))
            await ask(system, "d")
    assert probes.calls == 2
    note = await asyncio.to_thread(read_note, tmp_path, "bounds")
    assert len(note["models"]) == 2


async def test_a_model_that_cannot_be_measured_is_served_by_full_prefill(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Iterator[Sample | None]:
        raise Unfit("the probes cannot be asked")

    monkeypatch.setattr(bounds, "begin_samples", refuse)
    async with running(tiny_model_path) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full")
        text, end = await ask(system, "b", max_kl=0.5)
        gate = system.ready().details["gate"]
    assert (text, end.usage.mode) == (full, "full")
    assert "full prefill: the probes cannot be asked" in end.usage.notes[0]
    assert "the probes cannot be asked" in str(gate)


async def test_the_probes_of_a_real_run_give_an_estimate(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = calibration_questions(2, 1)
    monkeypatch.setattr(bounds, "calibration_questions", lambda: few)
    async with running(large) as system:
        _, end = await ask(system, "b", max_kl=1000.0, selection=SelectionOptions(selector="random"))
    assert end.usage.mode == "blend"


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        (BlendOptions(max_kl=-1.0), r"blend\.max_kl is -1\.0; it must lie in 0\.\.1000"),
        (BlendOptions(max_kl=float("nan")), r"blend\.max_kl is nan; it must lie in 0\.\.1000"),
        (
            BlendOptions(max_kl=0.1, selection=SelectionOptions(thresholds=(0.1,))),
            r"blend\.max_kl: thresholds say themselves how many rows are recomputed",
        ),
    ],
)
async def test_a_bound_that_cannot_be_is_refused(tiny_model_path: Path, blend: BlendOptions, message: str) -> None:
    async with running(tiny_model_path) as system:
        with pytest.raises(RequestError, match=message) as caught:
            await system.submit(replace(request("b", SHUFFLED), blend=blend))
    assert caught.value.param == "blend.max_kl"


@pytest.mark.parametrize("value", [-0.1, 1001.0, float("inf"), "x"])
def test_a_server_is_not_set_to_a_bound_that_cannot_be(value: object) -> None:
    with pytest.raises(RequestError, match="max_kl"):
        Settings(max_kl=value)  # type: ignore[arg-type]


def test_seeds_and_budgets_share_an_estimate() -> None:
    assert kind_of(SelectorSpec(recompute_ratios=(0.2,), seed=4)) == SelectorSpec()


async def test_nothing_is_measured_where_nothing_is_bounded(tiny_model_path: Path, probes: Probes) -> None:
    async with running(tiny_model_path) as system:
        await ask(system, "a")
        await ask(system, "b", mode="reuse", max_kl=0.1)
    assert probes.calls == 0
