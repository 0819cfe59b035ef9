"""The options of the load test, under the names that `vllm bench serve` gives them where it has them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from loadtest import values

BACKENDS = ("openai-chat", "openai", "vllm", "kvblend")
DATASETS = ("rag", "random", "custom")


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="load_test.py",
        allow_abbrev=False,
        description="Load test of a kvblend server or any OpenAI-compatible one, over SSE or WebSocket.",
        epilog="Latency is counted from the time at which a request was due, not from when it could be sent.",
    )
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_data(parser.add_argument_group("prompts"))
    _add_rag(parser.add_argument_group("chunks of --dataset-name rag"))
    _add_behaviour(parser.add_argument_group("clients that misbehave, as shares of the requests"))
    _add_results(parser.add_argument_group("results"))
    return parser


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="openai-chat",
        help="openai-chat: chat completions; openai, vllm: completions; kvblend: WebSocket, documents as documents",
    )
    group.add_argument("--transport", choices=("sse", "ws"), help="default: ws for kvblend, sse for others")
    group.add_argument("--base-url", help="such as http://127.0.0.1:8000; instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=values.count, default=8000)
    group.add_argument("--endpoint", help="default: /v1/chat/completions, /v1/completions or /v1/responses")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument("--served-model-name", help="the name to send, where it differs from --model")
    group.add_argument("--header", type=values.pair, action="append", default=[], metavar="KEY=VALUE")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=values.not_negative,
        default=0.0,
        metavar="S",
        help="wait so long for a server",
    )
    group.add_argument("--timeout", type=values.positive, default=600.0, metavar="S", help="of one request")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=values.count, default=1000, help="requests, for each rate")
    group.add_argument(
        "--request-rate", type=values.rates, default=(math.inf,), metavar="R[,R...]", help="requests/s, or inf"
    )
    group.add_argument(
        "--burstiness", type=values.positive, default=1.0, help="1: Poisson; below: bursts; above: even; inf: a clock"
    )
    group.add_argument("--max-concurrency", type=values.count, help="requests at once; with rate inf a closed loop")
    group.add_argument("--num-warmups", type=values.whole, default=0, help="requests before each rate, not counted")
    group.add_argument("--seed", type=values.whole, default=0)
    group.add_argument("--processes", type=values.count, default=1, help="processes that send")


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=DATASETS, default="rag")
    group.add_argument(
        "--dataset-path", type=Path, metavar="PATH", help="rag: a folder of texts; custom: a JSONL file with `prompt`"
    )
    group.add_argument("--input-len", "--random-input-len", type=values.count, default=1024, help="words, random only")
    group.add_argument("--output-len", "--random-output-len", type=values.count, default=128, help="tokens at most")
    group.add_argument("--ignore-eos", action="store_true", help="asks for exactly --output-len tokens")
    group.add_argument("--temperature", type=values.not_negative)
    group.add_argument("--top-p", type=values.share)
    group.add_argument(
        "--extra-body", type=values.mapping, default={}, metavar="JSON", help='such as \'{"blend": {"mode": "full"}}\''
    )
    group.add_argument("--system", default="", help="system prompt")


def _add_rag(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chunk-pool", type=values.count, default=100, help="chunks there are")
    group.add_argument("--chunk-tokens", type=values.count, default=200, help="words of a chunk, about as many tokens")
    group.add_argument("--chunks-per-request", type=values.span, default=(6, 6), metavar="N|N-M")
    group.add_argument(
        "--zipf-alpha", type=values.not_negative, default=1.0, help="how uneven the chunks' popularity is; 0: even"
    )
    group.add_argument("--chunk-order", choices=("shuffled", "sorted"), default="shuffled")
    group.add_argument("--question-tokens", type=values.count, default=16)
    group.add_argument(
        "--repeat-share",
        type=values.share,
        default=0.0,
        help="share that asks a new question on an earlier one's chunks",
    )
    group.add_argument(
        "--chunks-as",
        choices=("documents", "parts", "text"),
        help="a `documents` field, text parts of the user's message, or one text; default: documents for kvblend",
    )
    group.add_argument("--separator", default=" # # ", help="between chunks of one text")
    group.add_argument("--warm-pool", action="store_true", help="sends every chunk once before each rate, not counted")
    group.add_argument("--keep-pool", action="store_true", help="the same chunks for all rates; else new ones for each")


def _add_behaviour(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cancel-rate", type=values.share, default=0.0, help="cancelled in the middle of the answer")
    group.add_argument("--disconnect-rate", type=values.share, default=0.0, help="connection cut in the middle")
    group.add_argument("--slow-reader-rate", type=values.share, default=0.0, help="wait between reads")
    group.add_argument("--slow-reader-ms", type=values.positive, default=200.0)


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--percentile-metrics", type=values.metrics, default=values.METRICS, metavar="NAMES")
    group.add_argument("--metric-percentiles", type=values.percentiles, default=(99.0,), metavar="P[,P...]")
    group.add_argument("--goodput", type=values.goal, nargs="+", default=[], metavar="NAME:MS")
    group.add_argument("--save-result", action="store_true", help="a JSON file for each rate")
    group.add_argument("--save-detailed", action="store_true", help="with the figures of each request")
    group.add_argument("--result-dir", type=Path, default=Path())
    group.add_argument("--result-filename", metavar="FILE")
    group.add_argument("--label")
    group.add_argument("--metadata", type=values.pair, nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="first-token time against rate")
    group.add_argument("--disable-tqdm", "--no-progress", action="store_true", help="no progress bar")
