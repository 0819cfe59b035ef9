"""Reading an answer's events, and showing its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvblend.actors.messages import Delta, Finished, StreamEvent, TokenLogprob, Usage
from kvblend.cli.failures import CommandError

_FIGURES = (
    "mode",
    "ttft_ms",
    "total_ms",
    "prompt_tokens",
    "output_tokens",
    "chunk_hits",
    "chunk_misses",
    "tokens_reused",
    "tokens_recomputed",
    "tokens_fresh",
    "charged_ratio",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `token_ids` are those of the text, as far as the server gave them; `logprobs` where asked for."""

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The object `kvblend ask --json` prints."""
        figures = {name: getattr(self.usage, name) for name in _FIGURES}
        if self.usage.kl_estimate is not None:
            figures |= {"recompute_ratio": self.usage.recompute_ratio, "kl_estimate": self.usage.kl_estimate}
        if self.usage.loading.load_ms:
            loading = dataclasses.asdict(self.usage.loading)
            figures |= {"recompute_ratio": self.usage.recompute_ratio, "loading": loading}
        told = {"logprobs": [_logprob_fields(one) for one in self.logprobs]} if self.logprobs else {}
        return {"text": self.text, **figures, **told, "finish_reason": self.finish_reason}


async def read_answer(events: AsyncIterator[StreamEvent], on_text: Callable[[str], None] | None = None) -> Answer:
    """Read to the end, handing each piece of text on as it comes. CommandError if there is no end."""
    pieces: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    end: Finished | None = None
    async for event in events:
        if isinstance(event, Delta):
            pieces.append(event.text)
            token_ids += event.token_ids
            logprobs += event.logprobs
            if on_text is not None:
                on_text(event.text)
        elif isinstance(event, Finished):
            end = event
    if end is None:
        raise CommandError("the answer ended without its figures")
    return Answer("".join(pieces), tuple(token_ids), end.usage, end.reason, tuple(logprobs))


def _logprob_fields(one: TokenLogprob) -> dict[str, Any]:
    top = {"top": [_logprob_fields(other) for other in one.top]} if one.top else {}
    return {"token_id": one.token_id, "token": one.token, "logprob": one.logprob, **top}


def figures_table(answer: Answer) -> Table:
    """A short table of what the answer cost and what was reused."""
    usage = answer.usage
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = (
        ("mode", usage.mode),
        ("time to first token", f"{usage.ttft_ms:,.0f} ms of {usage.total_ms:,.0f} ms"),
        ("prompt tokens", f"{usage.prompt_tokens:,}"),
        ("output tokens", f"{usage.output_tokens:,} ({answer.finish_reason})"),
        ("chunks", f"{usage.chunk_hits} found, {usage.chunk_misses} missed"),
        (
            "reused / recomputed / fresh",
            f"{usage.tokens_reused:,} / {usage.tokens_recomputed:,} / {usage.tokens_fresh:,}",
        ),
        ("charged ratio", f"{usage.charged_ratio:.3f}"),
    )
    for name, value in rows:
        table.add_row(name, value)
    for note in usage.notes:
        table.add_row("note", note)
    return table


def equal_start(first: Answer, second: Answer) -> float:
    """The share, 0..1, of leading tokens (words, where ids are missing) that two answers have in common."""
    left: tuple[object, ...] = first.token_ids or tuple(first.text.split())
    right: tuple[object, ...] = second.token_ids or tuple(second.text.split())
    longest = max(len(left), len(right))
    if longest == 0:
        return 1.0
    same = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        same += 1
    return same / longest
