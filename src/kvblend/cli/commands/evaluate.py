"""`kvblend eval`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvblend.cli.options import DEFAULT_MODEL, DtypeOption, ThreadsOption
from kvblend.cli.reporting import reported


@reported
def evaluate(
    data: Annotated[str, typer.Option(help="A JSON file of questions, or the word probes.")],
    out: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    model: Annotated[str, typer.Option(help="Known name, Hugging Face directory or .gguf file.")] = DEFAULT_MODEL,
    limit: Annotated[int | None, typer.Option(help="First questions only (probes: 200 if not given).")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="[warm:|corpus:|...]selector[,field=value...]")] = None,
    ratios: Annotated[list[str] | None, typer.Option(help="Shares to recompute, joined by commas.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture: quality against cost and time.")] = None,
    raw: Annotated[Path | None, typer.Option(help="Figures per question and method, one JSON object a line.")] = None,
    dtype: DtypeOption = None,
    store_dtype: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(help="Of stored chunks (default: the compute type); a narrower one is compared with that."),
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device, e.g. cpu or cuda.")] = "cpu",
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Of the probes and the intervals.", min=0)] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the results of a broken run.")] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for chunks' KV, so that the next run with other methods is fast.")
    ] = None,
) -> None:
    """Measure blended answers against full prefill; a broken run goes on where it was."""
    from kvblend.cli.evaluate import EvalOrder, run_evaluation

    order = EvalOrder(
        model,
        data,
        out,
        limit=limit,
        methods=tuple(methods or ()),
        ratios=tuple(ratios or ()),
        plot=plot,
        raw=raw,
        dtype=dtype or "float32",
        store_dtype=store_dtype or "",
        device=device,
        threads=threads or 0,
        seed=seed,
        restart=restart,
        keep=keep,
    )
    run_evaluation(order)
