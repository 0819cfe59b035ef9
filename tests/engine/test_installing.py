"""Stored layers come into the slots once, in order, and not before they are loaded."""

from __future__ import annotations

import torch
from blends import SYSTEM, A, C, prompt
from tiny_models import Bench, DictSource, tiny_model

from kvblend.engine.installing import install_layer
from kvblend.engine.layout import Reuse
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.sequence import SequenceState

BENCH = Bench(tiny_model())
LAYOUT = prompt([C, A])


def blend_of(ready: int) -> tuple[SequenceState, DictSource]:
    payloads = {0: BENCH.payloads((), SYSTEM)}
    payloads |= {segment.start: BENCH.payloads(SYSTEM, segment.token_ids) for _, segment in LAYOUT.chunks()}
    source = DictSource(payloads, ready)
    marks = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.FRESH]
    return BENCH.start(LAYOUT, marks, 0.3, DivergenceSelector(), source), source


def test_what_is_not_loaded_is_not_installed() -> None:
    sequence, _ = blend_of(ready=0)
    sequence.slab.k[0].zero_()  # fresh slots hold arbitrary numbers
    assert not install_layer(BENCH.model, sequence, 0)
    assert sequence.installed == 0
    assert not sequence.slab.k[0].any()


def test_a_layer_that_is_loaded_is_what_a_full_prefill_has_there() -> None:
    sequence, _ = blend_of(ready=1)
    assert install_layer(BENCH.model, sequence, 0)
    question = LAYOUT.segments[-1].start
    full = BENCH.full(LAYOUT)
    assert torch.allclose(sequence.slab.k[0][:, :question], full.k[0][:, :question], rtol=0, atol=1e-12)
    assert torch.allclose(sequence.slab.v[0][:, :question], full.v[0][:, :question], rtol=0, atol=1e-12)


def test_a_layer_is_installed_once() -> None:
    sequence, source = blend_of(ready=1)
    install_layer(BENCH.model, sequence, 0)
    sequence.slab.k[0].zero_()
    source.ready = 0
    assert install_layer(BENCH.model, sequence, 0)
    assert not sequence.slab.k[0].any()
