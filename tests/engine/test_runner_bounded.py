"""A bounded blend in the runner: raised from layers that a loader hands out once, with figures of what was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiny_models import CPU, Bench, DictSource, random_ids, tiny_model

from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.bound import KLModel
from kvblend.engine.kv import SlabPool
from kvblend.engine.layout import BlendPlan, PromptLayout, Reuse, SegmentKind
from kvblend.engine.output import OutputText
from kvblend.engine.payloads import Payload
from kvblend.engine.runner import PrefillFigures, Runner, SequenceSpec
from kvblend.engine.sampling import SamplingPlan
from kvblend.engine.selectors.bounded import BoundedSelector
from kvblend.engine.selectors.spec import SelectorSpec

MODEL = tiny_model()
SYSTEM, CHUNK, OTHER, QUESTION = (random_ids(n, n) for n in (6, 15, 12, 5))
KIND = SegmentKind
LAYOUT = PromptLayout.of([(KIND.SYSTEM, SYSTEM), (KIND.CHUNK, CHUNK), (KIND.CHUNK, OTHER), (KIND.QUESTION, QUESTION)])
MARKS = (Reuse.FRESH, Reuse.CACHED, Reuse.CACHED, Reuse.FRESH)


class OnceSource(DictSource):
    """Hands each layer out once, as a loader does."""

    def __init__(self, payloads: Mapping[int, Sequence[memoryview]]) -> None:
        super().__init__(payloads)
        self.given: set[int] = set()

    def take(self, layer: int) -> Sequence[tuple[int, Payload]] | None:
        if layer in self.given:
            return None
        self.given.add(layer)
        return super().take(layer)


class Numbers:
    """A detokeniser that writes ids as numbers."""

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


def figures_of(level: float, kl_max: float) -> PrefillFigures:
    """Run the prompt with estimates that are exp(level - 4 ratio), to its first token."""
    bench = Bench(MODEL)
    stored = {segment.start: bench.payloads(SYSTEM, segment.token_ids) for _, segment in LAYOUT.chunks()}
    selector = BoundedSelector(SelectorSpec(residual="mean"), 0.2, kl_max, KLModel(level, 0.0, -4.0, 0.0, 0.0, 0.0, 1))
    runner = Runner(MODEL, SdpaBackend(), SlabPool(MODEL.config, 256, MODEL.dtype, CPU))
    output = OutputText(Numbers(), (), (), 8)
    plan, size = BlendPlan.of(LAYOUT, MARKS, 0.2), LAYOUT.num_tokens + 8
    runner.start(SequenceSpec("r", plan, selector, size, OnceSource(stored), (), SamplingPlan(0.0, 1.0, 0), output))
    for _ in range(100):
        (result,) = runner.tick([("r", 1000, None)])
        if result.status == "sampled":
            assert result.figures is not None
            return result.figures
        assert result.status == "running", result
    raise AssertionError("the prompt does not end")


def test_a_full_prefill_at_last_is_said_with_what_was_tried() -> None:
    figures = figures_of(9.0, 0.1)
    assert (figures.recompute_ratio, figures.kl_estimate, figures.ratios_tried) == (1.0, 0.0, (0.2,))
    assert figures.tokens_recomputed == len(CHUNK) + len(OTHER)


def test_a_raise_loads_its_layers_once_more() -> None:
    figures = figures_of(0.0, 0.3)
    assert (figures.recompute_ratio, figures.ratios_tried) == (0.4, (0.2,))
    assert figures.kl_estimate is not None
    assert 0.0 < figures.kl_estimate <= 0.3


def test_what_holds_at_once_is_not_raised() -> None:
    figures = figures_of(0.0, 0.9)
    assert (figures.recompute_ratio, figures.ratios_tried) == (0.2, ())
