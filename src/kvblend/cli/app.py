"""The `kvblend` command. Heavy modules are imported inside the commands: `--help` stays instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvblend.cli.folders import default_store_folder
from kvblend.cli.models import KNOWN_NAMES
from kvblend.cli.options import (
    DEFAULT_MODEL,
    AttentionOption,
    BlendOption,
    ConditioningOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    GateLimitOption,
    GateOption,
    Mode,
    ModelOption,
    RatioOption,
    ResidualOption,
    SelectorOption,
    StoreOption,
    SystemOption,
    ThreadsOption,
    UrlOption,
)
from kvblend.cli.reporting import reported

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings

app = typer.Typer(name="kvblend", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Answers questions over retrieved chunks from their stored KV caches, wherever the chunks stand."""


@app.command()
@reported
def pull(
    model: Annotated[str, typer.Argument(help=f"A known model: {KNOWN_NAMES}.")] = DEFAULT_MODEL,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Agree to the model's terms unasked.")] = False,
) -> None:
    """Fetch a known model into the user's cache folder; a second pull does nothing."""
    from rich.console import Console

    from kvblend.cli.models import find_known
    from kvblend.cli.pull import ask_terms
    from kvblend.cli.pull import pull as fetch

    known, console = find_known(model), Console(stderr=True)
    ask_terms(known, accept_terms, console)
    if fetch(known, console):
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
    device: DeviceOption = None,
    attention: AttentionOption = None,
    conditioning: ConditioningOption = None,
    recompute_ratio: RatioOption = None,
    selector: SelectorOption = None,
    residual: ResidualOption = None,
    blend: BlendOption = None,
    blend_min_tokens: Annotated[int | None, typer.Option(help="Below so many cached tokens: plain prefill.")] = None,
    on_miss: Annotated[str | None, typer.Option(help="fresh or precompute.")] = None,
    salt: Annotated[str | None, typer.Option(help="Separates the chunks of one store.")] = None,
    host_bytes_budget: Annotated[int | None, typer.Option(help="Bytes of chunks kept in memory.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests running at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens computed in one step.")] = None,
    kv_tokens_max: Annotated[int | None, typer.Option(help="KV slots of all running requests together.")] = None,
    gate: GateOption = None,
    gate_kl_max: GateLimitOption = None,
    force_blend: ForceOption = None,
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
        **_selection(blend, selector=selector, residual=residual),
        blend_min_tokens=blend_min_tokens,
        on_miss=on_miss,
        salt=salt,
        host_bytes_budget=host_bytes_budget,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens_max=kv_tokens_max,
        gate=gate,
        gate_kl_max=gate_kl_max,
        force_blend=force_blend,
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
    conditioning: ConditioningOption = None,
    condition_on: Annotated[
        str | None,
        typer.Option(metavar="neighbours:K", help="Compute each chunk behind the K files most like it, K in 1..8."),
    ] = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Compute and store the KV of text files; returns when it is durable."""
    _check_place(url, store=store, conditioning=conditioning, dtype=dtype, threads=threads)
    from kvblend.cli.failures import BadInput
    from kvblend.cli.ingest import ingest_here, ingest_on_server
    from kvblend.cli.inputs import read_condition_on

    neighbours = read_condition_on(condition_on)
    if neighbours and conditioning not in (None, "neighbours"):
        raise BadInput(f"--condition-on goes with --conditioning neighbours; --conditioning is {conditioning!r}")
    if url is not None:
        ingest_on_server(url, model, files, system, neighbours)
    else:
        kind = "neighbours" if neighbours else conditioning
        settings = _settings(model, store, conditioning=kind, dtype=dtype, threads=threads, gate="off")
        ingest_here(settings, files, system, neighbours)


@app.command()
@reported
def ask(
    query: Annotated[str, typer.Option(help="The question.")],
    url: UrlOption = None,
    model: ModelOption = None,
    store: StoreOption = None,
    system: SystemOption = None,
    conditioning: ConditioningOption = None,
    chunk_file: Annotated[list[Path] | None, typer.Option(help="A UTF-8 text file; repeatable, in order.")] = None,
    mode: Annotated[Mode, typer.Option(help="How stored chunks are used.")] = "blend",
    recompute_ratio: RatioOption = None,
    blend: BlendOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    force_blend: ForceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")] = False,
) -> None:
    """Ask one question over chunk files and stream the answer."""
    _check_place(url, store=store, conditioning=conditioning, dtype=dtype, threads=threads)
    from kvblend.cli.ask import ask_here, ask_server
    from kvblend.cli.backends import Question
    from kvblend.cli.inputs import read_texts

    documents = tuple(read_texts(chunk_file or []))
    options = _selection(blend)
    question = Question(query, documents, system, mode, recompute_ratio, max_tokens, temperature, options)
    if url is not None:
        ask_server(url, model, question, as_json=as_json)
    else:
        # as settings too: layers that the model does not have are found before its weights are read
        options = {**options, "conditioning": conditioning, "force_blend": force_blend}
        settings = _settings(model, store, dtype=dtype, threads=threads, **options)
        ask_here(settings, question, as_json=as_json)


@app.command("eval")
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
    device: Annotated[str, typer.Option(help="Torch device, e.g. cpu or cuda.")] = "cpu",
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Of the probes and the intervals.", min=0)] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the results of a broken run.")] = False,
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
        device=device,
        threads=threads or 0,
        seed=seed,
        restart=restart,
    )
    run_evaluation(order)


@app.command()
@reported
def doctor(
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    attention: AttentionOption = None,
    conditioning: ConditioningOption = None,
    recompute_ratio: RatioOption = None,
    blend: BlendOption = None,
    gate_kl_max: GateLimitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge whether a model may be served blended; exit code 1 where it may not."""
    from kvblend.cli.doctor import diagnose

    settings = _settings(
        model,
        None,
        dtype=dtype,
        threads=threads,
        device=device,
        attention=attention,
        conditioning=conditioning,
        recompute_ratio=recompute_ratio,
        gate_kl_max=gate_kl_max,
        **_selection(blend),
    )
    raise typer.Exit(diagnose(settings, as_json=as_json))


@app.command()
@reported
def demo(
    model: Annotated[str, typer.Option(help="Known name, Hugging Face directory or .gguf file.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 48,
) -> None:
    """Pull, serve, ingest sample documents, and ask: full prefill against blended chunks in another order."""
    from kvblend.cli.demo import run_demo

    run_demo(model, max_tokens)


def _selection(blend: list[str] | None, **flags: str | None) -> dict[str, Any]:
    from kvblend.cli.failures import BadInput
    from kvblend.cli.inputs import read_blend

    options = read_blend(blend or ())
    for name, value in flags.items():
        if value is not None and name in options:
            raise BadInput(f"--blend {name} and --{name}: give one of the two")
    return {name: value for name, value in flags.items() if value is not None} | options


def _check_place(url: str | None, **local: object) -> None:
    from kvblend.cli.failures import BadInput

    for flag, value in local.items():
        if url is not None and value is not None:
            raise BadInput(f"--{flag} is of no use with --url: the server has its own; give one of the two")


def _settings(model: str | None, store: Path | None, **flags: object) -> Settings:
    from kvblend.cli.inputs import make_settings

    return make_settings(model=model or DEFAULT_MODEL, store=store or default_store_folder(), **flags)
