"""Gemma 3 270M through the real step, where it has been pulled: its terms forbid pulling it unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import reference_from_gguf
from model_files import relative_error
from tiny_models import Bench, DictSource, Run

from kvblend.cli.models import KNOWN_MODELS
from kvblend.engine.layout import PromptLayout, Reuse
from kvblend.engine.loaders.load import LoadedModel, load_model
from kvblend.engine.prompt import PromptDocument, build_prompt, system_ids
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.divergence import DivergenceSelector
from kvblend.engine.selectors.query import QuerySelector
from kvblend.samples import QUESTION, SYSTEM, load

TOKENS = 32
TOLERANCE = 1e-4
# ids the SentencePiece library gives with this vocabulary
KNOWN_IDS = [
    (
        "The quick brown fox can't jump; it'll rest.",
        [818, 3823, 8864, 37423, 740, 236789, 236745, 9212, 236793, 625, 236789, 859, 1884, 236761],
    ),
    (
        "  a\n\n\tb = {1, 2}  \n",
        [138, 236746, 108, 255968, 236763, 578, 642, 236770, 236764, 236743, 236778, 236783, 138, 107],
    ),
    (
        "Ünïcödé: 东京都 and мир! 🙂",
        [238194, 236749, 238527, 236755, 55515, 236859, 236787, 207431, 58584, 532, 58562, 236888, 57235],
    ),
    ("kebab-case \r\n line", [236767, 46109, 236772, 4925, 236743, 251, 107, 1757]),
    ("a" * 50 + " " * 9 + "b", [128820, 128820, 128820, 128820, 128820, 128820, 9236, 145, 236763]),
    ("x\u00a0y\u2003z\ufeff\u2581 \x00", [236781, 432, 398, 236762, 464, 366, 369, 236802, 237922, 138, 238]),
    ("<table><tr><td>1</td></tr></table> <eos>", [168, 173, 175, 236770, 183, 181, 176, 655, 211827, 236813]),
]


@pytest.fixture(scope="module")
def path() -> Path:
    known = KNOWN_MODELS["gemma3-270m"]
    if not known.path.is_file():
        pytest.skip(f"Gemma 3 270M is not at {known.path}; its terms apply: run `kvblend pull gemma3-270m`")
    return known.path


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def layout(loaded: LoadedModel) -> PromptLayout:
    """Longer than a window, so that local layers do not see all of it."""
    documents = [PromptDocument(sample.title, sample.text) for sample in load()[:3]]
    layout = build_prompt(loaded.tokenizer, loaded.template, SYSTEM, [("user", QUESTION)], documents)
    assert loaded.model.config.window_of(0, layout.num_tokens - 1) == 512
    return layout


@pytest.fixture(scope="module")
def full(loaded: LoadedModel, layout: PromptLayout) -> Run:
    bench = Bench(loaded.model)
    fresh = [Reuse.FRESH] * len(layout.segments)
    return bench.finish(bench.start(layout, fresh, 0.0, DivergenceSelector(), extra=TOKENS))


@pytest.fixture(scope="module")
@torch.inference_mode()
def theirs(path: Path, layout: PromptLayout) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits behind the prompt and its greedy tokens."""
    model = reference_from_gguf(path)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    batch = torch.tensor([layout.token_ids])
    found = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.logits[0][0], found.sequences[0, layout.num_tokens :].tolist()


@pytest.mark.parametrize(("text", "ids"), KNOWN_IDS, ids=range(len(KNOWN_IDS)))
def test_ids_are_those_of_sentencepiece(loaded: LoadedModel, text: str, ids: list[int]) -> None:
    assert loaded.tokenizer.encode(text, special=False) == ids
    assert loaded.tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_turns_of_a_chat_are_control_tokens(loaded: LoadedModel) -> None:
    assert loaded.tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>\n", special=True) == [
        105,
        2364,
        107,
        2202,
        106,
        107,
    ]
    assert not {105, 106} & set(loaded.tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>", special=False))


def test_a_prompt_begins_with_the_begin_token(loaded: LoadedModel) -> None:
    assert system_ids(loaded.tokenizer, loaded.template, None) == (2,)


def test_every_sixth_layer_sees_all(loaded: LoadedModel) -> None:
    config = loaded.model.config
    assert [layer for layer in range(config.num_layers) if not config.windowed(layer)] == [5, 11, 17]


def test_a_full_prefill_equals_transformers(full: Run, theirs: tuple[torch.Tensor, list[int]]) -> None:
    assert relative_error(full.logits, theirs[0]) < TOLERANCE


@torch.inference_mode()
def test_greedy_tokens_equal_those_of_transformers(
    loaded: LoadedModel, layout: PromptLayout, theirs: tuple[torch.Tensor, list[int]]
) -> None:
    bench = Bench(loaded.model)
    fresh = [Reuse.FRESH] * len(layout.segments)
    run = bench.finish(bench.start(layout, fresh, 0.0, DivergenceSelector(), extra=TOKENS))
    tokens = [int(run.logits.argmax())]
    while len(tokens) < TOKENS:
        run.sequence.append_token(tokens[-1])
        run = bench.finish(run.sequence)
        tokens.append(int(run.logits.argmax()))
    assert tokens == theirs[1]


@pytest.mark.parametrize("selector", [DivergenceSelector(), QuerySelector()], ids=["divergence", "query"])
def test_ratio_one_equals_full_prefill(
    loaded: LoadedModel, layout: PromptLayout, full: Run, selector: Selector
) -> None:
    bench = Bench(loaded.model)
    system = layout.segments[0].token_ids
    chunks = [segment for _, segment in layout.chunks()]
    payloads = {0: bench.payloads((), system)}
    payloads.update({chunk.start: bench.payloads(system, chunk.token_ids) for chunk in chunks})
    reuse = [Reuse.EXACT, Reuse.EXACT, Reuse.CACHED, Reuse.CACHED, Reuse.FRESH]
    got = bench.finish(bench.start(layout, reuse, 1.0, selector, DictSource(payloads), extra=TOKENS))
    assert relative_error(got.logits, full.logits) < TOLERANCE
    assert relative_error(got.k, full.k) < TOLERANCE
    assert relative_error(got.v, full.v) < TOLERANCE
