"""`kvblend demo`: the whole path on sample documents, and what it is worth."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvblend.actors.messages import Mode
from kvblend.api.client import AsyncClient
from kvblend.cli.answers import Answer, equal_start, read_answer
from kvblend.cli.child import running_server, serve_command
from kvblend.cli.failures import CommandError
from kvblend.cli.ingest import ingest_progress
from kvblend.cli.models import resolve_model
from kvblend.samples import QUESTION, SYSTEM, Sample, load

_STEADY = 1.2
_NEXT = """\
[bold]What to type next[/bold]
  kvblend serve
  kvblend ingest --url ws://127.0.0.1:8000 --system "{system}" notes.md
  kvblend ask --url ws://127.0.0.1:8000 --system "{system}" --chunk-file notes.md --query "..."
Without --url, ingest and ask run in their own process and keep their chunks in the user's cache folder."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The two runs of one mode."""

    warm_up: Answer
    measured: Answer

    @property
    def disturbed(self) -> bool:
        """Whether the measured run was clearly slower than its warm-up, which nothing of ours explains."""
        return self.measured.usage.ttft_ms > _STEADY * self.warm_up.usage.ttft_ms


def run_demo(model: str, max_tokens: int) -> None:
    """Run the demo; the server is stopped and its folder removed however it ends."""
    console = Console()
    name, path = resolve_model(model)
    model = str(path) if name != model else model
    try:
        with tempfile.TemporaryDirectory(prefix="kvblend-demo-") as folder:
            console.print(f"Starting a server with {name} on a free port ...")
            full, blend = asyncio.run(_demo(serve_command(model, folder), load(), max_tokens, console))
    except asyncio.CancelledError:
        raise CommandError("stopped by SIGTERM; the server is stopped and its folder removed") from None
    console.print(comparison(full, blend))
    console.print(
        "Measured by the server, from taking the request to its first token: the second of two runs of each mode, "
        "the first being a warm-up; the same chunks in the same order, greedy; chunks in memory.",
        style="dim",
    )
    if full.disturbed or blend.disturbed:
        console.print("A measured run was slower than its warm-up: this machine was busy; do not trust the times.")
    console.print(_NEXT.format(system=SYSTEM), highlight=False, soft_wrap=True)


async def _demo(
    command: Sequence[str], samples: Sequence[Sample], max_tokens: int, console: Console
) -> tuple[Runs, Runs]:
    _end_on_sigterm()
    async with running_server(command) as url, AsyncClient(url) as client:
        console.print(f"It listens on {url}")
        await _ingest(client, samples, console)
        return await _measure(client, shuffled(samples), max_tokens, console)


def shuffled(samples: Sequence[Sample]) -> list[Sample]:
    """The samples in an order in which none follows the one it followed before."""
    return [*samples[1::2], *samples[0::2]]


async def _ingest(client: AsyncClient, samples: Sequence[Sample], console: Console) -> None:
    texts = [{"title": sample.title, "text": sample.text} for sample in samples]
    with ingest_progress(console) as progress:
        task = progress.add_task("storing the sample documents", total=len(texts))
        stored = await client.ingest(texts, SYSTEM, lambda done, _: progress.update(task, completed=done))
        progress.update(task, completed=len(stored))
    console.print(f"{len(stored)} documents, {sum(chunk.tokens for chunk in stored):,} tokens, are stored.")


async def _measure(
    client: AsyncClient, samples: Sequence[Sample], max_tokens: int, console: Console
) -> tuple[Runs, Runs]:
    """Answers with full prefill and blended ones; the last of them streams to the console."""
    documents = [{"title": sample.title, "text": sample.text} for sample in samples]
    console.print(f"\nThe question, over the documents in another order: [bold]{QUESTION}[/bold]")

    def write(text: str) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    async def ask(mode: Mode, run: str, *, show: bool = False) -> Answer:
        console.print(f"  {mode}, {run}: ", end="", style="dim")
        generation = client.generate(QUESTION, system=SYSTEM, documents=documents, max_tokens=max_tokens, mode=mode)
        async with generation:
            answer = await read_answer(generation, write if show else None)
        console.print(f" ({answer.usage.ttft_ms:,.0f} ms to the first token)", style="dim")
        return answer

    # in turns, so that a busy spell of the machine does not fall on one mode alone
    warm_ups = await ask("full", "warm-up"), await ask("blend", "warm-up")
    full, blend = await ask("full", "measured"), await ask("blend", "measured", show=True)
    return Runs(warm_ups[0], full), Runs(warm_ups[1], blend)


def comparison(full: Runs, blend: Runs) -> Table:
    """Both modes side by side; all figures but the warm-up's are of the measured runs."""
    table = Table(title="Full prefill and blended chunks")
    table.add_column("")
    table.add_column("full", justify="right")
    table.add_column("blend", justify="right")
    left, right = full.measured.usage, blend.measured.usage
    ratio = left.ttft_ms / right.ttft_ms if right.ttft_ms else 0.0
    table.add_row("time to first token, ms", f"{left.ttft_ms:,.0f}", f"{right.ttft_ms:,.0f}")
    table.add_row("the warm-up's, ms", f"{full.warm_up.usage.ttft_ms:,.0f}", f"{blend.warm_up.usage.ttft_ms:,.0f}")
    table.add_row("full / this", "1.0x", f"{ratio:.1f}x")
    rows = (
        ("total time, ms", "total_ms"),
        ("prompt tokens", "prompt_tokens"),
        ("chunks found", "chunk_hits"),
        ("chunks missed", "chunk_misses"),
        ("tokens reused", "tokens_reused"),
        ("tokens recomputed", "tokens_recomputed"),
        ("tokens computed fresh", "tokens_fresh"),
    )
    for label, name in rows:
        table.add_row(label, f"{getattr(left, name):,.0f}", f"{getattr(right, name):,.0f}")
    table.add_row("charged ratio", f"{left.charged_ratio:.3f}", f"{right.charged_ratio:.3f}")
    table.add_row("same leading tokens", "", f"{equal_start(full.measured, blend.measured):.0%}")
    table.add_row("same answer", "", "yes" if full.measured.text == blend.measured.text else "no")
    table.add_section()
    table.add_row("answer", full.measured.text.strip(), blend.measured.text.strip())
    return table


def _end_on_sigterm() -> None:
    """Let SIGTERM unwind the demo as Ctrl-C does, so that the server is stopped and the folder removed."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
