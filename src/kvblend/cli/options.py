"""The options that several commands have, and those of all settings that have a flag."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DEFAULT_MODEL = "smollm2"
Mode = Literal["blend", "full", "reuse", "prefix"]

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help="Folder of stored chunks (default: in the user's cache).", file_okay=False),
]
DtypeOption = Annotated[Literal["float32", "bfloat16"] | None, typer.Option("--dtype", help="Compute type.")]
StoreDtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"] | None,
    typer.Option("--store-dtype", help="Of stored chunks; auto: bfloat16 if its check passes, else the compute type."),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Torch threads; 0: as many as cores.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="A running server, e.g. ws://127.0.0.1:8000.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System prompt; chunks are stored behind it.")]
BlendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--blend", metavar="NAME=VALUE", help="More of how rows are chosen, e.g. check_layers=1,8; repeatable."
    ),
]
MaxKLOption = Annotated[
    float | None, typer.Option(help="Bound on the answer's KL from a full prefill; the ratio is raised until it holds.")
]
RatioOption = Annotated[str | None, typer.Option(help="Share of reused tokens computed again, 0..1, or auto.")]


def _option(kind: Any, text: str, **more: Any) -> Any:
    """An option that may be left out: then another source says its value."""
    return Annotated[kind | None, typer.Option(help=text, **more)]


# by the name of the setting, in the order of `--help`; all are in `kvblend serve`
SETTING_OPTIONS: dict[str, Any] = {
    "model": _option(str, f"Known name, Hugging Face directory or .gguf file (default {DEFAULT_MODEL})."),
    "store": StoreOption,
    "host": _option(str, "Address to listen on (default 127.0.0.1)."),
    "port": _option(int, "Port; 0 picks a free one (default 8000).", min=0, max=65535),
    "system": _option(str, "System prompt of requests that give none."),
    "dtype": DtypeOption,
    "store_dtype": StoreDtypeOption,
    "threads": ThreadsOption,
    "keep_freed_memory": _option(bool, "Freed memory is used again (glibc), not given back to the kernel."),
    "device": _option(str, "Torch device, e.g. cpu or cuda."),
    "attention": _option(str, "auto, sdpa or xformers."),
    "conditioning": _option(str, "What chunks are computed behind: system, bare, warm[:FILE] or neighbours."),
    "echo": _option(bool, "Store warm chunks as behind a copy of themselves, too, for texts that overlap."),
    "recompute_ratio": _option(str, "Share of reused tokens computed again, 0..1, or auto."),
    "auto_ratio_floor": _option(float, "The lowest share that auto chooses."),
    "selector": _option(str, "How rows are chosen: divergence, query, sensitive, union, product, random or sinks."),
    "residual": _option(str, "Correction of the others: none, mean, distance, ridge, lowrank."),
    "blend": BlendOption,
    "blend_min_tokens": _option(int, "Below so many cached tokens: plain prefill."),
    "on_miss": _option(str, "fresh or precompute."),
    "salt": _option(str, "Separates the chunks of one store."),
    "separator": _option(str, "Parts chunks inside a text; empty: parts nothing."),
    "device_pool_bytes": _option(int, "Bytes of chunks kept in GPU memory, too (default 0: none; CUDA only)."),
    "device_pool_policy": _option(Literal["lru", "cost"], "Who leaves GPU memory first: as host_policy."),
    "host_bytes_budget": _option(int, "Bytes of chunks kept in memory."),
    "host_policy": _option(Literal["lru", "cost"], "Who leaves memory first: lru, or least uses x cost / bytes."),
    "disk_bytes_budget": _option(int, "Bytes of chunk files in the store (default: no limit)."),
    "disk_policy": _option(Literal["lru", "cost"], "Who leaves the disk first: lru, or least uses x cost / bytes."),
    "tenant_bytes_max": _option(int, "Bytes of chunk files of one salt (default: no limit)."),
    "remote": _option(str, "Redis or Valkey server for chunks, e.g. redis://host:6379/0."),
    "remote_timeout_ms": _option(int, "Time limit of each operation there."),
    "remote_ttl_s": _option(int, "Seconds that chunks are kept there; 0: while there is room."),
    "prefetch_layers_max": _option(int, "Reads in flight at once, of all requests."),
    "lookahead_requests_max": _option(int, "Waiting requests whose first layers are read already."),
    "slow_loads": _option(str, "compute: chunks that load slower than they compute; load: load them all the same."),
    "max_num_seqs": _option(int, "Requests running at once."),
    "max_num_batched_tokens": _option(int, "Tokens computed in one step."),
    "itl_ms_max": _option(float, "Longest step that running answers wait for, in ms; 0: no limit."),
    "policy": _option(Literal["fcfs", "edf"], "Who goes first: fcfs, or edf (by deadline)."),
    "ratio_lever_floor": _option(float, "How far load may lower a blend's ratio (default: not at all)."),
    "kv_tokens_max": _option(int, "KV slots of all running requests together."),
    "kept_tokens_max": _option(int, "KV slots that finished answers keep for the next turn; 0: none."),
    "queue_requests_max": _option(int, "Requests that wait."),
    "max_tokens_max": _option(int, "Longest answer a request may ask for."),
    "documents_max": _option(int, "Documents in one request."),
    "gate": _option(Literal["auto", "off"], "off: serve without judging first."),
    "gate_kl_max": _option(float, "Largest mean KL the gate lets pass."),
    "max_kl": MaxKLOption,
    "force_blend": _option(bool, "Blend though the model failed its gate."),
    "allow_origin": _option(list[str], "A browser Origin to accept; repeatable."),
    "keys_file": _option(Path, "API keys as `kvblend keys` writes them; with it, every caller needs one."),
    "requests_per_minute_max": _option(int, "Requests per minute of each key; 0: no limit.", min=0),
    "requests_running_max": _option(int, "Requests of each key that run at once; 0: no limit.", min=0),
    "drain_grace_s": _option(float, "Seconds running answers get at shutdown (default 30).", min=0),
    "log_format": _option(Literal["text", "json"], "Log lines on stderr: text, or one JSON object each."),
    "log_level": _option(Literal["debug", "info", "warning", "error"], "The least that is logged (default info)."),
}
