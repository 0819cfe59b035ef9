"""Which tokens of a prompt repeat an earlier chunk, and that their slots are filled from the echo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import Bench, DictSource, random_ids, tiny_model

from kvblend.engine.contrast import contrast
from kvblend.engine.layout import PromptLayout, Reuse, SegmentKind
from kvblend.engine.repeats import REPEAT_TOKENS, Repeats, repeated_tokens
from kvblend.engine.rope import rotate
from kvblend.engine.selectors.plain import PlainSelector

CHUNK = SegmentKind.CHUNK
MODEL = tiny_model()


def layout_of(*chunks: tuple[int, ...]) -> PromptLayout:
    return PromptLayout.of([(CHUNK, ids) for ids in chunks])


def test_a_run_of_three_repeats_from_its_third_token_on() -> None:
    layout = layout_of((1, 2, 3, 4, 5), (9, 2, 3, 4, 8))
    assert repeated_tokens(layout) == {0: [], 5: [3]}


def test_what_a_chunk_says_twice_itself_is_no_repeat() -> None:
    assert repeated_tokens(layout_of((1, 2, 3, 1, 2, 3), (4, 5, 6))) == {0: [], 6: []}


def test_a_run_across_the_border_of_two_chunks_does_not_count() -> None:
    assert repeated_tokens(layout_of((1, 2), (3, 9), (1, 2, 3))) == {0: [], 2: [], 4: []}


def test_only_chunks_repeat_and_only_chunks_are_repeated() -> None:
    kinds = (SegmentKind.SYSTEM, CHUNK, SegmentKind.QUESTION)
    layout = PromptLayout.of([(kind, (1, 2, 3, 4)) for kind in kinds])
    assert repeated_tokens(layout) == {4: []}


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=5))
def test_repeats_are_those_of_a_plain_search(chunks: list[list[int]]) -> None:
    layout = layout_of(*map(tuple, chunks))
    for number, (_, segment) in enumerate(layout.chunks()):
        before = [other.token_ids for _, other in list(layout.chunks())[:number]]
        wanted = []
        for at in range(REPEAT_TOKENS - 1, len(segment.token_ids)):
            run = segment.token_ids[at - REPEAT_TOKENS + 1 : at + 1]
            if any(run == ids[i : i + REPEAT_TOKENS] for ids in before for i in range(len(ids))):
                wanted.append(at)
        assert Repeats(layout).of(segment.start).tolist() == wanted


def test_a_segment_that_is_no_chunk_has_no_repeats() -> None:
    assert Repeats(layout_of((1, 2, 3))).of(77).tolist() == []


@pytest.mark.parametrize("has_echo", [True, False])
def test_repeating_tokens_get_the_echo_and_the_others_the_first_form(has_echo: bool) -> None:
    first, question = random_ids(12, 1), random_ids(4, 2)
    again = (*random_ids(3, 3), *first[2:9], *random_ids(2, 4))
    bench, config = Bench(MODEL), MODEL.config
    shape = (config.num_kv_heads, config.head_dim, MODEL.dtype)
    plain, echo = bench.payloads((), again), bench.payloads(again, again)
    stored = contrast(plain, plain, *shape, echo=echo if has_echo else None)
    layout = PromptLayout.of([(CHUNK, first), (CHUNK, again), (SegmentKind.QUESTION, question)])
    source = DictSource({0: bench.payloads((), first), 12: stored})
    marks = [Reuse.EXACT, Reuse.CACHED, Reuse.FRESH]
    state = bench.start(layout, marks, 0.0, PlainSelector(), source)
    bench.finish(state)
    rows = Repeats(layout).of(12)
    assert rows.tolist() == list(range(5, 10))
    wanted = torch.stack([torch.frombuffer(p, dtype=MODEL.dtype).view(2, shape[0], 12, shape[1]) for p in plain])
    if has_echo:
        echoed = torch.stack([torch.frombuffer(p, dtype=MODEL.dtype).view(2, shape[0], 12, shape[1]) for p in echo])
        wanted[:, :, :, rows] = echoed[:, :, :, rows]
    cos, sin = MODEL.ropes.tables(layout.num_tokens, layout.num_tokens)[0].span(12, 24)
    for index in range(config.num_layers):
        k, v = state.slab.view(index, 24)
        torch.testing.assert_close(v[:, 12:], wanted[index, 1])
        torch.testing.assert_close(k[:, 12:], rotate(wanted[index, 0], cos, sin))


def test_the_echo_is_told_apart_by_its_length_alone() -> None:
    bench, config, ids = Bench(MODEL), MODEL.config, random_ids(5, 8)
    shape = (config.num_kv_heads, config.head_dim, MODEL.dtype)
    plain, echo = bench.payloads((), ids), bench.payloads(ids, ids)
    stored = contrast(plain, plain, *shape, echo=echo)
    assert bytes(stored[1][-len(echo[1]) :]) == bytes(echo[1])
    assert len(stored[1]) == 2 * len(plain[1]) + 4 * 5
