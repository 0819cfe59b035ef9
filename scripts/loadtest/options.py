"""The options as one checked object; whatever is wrong with them is said before anything is sent."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtest.flags import make_parser

ENDPOINTS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions", "vllm": "/v1/completions"}


@dataclass(frozen=True)
class Options:
    """What was asked for, with the defaults that hang on others filled in."""

    backend: str
    transport: str
    base_url: str
    endpoint: str
    model: str | None
    served_model_name: str | None
    header: list[tuple[str, str]]
    insecure: bool
    ready_check_timeout_sec: float
    timeout: float
    num_prompts: int
    request_rate: tuple[float, ...]
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    seed: int
    processes: int
    dataset_name: str
    dataset_path: Path | None
    input_len: int
    output_len: int
    ignore_eos: bool
    temperature: float | None
    top_p: float | None
    extra_body: dict[str, Any]
    system: str
    chunk_pool: int
    chunk_tokens: int
    chunks_per_request: tuple[int, int]
    zipf_alpha: float
    chunk_order: str
    question_tokens: int
    repeat_share: float
    chunks_as: str
    separator: str
    warm_pool: bool
    keep_pool: bool
    cancel_rate: float
    disconnect_rate: float
    slow_reader_rate: float
    slow_reader_ms: float
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    goodput: list[tuple[str, float]]
    save_result: bool
    save_detailed: bool
    result_dir: Path
    result_filename: str | None
    label: str | None
    metadata: list[tuple[str, str]]
    plot: Path | None
    disable_tqdm: bool

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url + self.endpoint

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request; a key comes from OPENAI_API_KEY unless one is given."""
        given = dict(self.header)
        key = os.environ.get("OPENAI_API_KEY")
        named = any(name.lower() == "authorization" for name in given)
        return given if named or not key else {"Authorization": f"Bearer {key}", **given}


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """The checked options; SystemExit(2) with a message that names the option for bad ones."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if complaint := _complete(given) or _contradiction(given) or _missing(given):
        parser.error(complaint)
    return Options(**{field.name: getattr(given, field.name) for field in fields(Options)})


def _complete(given: argparse.Namespace) -> str | None:
    """Fill in what hangs on other options; what is wrong with the address, if anything."""
    ours = given.backend == "kvblend"
    given.transport = given.transport or ("ws" if ours else "sse")
    given.chunks_as = given.chunks_as or (
        "documents" if ours else "parts" if given.backend == "openai-chat" else "text"
    )
    if given.base_url is None:
        host = f"[{given.host}]" if ":" in given.host else given.host
        given.base_url = f"http://{host}:{given.port}"
    given.base_url = given.base_url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(given.base_url)
        _ = parts.port
    except ValueError as error:
        return f"argument --base-url: {given.base_url!r}: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"argument --base-url: {given.base_url!r} is not like http://host:port"
    default = "/v1/responses" if given.transport == "ws" else ENDPOINTS.get(given.backend, "/v1/chat/completions")
    given.endpoint = given.endpoint or default
    if not given.endpoint.startswith("/"):
        return f"argument --endpoint: {given.endpoint!r} does not begin with /"
    return None


def _contradiction(given: argparse.Namespace) -> str | None:
    completions = given.backend in ("openai", "vllm")
    least, most = given.chunks_per_request
    misbehaving = given.cancel_rate + given.disconnect_rate + given.slow_reader_rate
    if given.transport == "ws" and (complaint := _contradiction_ws(given)):
        return complaint
    if given.result_filename and Path(given.result_filename).name != given.result_filename:
        return f"argument --result-filename: {given.result_filename!r} is no plain file name; use --result-dir"
    if completions and given.chunks_as == "parts":
        return f"argument --chunks-as: parts are of chat messages, and --backend {given.backend} has none"
    if misbehaving > 1 + 1e-9:
        return f"arguments --cancel-rate, --disconnect-rate, --slow-reader-rate: together {misbehaving:g}, more than 1"
    if given.dataset_name == "rag" and given.dataset_path is None and most > given.chunk_pool:
        return f"argument --chunks-per-request: {most} is more than --chunk-pool, {given.chunk_pool}"
    if given.dataset_name == "rag" and least < 1:
        return "argument --chunks-per-request: 0 is below 1; --dataset-name random has prompts without chunks"
    return None


def _contradiction_ws(given: argparse.Namespace) -> str | None:
    from kvblend import AsyncClient
    from kvblend.api.client.wire import SamplingOptions

    named = set(inspect.signature(AsyncClient.generate).parameters) - {"self", "sampling"}
    known = named | set(SamplingOptions.__annotations__)
    if given.backend != "kvblend":
        return f"argument --transport: ws is for --backend kvblend, not {given.backend}"
    if given.chunks_as == "parts":
        return "argument --chunks-as: parts are for --transport sse"
    if given.endpoint != "/v1/responses":
        return "argument --endpoint: a kvblend server's WebSocket is at /v1/responses"
    if given.header or given.insecure:
        return "arguments --header, --insecure: are for --transport sse"
    if unknown := sorted(set(given.extra_body) - known):
        return f"argument --extra-body: {unknown[0]!r} is not one of {', '.join(sorted(known))}"
    return None


def _missing(given: argparse.Namespace) -> str | None:
    path = given.dataset_path
    if given.dataset_name == "custom" and path is None:
        return "argument --dataset-path: --dataset-name custom needs one"
    if given.dataset_name == "random" and path is not None:
        return "argument --dataset-path: --dataset-name random takes none"
    if path is not None and not (path.is_dir() if given.dataset_name == "rag" else path.is_file()):
        wanted = "folder" if given.dataset_name == "rag" else "file"
        return f"argument --dataset-path: {path} is no {wanted}"
    if (given.save_result or given.save_detailed) and not given.result_dir.is_dir():
        return f"argument --result-dir: {given.result_dir} is no folder"
    if given.plot is not None and not given.plot.parent.is_dir():
        return f"argument --plot: {given.plot.parent} is no folder"
    if given.plot is not None and given.plot.suffix.lower() != ".png":
        return f"argument --plot: {given.plot} does not end with .png"
    return None
