from __future__ import annotations

from dataclasses import replace

import pytest

from kvblend.api.server.openai.shapes import ChatShape, Shape, TextShape, kvblend_body, usage_body
from tests.api.scripted import USAGE


@pytest.mark.parametrize("shape", [ChatShape(), TextShape()])
def test_every_choice_knows_its_index_and_whether_it_ended(shape: Shape) -> None:
    choices = [shape.piece(3, "x"), shape.ending(3, "length"), shape.whole(3, "x", "stop")]
    assert {choice["index"] for choice in choices} == {3}
    assert [choice["finish_reason"] for choice in choices] == [None, "length", "stop"]


def test_usage_is_summed_over_prompts() -> None:
    body = usage_body([USAGE, replace(USAGE, prompt_tokens=1, output_tokens=1, tokens_reused=0)])
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (101, 4, 105)
    assert body["prompt_tokens_details"]["cached_tokens"] == 60


def test_our_figures_are_one_object_or_a_list() -> None:
    assert kvblend_body([USAGE])["tokens_reused"] == 60
    assert [figures["tokens_reused"] for figures in kvblend_body([USAGE, USAGE])] == [60, 60]
