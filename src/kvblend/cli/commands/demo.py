"""`kvblend demo`: its flags."""

from __future__ import annotations

from typing import Annotated

import typer

from kvblend.cli.options import DEFAULT_MODEL
from kvblend.cli.reporting import reported


@reported
def demo(
    model: Annotated[str, typer.Option(help="Known name, Hugging Face directory or .gguf file.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 48,
) -> None:
    """Pull, serve, ingest sample documents, and ask: full prefill against blended chunks in another order."""
    from kvblend.cli.demo import run_demo

    run_demo(model, max_tokens)
