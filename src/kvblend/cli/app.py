"""The `kvblend` command. Heavy modules are imported inside the commands: `--help` stays instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvblend.cli.folders import default_store_folder
from kvblend.cli.reporting import reported

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings

app = typer.Typer(name="kvblend", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

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
SelectorOption = Annotated[str | None, typer.Option(help="How rows are chosen: divergence or query.")]
ResidualOption = Annotated[str | None, typer.Option(help="Correction of the others: none, mean, distance, ridge.")]
DtypeOption = Annotated[Literal["float32", "bfloat16"] | None, typer.Option("--dtype", help="Compute type.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Torch threads; 0: as many as cores.")]


@app.callback()
def _root() -> None:
    """Answers questions over retrieved chunks from their stored KV caches, wherever the chunks stand."""


@app.command()
@reported
def pull(model: Annotated[str, typer.Argument(help="A known model, e.g. smollm2.")] = DEFAULT_MODEL) -> None:
    """Fetch a known model into the user's cache folder; a second pull does nothing."""
    from rich.console import Console

    from kvblend.cli.models import find_known
    from kvblend.cli.pull import pull as fetch

    known = find_known(model)
    if fetch(known, Console(stderr=True)):
        typer.echo(f"{model} ({known.licence}) is at {known.path}")
    else:
        typer.echo(f"{model} is already at {known.path}: nothing to do")


@app.command()
@reported
def serve(
    model: ModelOption = None,
    store: StoreOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.", min=0, max=65535)] = 8000,
    system: Annotated[str | None, typer.Option(help="System prompt of requests that give none.")] = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    device: Annotated[str | None, typer.Option(help="Torch device, e.g. cpu or cuda.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, sdpa or xformers.")] = None,
    conditioning: Annotated[str | None, typer.Option(help="Chunks stored behind the system prompt, or bare.")] = None,
    recompute_ratio: Annotated[float | None, typer.Option(help="Share of reused tokens computed again, 0..1.")] = None,
    selector: SelectorOption = None,
    residual: ResidualOption = None,
    blend_min_tokens: Annotated[int | None, typer.Option(help="Below so many cached tokens: plain prefill.")] = None,
    on_miss: Annotated[str | None, typer.Option(help="fresh or precompute.")] = None,
    salt: Annotated[str | None, typer.Option(help="Separates the chunks of one store.")] = None,
    host_bytes_budget: Annotated[int | None, typer.Option(help="Bytes of chunks kept in memory.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests running at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens computed in one step.")] = None,
    kv_tokens_max: Annotated[int | None, typer.Option(help="KV slots of all running requests together.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="A browser Origin to accept; repeatable.")] = None,
    drain_grace_s: Annotated[float, typer.Option(help="Seconds running answers get at shutdown.", min=0)] = 30.0,
) -> None:
    """Serve a model over WebSocket until SIGTERM or Ctrl-C."""
    settings = _settings(
        model,
        store,
        system=system,
        dtype=dtype,
        threads=threads,
        device=device,
        attention=attention,
        conditioning=conditioning,
        recompute_ratio=recompute_ratio,
        selector=selector,
        residual=residual,
        blend_min_tokens=blend_min_tokens,
        on_miss=on_miss,
        salt=salt,
        host_bytes_budget=host_bytes_budget,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens_max=kv_tokens_max,
    )
    from kvblend.cli.serve import serve_here

    raise typer.Exit(serve_here(settings, host, port, allow_origin or (), drain_grace_s))


@app.command()
@reported
def ingest(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="UTF-8 text files, one chunk each.")],
    url: UrlOption = None,
    store: StoreOption = None,
    model: ModelOption = None,
    system: SystemOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Compute and store the KV of text files; returns when it is durable."""
    _check_place(url, store=store, dtype=dtype, threads=threads)
    from kvblend.cli.ingest import ingest_here, ingest_on_server

    if url is not None:
        ingest_on_server(url, model, files, system)
    else:
        ingest_here(_settings(model, store, dtype=dtype, threads=threads), files, system)


@app.command()
@reported
def ask(
    query: Annotated[str, typer.Option(help="The question.")],
    url: UrlOption = None,
    model: ModelOption = None,
    store: StoreOption = None,
    system: SystemOption = None,
    chunk_file: Annotated[list[Path] | None, typer.Option(help="A UTF-8 text file; repeatable, in order.")] = None,
    mode: Annotated[Mode, typer.Option(help="How stored chunks are used.")] = "blend",
    recompute_ratio: Annotated[float | None, typer.Option(help="Share of reused tokens computed again, 0..1.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")] = False,
) -> None:
    """Ask one question over chunk files and stream the answer."""
    _check_place(url, store=store, dtype=dtype, threads=threads)
    from kvblend.cli.ask import ask_here, ask_server
    from kvblend.cli.backends import Question
    from kvblend.cli.inputs import read_texts

    documents = tuple(read_texts(chunk_file or []))
    question = Question(query, documents, system, mode, recompute_ratio, max_tokens, temperature)
    if url is not None:
        ask_server(url, model, question, as_json=as_json)
    else:
        ask_here(_settings(model, store, dtype=dtype, threads=threads), question, as_json=as_json)


@app.command()
@reported
def demo(
    model: Annotated[str, typer.Option(help="Known name, Hugging Face directory or .gguf file.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 48,
) -> None:
    """Pull, serve, ingest sample documents, and ask: full prefill against blended chunks in another order."""
    from kvblend.cli.demo import run_demo

    run_demo(model, max_tokens)


def _check_place(url: str | None, **local: object) -> None:
    from kvblend.cli.failures import BadInput

    for flag, value in local.items():
        if url is not None and value is not None:
            raise BadInput(f"--{flag} is of no use with --url: the server has its own; give one of the two")


def _settings(model: str | None, store: Path | None, **flags: object) -> Settings:
    from kvblend.cli.inputs import make_settings

    return make_settings(model=model or DEFAULT_MODEL, store=store or default_store_folder(), **flags)
