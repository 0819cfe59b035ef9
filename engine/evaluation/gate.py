"""Whether a model may be served blended: parity of layer 0, exactness where blending must be exact, divergence.

The checks compare runs of one model with each other, so they need no other implementation of it; what is wrong in the
same way in all of them (the weights, say) is for the tests of a model family to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvblend.engine.capture import payload_tensors
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import ModelConfig
from kvblend.engine.evaluation.chunk_kv import ChunkKV, Payloads, Prefiller, captured
from kvblend.engine.evaluation.exactness import EveryNthRow, difference
from kvblend.engine.evaluation.forcing import Prefilled
from kvblend.engine.evaluation.gate_report import GateCheck, GateReport
from kvblend.engine.evaluation.metrics import kl_per_position
from kvblend.engine.evaluation.probes import make_probes
from kvblend.engine.evaluation.prompting import GOLD_TOKENS_MAX, PreparedQuestion, prepare_question
from kvblend.engine.evaluation.questions import Question
from kvblend.engine.kv import PAGE_TOKENS, SlabPool
from kvblend.engine.layout import BlendPlan, Reuse, SegmentKind
from kvblend.engine.precision import Precision
from kvblend.engine.recommended import Conditioning
from kvblend.engine.selectors.base import Selector
from kvblend.engine.selectors.build import build_selector
from kvblend.engine.selectors.plain import PlainSelector
from kvblend.engine.selectors.spec import SelectorSpec
from kvblend.engine.step import Step
from kvblend.engine.tokenizer import Tokenizer

GATE_SEED, GATE_PROBES, GATE_WORDS = 20_250_101, 2, 12
STORE_KL_MAX = 1e-3
# what rounding may do to numbers that would be equal in exact arithmetic, as a share of the largest of them
RELATIVE_MAX = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
_EVERY = 5


@dataclass(frozen=True, slots=True)
class GateSetting:
    """The setting to be judged: how rows are chosen and how many, what chunks are computed behind, the limit of KL."""

    spec: SelectorSpec
    recompute_ratio: float
    conditioning: Conditioning
    kl_max: float


class GateUnfit(ValueError):
    """The gate cannot judge this model; the message says why."""


def gate_prompts(
    tokenizer: Tokenizer, template: ChatTemplate, context_length: int, probes: Sequence[Question] | None = None
) -> list[PreparedQuestion]:
    """The built-in probes, or those given, as prompts. Raises GateUnfit where they do not fit the model's context."""
    questions = make_probes(GATE_SEED, GATE_PROBES, GATE_WORDS) if probes is None else probes
    if not questions:
        raise GateUnfit("there are no probes")
    try:
        return [
            prepare_question(tokenizer, template, question, index, context_length)
            for index, question in enumerate(questions)
        ]
    except ValueError as error:
        raise GateUnfit(f"the probes cannot be asked: {error}") from None


class ModelGate:
    """Runs the checks of one model on prompts of at least two chunks. `warm` are the ids of the unrelated text.

    `through` is what happens to stored KV on its way to the store and back; nothing, if all is well. `precision` is the
    form it is stored in; None: the compute dtype.
    """

    def __init__(
        self,
        step: Step,
        prompts: Sequence[PreparedQuestion],
        warm: Sequence[int],
        setting: GateSetting,
        through: Callable[[Payloads], Payloads] | None = None,
        precision: Precision | None = None,
    ) -> None:
        config = step.model.config
        head = prompts[0].layout.segments[0]
        system = head.token_ids if head.kind is SegmentKind.SYSTEM else ()
        longest = max(prompt.layout.num_tokens for prompt in prompts) + len(warm) + GOLD_TOKENS_MAX
        # three sequences at once at most, in whole pages
        pool = SlabPool(config, 3 * (longest + PAGE_TOKENS), step.model.dtype, step.model.device)
        self._model = step.model
        self._config: ModelConfig = config
        self._prefiller = Prefiller(step, pool)
        self._precision = precision or self._prefiller.precision
        self._server = Prefiller(step, pool, self._precision)
        self._prompts = prompts
        self._setting = setting
        self._through = through or _untouched
        self._kv = ChunkKV(self._prefiller, system, warm)
        self._before_chunk = len(system) + len(warm)
        self._exact_limit = RELATIVE_MAX[step.model.dtype]

    def checks(self) -> Iterator[GateCheck | None]:
        """The checks one by one; None where a piece of work is done and more is to come. Run it to the end or close it.

        In order: `layer0_parity`, `prefix`, `scattered_rows`, `ratio_one`, where the stored form is narrow
        `store_dtype`, and `kl_mean`.
        """
        values: list[float] = []
        rounded: list[float] = []
        for index, prompt in enumerate(self._prompts):
            stored: dict[int, Payloads] = {}
            for payloads in self._store(prompt):
                stored = payloads
                yield None
            before_question = range(len(prompt.layout.segments) - 1)
            full = self._run(self._prefiller, prompt, None, captures=before_question if index == 0 else ())
            try:
                yield None
                wanted = full.force(prompt.gold)
                if index == 0:
                    yield from self._exact_checks(prompt, stored, full, wanted)
                values += kl_per_position(wanted, self._blended(prompt, stored))
                yield None
                if self._precision.is_narrow:
                    rounded += self._rounding_kl(prompt, stored)
                    yield None
            finally:
                self._prefiller.release(full)
        mean = sum(values) / len(values)
        setting = self._setting
        if rounded:
            yield self._judge_rounding(rounded)
        said = f"mean KL of {setting.spec.selector} at {setting.recompute_ratio:g} from a full prefill"
        yield GateCheck.of("kl_mean", mean, setting.kl_max, said)

    def _exact_checks(
        self, prompt: PreparedQuestion, stored: dict[int, Payloads], full: Prefilled, wanted: torch.Tensor
    ) -> Iterator[GateCheck]:
        """Everything that must be equal but for rounding. `wanted` are the full prefill's logits over the answer."""
        yield self._check_parity(prompt, stored, full)
        yield self._check_prefix(prompt, stored, full)
        yield self._check_scattered(prompt, full, wanted)
        yield self._check_ratio_one(prompt, stored, wanted)

    def check_store_dtype(self) -> Iterator[GateCheck | None]:
        """That check alone, the last thing to come, with None where a piece of work is done.

        Whether KV in its stored form answers as KV in the compute dtype does where nothing is computed again.
        """
        values: list[float] = []
        for prompt in self._prompts:
            stored: dict[int, Payloads] = {}
            for payloads in self._store(prompt):
                stored = payloads
                yield None
            values += self._rounding_kl(prompt, stored)
            yield None
        yield self._judge_rounding(values)

    def _rounding_kl(self, prompt: PreparedQuestion, stored: dict[int, Payloads]) -> list[float]:
        """KL(stored wide || stored narrow) at each position of the answer, all reused."""
        wide = self._logits(self._prefiller, prompt, stored, 0.0, PlainSelector())
        narrow = self._logits(self._server, prompt, self._served(prompt, stored), 0.0, PlainSelector())
        return kl_per_position(wide, narrow)

    def _judge_rounding(self, values: Sequence[float]) -> GateCheck:
        said = f"mean KL of plain reuse of KV stored as {self._precision.name} from that of KV stored as computed"
        return GateCheck.of("store_dtype", sum(values) / len(values), STORE_KL_MAX, said)

    # ---- runs ----

    def _store(self, prompt: PreparedQuestion) -> Iterator[dict[int, Payloads]]:
        """What a store that rounds nothing has of the prompt, by first position: it grows by a segment at a time."""
        stored: dict[int, Payloads] = {}
        system = self._kv.system_payloads()
        if system is not None:
            stored[0] = self._through(system)
        for place, (_, segment) in enumerate(prompt.layout.chunks()):
            fits = self._before_chunk + len(segment.token_ids) <= self._config.context_length
            # the first chunk is exact behind the system prompt
            behind: Conditioning = self._setting.conditioning if place and fits else "system"
            stored[segment.start] = self._through(self._kv.compute(behind, segment.token_ids))
            yield stored

    def _served(self, prompt: PreparedQuestion, stored: dict[int, Payloads]) -> dict[int, Payloads]:
        """The stored form of it."""
        sizes = {segment.start: len(segment.token_ids) for segment in prompt.layout.segments}
        return {start: self._server.store(payloads, sizes[start]) for start, payloads in stored.items()}

    def _run(
        self,
        by: Prefiller,
        prompt: PreparedQuestion,
        stored: dict[int, Payloads] | None,
        ratio: float = 0.0,
        selector: Selector | None = None,
        captures: Sequence[int] = (),
    ) -> Prefilled:
        """Prefill over stored KV, or all of it where there is none; the caller releases it."""
        layout = prompt.layout
        marks = [Reuse.FRESH] * len(layout.segments)
        if stored is not None:
            first = next(index for index, _ in layout.chunks())
            for index in range(len(marks) - 1):
                marks[index] = Reuse.EXACT if index <= first else Reuse.CACHED
        plan = BlendPlan.of(layout, marks, ratio)
        extra = len(prompt.gold) + 1
        return by.run(plan, selector or PlainSelector(), stored, captures, extra)

    def _logits(
        self, by: Prefiller, prompt: PreparedQuestion, stored: dict[int, Payloads], ratio: float, selector: Selector
    ) -> torch.Tensor:
        """Logits over the gold answer `[gold tokens, vocab_size]` of one blend of KV in the form that `by` takes."""
        done = self._run(by, prompt, stored, ratio, selector)
        try:
            return done.force(prompt.gold).clone()
        finally:
            self._prefiller.release(done)

    def _blended(self, prompt: PreparedQuestion, stored: dict[int, Payloads]) -> torch.Tensor:
        """Logits of the setting to be judged, over KV in its stored form."""
        selector = build_selector(self._setting.spec)
        return self._logits(self._server, prompt, self._served(prompt, stored), self._setting.recompute_ratio, selector)

    # ---- single checks ----

    def _check_parity(self, prompt: PreparedQuestion, stored: dict[int, Payloads], full: Prefilled) -> GateCheck:
        reused = self._run(self._server, prompt, self._served(prompt, stored))
        try:
            end = prompt.layout.segments[-1].start
            pairs = zip(reused.slab.view(0, end), full.slab.view(0, end), strict=True)
            value = max(difference(loaded, fresh) for loaded, fresh in pairs)
        finally:
            self._prefiller.release(reused)
        said = "layer 0 of stored KV, rotated to its places, against fresh KV"
        return GateCheck.of("layer0_parity", value, self._exact_limit + self._precision.rounding_max, said)

    def _check_prefix(self, prompt: PreparedQuestion, stored: dict[int, Payloads], full: Prefilled) -> GateCheck:
        """Stored KV of what stands first must be what a full prefill computes there, in every layer."""
        value = 0.0
        for at, segment in enumerate(prompt.layout.segments):
            value = max(value, self._payload_difference(stored[segment.start], captured(full, at)))
            if segment.kind is SegmentKind.CHUNK:
                break
        said = "stored KV of the system prompt and the first chunk against a full prefill, layer by layer"
        return GateCheck.of("prefix", value, self._exact_limit, said)

    def _check_scattered(self, prompt: PreparedQuestion, full: Prefilled, wanted: torch.Tensor) -> GateCheck:
        """With stored KV that is exact in this very prompt, it must not matter which rows are computed again."""
        exact = {
            segment.start: self._through(captured(full, at)) for at, segment in enumerate(prompt.layout.segments[:-1])
        }
        value = difference(self._logits(self._prefiller, prompt, exact, 1.0 / _EVERY, EveryNthRow(_EVERY)), wanted)
        said = f"every {_EVERY}th row computed again over exact KV against a full prefill"
        return GateCheck.of("scattered_rows", value, self._exact_limit, said)

    def _check_ratio_one(
        self, prompt: PreparedQuestion, stored: dict[int, Payloads], wanted: torch.Tensor
    ) -> GateCheck:
        # ratios and thresholds of its own would keep the selector from taking every row
        spec = self._setting.spec.overridden({}, has_ratio=True)
        value = difference(self._logits(self._prefiller, prompt, stored, 1.0, build_selector(spec)), wanted)
        said = f"{spec.selector} at ratio 1.0 against a full prefill"
        return GateCheck.of("ratio_one", value, self._exact_limit, said)

    def _payload_difference(self, stored: Payloads, fresh: Payloads) -> float:
        worst = 0.0
        for pair in zip(stored, fresh, strict=True):
            (k, v), (fresh_k, fresh_v) = (self._tensors(payload) for payload in pair)
            worst = max(worst, difference(k, fresh_k), difference(v, fresh_v))
        return worst

    def _tensors(self, payload: memoryview, tokens: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        return payload_tensors(payload, self._config.num_kv_heads, self._config.head_dim, self._model.dtype, tokens)


def run_gate(gate: ModelGate) -> GateReport:
    """All checks in one go."""
    return GateReport(tuple(check for check in gate.checks() if check is not None))


def _untouched(payloads: Payloads) -> Payloads:
    return payloads
