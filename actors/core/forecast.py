"""What a job costs and how long one that comes now would wait, from what those before it took. Unknown is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvblend.actors.core.entry import Entry
from kvblend.actors.core.events import Job
from kvblend.actors.core.lifecycle import Phase
from kvblend.actors.core.speeds import TOKENS_TINY, Mean
from kvblend.engine.layout import SegmentKind

WEIGHT = 0.2
"""What a new sample counts against all before it."""
MARGIN = 0.25
"""A forecast may be this much too long: only who would be late all the same is refused."""


class Forecast:
    """Learns from finished prompts and answers: device time per prompt token by mode, per answer, load time per token.

    Device time is a job's share of the steps it was in, so that it adds up: a queue takes the sum of its parts.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._prompt_s: dict[str, Mean] = {}
        self._answer_s = Mean(WEIGHT)
        self._load_s = Mean(WEIGHT)
        self._begun_s: dict[str, Mean] = {}
        self._step_s = Mean(WEIGHT)
        self._answer_tokens = Mean(WEIGHT)

    def note_prompt(self, entry: Entry) -> None:
        """Its prompt is computed; `device_ms` is what that took. What went on from kept KV says nothing of others."""
        if entry.continued is not None:
            return
        mean = self._prompt_s.setdefault(_kind(entry.job), Mean(WEIGHT))
        tokens = max(1, entry.job.layout.num_tokens)
        mean.note(1e-3 * entry.device_ms / tokens, tiny=tokens < TOKENS_TINY)

    def note_answer(self, decode_ms: float, tokens: int) -> None:
        """An answer of so many tokens has ended; those behind the first took so much device time."""
        self._answer_s.note(1e-3 * decode_ms)
        self._answer_tokens.note(tokens)

    def note_begun(self, entry: Entry) -> None:
        """Its first token is there: how long that took since it was admitted, beside all others."""
        if entry.continued is None and entry.first_token_s is not None:
            mean = self._begun_s.setdefault(_kind(entry.job), Mean(WEIGHT))
            tokens = max(1, entry.job.layout.num_tokens)
            mean.note((entry.first_token_s - entry.admitted_s) / tokens, tiny=tokens < TOKENS_TINY)

    def note_step(self, step_s: float) -> None:
        """A step in which answers went on took so long, with all that was in it."""
        self._step_s.note(step_s)

    def note_load(self, job: Job, load_s: float) -> None:
        """What a request reuses is expected to load in so many seconds."""
        tokens = sum(len(s.token_ids) for s in job.layout.segments if s.kind is SegmentKind.CHUNK)
        if tokens:
            self._load_s.note(load_s / tokens)

    def prompt_s(self, job: Job) -> float | None:
        """Seconds of device time of a prompt; None before one of its mode was computed."""
        mean = self._prompt_s.get(_kind(job))
        return None if mean is None or mean.value is None else mean.value * job.layout.num_tokens

    def alone_s(self, job: Job) -> float:
        """Seconds until the first token on an idle server, max(load, compute); 0 where nothing is known."""
        compute_s, per_token_s = self.prompt_s(job) or 0.0, self._load_s.value or 0.0
        if not per_token_s or job.mode == "full":
            return compute_s
        tokens = sum(len(s.token_ids) for s in job.layout.segments if s.kind is SegmentKind.CHUNK)
        return max(compute_s, tokens * per_token_s)

    def served_s(self, job: Job) -> float:
        """Seconds from its admission to the last token beside as many others as lately; 0 where nothing is known.

        An answer is taken to be as long as those before it were, but no longer than it may be.
        """
        mean = self._begun_s.get(_kind(job))
        begun_s = 0.0 if mean is None or mean.value is None else mean.value * job.layout.num_tokens
        prompt_s = max(begun_s, self.alone_s(job))
        if job.kind != "generate":
            return prompt_s
        return prompt_s + self.going_on_s(job, self._step_s.value or 0.0, job.sampling.max_tokens)

    def going_on_s(self, job: Job, step_s: float, unknown: float = 1.0) -> float:
        """Seconds from its first token to its last, a step of `step_s` for each: as many as answers had lately, and no
        more than there may be. Before one has ended `unknown` tokens are expected.
        """
        tokens = unknown if self._answer_tokens.value is None else self._answer_tokens.value
        return (min(job.sampling.max_tokens, tokens) - 1) * step_s

    def first_token_s(self, job: Job, running: Iterable[Entry], ahead: Sequence[Entry]) -> float | None:
        """Seconds until the first token of a job that comes now, behind `running` ones and those `ahead` in the queue.

        Prompts go before it; where it has to wait for a place, so do as many answers as must end for it. None where the
        time of a prompt of its mode is not known.
        """
        if self.prompt_s(job) is None:
            return None
        wait_s, places = 0.0, self._max_num_seqs - len(ahead)
        answer_s, left = self._answer_s.value or 0.0, []
        for entry in running:
            places -= 1
            left.append(max(0.0, answer_s - 1e-3 * entry.decode_ms))
            if entry.prefill is None and entry.phase is not Phase.DECODING and entry.job.kind == "generate":
                wait_s += max(0.0, (self.prompt_s(entry.job) or 0.0) - 1e-3 * entry.device_ms)
        wait_s += sum(self.prompt_s(entry.job) or 0.0 for entry in ahead)
        # with k places too few, k + 1 must get free
        must_end = max(0, 1 - places)
        # first those that run, as far as they are; then those that have not begun
        ends_s = [*sorted(left), *[answer_s] * len(ahead)][:must_end]
        return wait_s + sum(ends_s) + self.alone_s(job)


def _kind(job: Job) -> str:
    return job.mode if job.kind == "generate" else job.kind
