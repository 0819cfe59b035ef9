"""Pieces of work and names of findings."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from tiny_models import tiny_config

from kvblend.actors.judging import finding_key, judged_conditioning, next_piece
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.runner import Runner
from kvblend.engine.tokenizer import Tokenizer

ENGINE = Engine(
    cast(Runner, None), tiny_config(), cast(Tokenizer, None), cast(ChatTemplate, None), "print", "float32", "sdpa"
)


def test_pieces_end_without_an_exception() -> None:
    pieces = iter([None, 7])
    assert [next_piece(pieces) for _ in range(3)] == ["more", 7, "end"]


@pytest.mark.parametrize(
    ("kind", "judged"), [("bare", "bare"), ("system", "system"), ("warm", "warm"), ("neighbours", "warm")]
)
def test_neighbours_are_judged_as_warm(kind: str, judged: str) -> None:
    assert judged_conditioning(Settings(conditioning=kind)) == judged  # type: ignore[arg-type]


def test_a_finding_is_of_one_model_and_setting() -> None:
    settings = Settings()
    keys = {
        finding_key(settings, ENGINE),
        finding_key(settings, ENGINE, 0.15),
        finding_key(settings, replace(ENGINE, fingerprint="other")),
        finding_key(replace(settings, warm_text="mill"), ENGINE),
        finding_key(replace(settings, conditioning="warm"), ENGINE),
    }
    assert len(keys) == 5
    assert finding_key(settings, ENGINE) in keys
