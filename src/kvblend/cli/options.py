"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT_MODEL = "smollm2"
Mode = Literal["blend", "full", "reuse", "prefix"]

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help=f"Known name, Hugging Face directory or .gguf file (default {DEFAULT_MODEL})."),
]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help="Folder of stored chunks (default: in the user's cache).", file_okay=False),
]
UrlOption = Annotated[str | None, typer.Option("--url", help="A running server, e.g. ws://127.0.0.1:8000.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System prompt; chunks are stored behind it.")]
SelectorOption = Annotated[
    str | None, typer.Option(help="How rows are chosen: divergence, query, sensitive, union, product, random or sinks.")
]
BlendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--blend", metavar="NAME=VALUE", help="More of how rows are chosen, e.g. check_layers=1,8; repeatable."
    ),
]
ResidualOption = Annotated[str | None, typer.Option(help="Correction of the others: none, mean, distance, ridge.")]
ConditioningOption = Annotated[
    str | None, typer.Option(help="What chunks are computed behind: system, bare, warm[:FILE] or neighbours.")
]
DtypeOption = Annotated[Literal["float32", "bfloat16"] | None, typer.Option("--dtype", help="Compute type.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Torch threads; 0: as many as cores.")]
GateOption = Annotated[Literal["auto", "off"] | None, typer.Option("--gate", help="off: serve without judging first.")]
GateLimitOption = Annotated[float | None, typer.Option("--gate-kl-max", help="Largest mean KL the gate lets pass.")]
ForceOption = Annotated[bool | None, typer.Option("--force-blend", help="Blend though the model failed its gate.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Torch device, e.g. cpu or cuda.")]
AttentionOption = Annotated[str | None, typer.Option("--attention", help="auto, sdpa or xformers.")]
RatioOption = Annotated[float | None, typer.Option(help="Share of reused tokens computed again, 0..1.")]
