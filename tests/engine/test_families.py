"""Every model family against transformers, float32: full prefill, ratio 1.0, greedy text; and the known mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from blends import assert_equal, blend
from family_models import SCALED, VARIANTS, WINDOWED, save_family, their_answer, their_logits
from model_files import dense_logits, relative_error
from tiny_models import Bench, random_ids

from kvblend.engine.config import RopeConfig, UnsupportedModel
from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.engine.loaders.families import FAMILIES, find_family
from kvblend.engine.loaders.load import load_model
from kvblend.engine.model import Model
from kvblend.engine.rope import RopeTable

KIND = SegmentKind
SYSTEM = (5, 6, 7, *random_ids(9, 1, 300))
CHUNKS = [random_ids(count, 40 + count, 300) for count in (41, 47, 38)]
QUESTION = random_ids(13, 9, 300)
LAYOUT = PromptLayout.of([(KIND.SYSTEM, SYSTEM), *((KIND.CHUNK, c) for c in CHUNKS), (KIND.QUESTION, QUESTION)])
TOLERANCE = 1e-4
# their tables depend on the length of what has been generated too; here the prompt's length decides
BY_LENGTH = ("llama dynamic",)

Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Directory of a variant, written once."""
    return cache(lambda name: save_family(tmp_path_factory.mktemp("family"), name))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(path, dtype, torch.device("cpu")).model


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_every_row_equal_those_of_transformers(saved: Saved, name: str) -> None:
    ours = dense_logits(load(saved(name)), LAYOUT.token_ids)
    assert relative_error(ours, their_logits(saved(name), LAYOUT.token_ids)) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_a_full_prefill_equals_transformers(saved: Saved, name: str) -> None:
    ours = Bench(load(saved(name))).full(LAYOUT).logits
    assert relative_error(ours, their_logits(saved(name), LAYOUT.token_ids)[-1]) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_ratio_one_equals_transformers(saved: Saved, name: str) -> None:
    run = blend(Bench(load(saved(name))), LAYOUT)
    assert run.sequence.context.cached_rows.shape[0] > 80
    assert relative_error(run.logits, their_logits(saved(name), LAYOUT.token_ids)[-1]) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_ratio_one_equals_a_full_prefill_in_float64(saved: Saved, name: str) -> None:
    bench = Bench(load(saved(name), torch.float64))
    assert_equal(blend(bench, LAYOUT), bench.full(LAYOUT))


@pytest.mark.parametrize("name", VARIANTS)
def test_layer_zero_keys_of_stored_chunks_equal_fresh_ones(saved: Saved, name: str) -> None:
    assert blend(Bench(load(saved(name))), LAYOUT, ratio=0.2).sequence.parity_error < 1e-5


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in BY_LENGTH])
def test_greedy_tokens_equal_those_of_transformers(saved: Saved, name: str) -> None:
    bench = Bench(load(saved(name)))
    run = bench.full(LAYOUT)
    tokens = [int(run.logits.argmax())]
    while len(tokens) < 6:
        run.sequence.append_token(tokens[-1])
        run = bench.finish(run.sequence)
        tokens.append(int(run.logits.argmax()))
    assert tokens == their_answer(saved(name), LAYOUT.token_ids, 6)


def unscaled_span(model: Model) -> Callable[[RopeTable, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """The known mistake: stored keys rotated by the base frequencies alone."""
    plain = RopeConfig(model.config.rope.theta, rotary_fraction=model.config.rope.rotary_fraction)
    table = RopeTable(model.config, model.dtype, model.device, rope=plain)
    return lambda _, start, end: (table.cos[start:end], table.sin[start:end])


# of the other two, the frequencies of the test's length are the base ones, or nearly
@pytest.mark.parametrize("name", [name for name in SCALED if name not in ("phi3 partial", "phi3 short")])
def test_rotating_stored_keys_by_the_base_frequencies_shows(
    saved: Saved, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(saved(name))
    monkeypatch.setattr(RopeTable, "span", unscaled_span(model))
    assert blend(Bench(model), LAYOUT, ratio=0.2).sequence.parity_error > 1e-2


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_is_off_by_one_shows(saved: Saved, name: str, change: int) -> None:
    model = load(saved(name))
    window = model.config.sliding_window
    assert window is not None
    model.config = replace(model.config, sliding_window=window + change)
    theirs = their_logits(saved(name), LAYOUT.token_ids)
    assert relative_error(dense_logits(model, LAYOUT.token_ids), theirs) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma3", "gemma3 linear"])
def test_swapped_bases_of_local_and_global_layers_show(saved: Saved, name: str) -> None:
    model = load(saved(name))
    config = model.config
    assert config.rope_local is not None
    swapped = Model(replace(config, rope=config.rope_local, rope_local=config.rope), model.weights)
    theirs = their_logits(saved(name), LAYOUT.token_ids)
    assert relative_error(dense_logits(swapped, LAYOUT.token_ids), theirs) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "phi3 partial"])
def test_bfloat16_stays_near_float32(saved: Saved, name: str) -> None:
    exact = dense_logits(load(saved(name)), LAYOUT.token_ids[:20])
    assert relative_error(dense_logits(load(saved(name), torch.bfloat16), LAYOUT.token_ids[:20]), exact) < 0.2


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported; supported: llama, mistral, qwen2"),
        ({"model_type": "gemma2"}, r"'gemma2' is not supported \(it caps attention scores"),
        ({"model_type": "gemma3"}, r"'gemma3' is not supported \(its text part alone, model_type gemma3_text"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"model_type": "phi3", "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForTokenClassification"]}, "Qwen3ForTokenClassification"),
        ({"model_type": "mistral", "quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(data: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        find_family(data)


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_family_leaves_unsaid_is_what_transformers_fills_in(kind: str) -> None:
    from transformers import AutoConfig

    theirs, family = AutoConfig.for_model(kind), FAMILIES[kind]
    assert family.context == theirs.max_position_embeddings
    assert family.eps == theirs.rms_norm_eps
    assert family.tied == theirs.tie_word_embeddings
    assert (family.kv_heads or theirs.num_attention_heads) == theirs.num_key_value_heads
    assert family.head_dim in (None, getattr(theirs, "head_dim", None))
    assert family.windows in ("none", "qwen") or family.window == theirs.sliding_window
