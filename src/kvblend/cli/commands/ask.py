"""`kvblend ask`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvblend.cli.failures import BadInput
from kvblend.cli.flags import Flags, with_settings
from kvblend.cli.options import BlendOption, MaxKLOption, Mode, RatioOption, SystemOption, UrlOption
from kvblend.cli.reporting import reported


@reported
@with_settings(
    *("model", "store", "remote", "conditioning", "dtype", "store_dtype", "threads", "device", "attention"),
    *("gate", "force_blend"),
)
def ask(
    query: Annotated[str, typer.Option(help="The question.")],
    given: Flags,
    url: UrlOption = None,
    system: SystemOption = None,
    chunk_file: Annotated[list[Path] | None, typer.Option(help="A UTF-8 text file; repeatable, in order.")] = None,
    mode: Annotated[Mode, typer.Option(help="How stored chunks are used.")] = "blend",
    recompute_ratio: RatioOption = None,
    max_kl: MaxKLOption = None,
    blend: BlendOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest tokens of this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many tokens; 0: all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the likeliest token's probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what was said.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Of tokens in the answer, -2..2.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="For each time in the answer, -2..2.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same draws each time.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="A token that ends it; repeatable.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Shortest answer, in tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log probabilities, and of so many others.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")] = False,
) -> None:
    """Ask one question over chunk files and stream the answer."""
    given.check_remote(url)
    if logprobs is not None and not as_json:
        raise BadInput("--logprobs needs --json: a text has no place for log probabilities")
    from kvblend.cli.ask import ask_here, ask_server
    from kvblend.cli.backends import Question, SamplingFields
    from kvblend.cli.inputs import read_blend, read_ratio, read_texts

    files = tuple(chunk_file or ())
    texts, options = tuple(read_texts(files)), read_blend(blend or ())
    ratio = read_ratio(recompute_ratio)
    bound = {} if max_kl is None else {"max_kl": max_kl}
    sampling: SamplingFields = {
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": stop or None,
        "stop_token_ids": stop_token_id or None,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos or None,
        "logprobs": logprobs,
    }
    blended = {**options, **bound}
    question = Question(query, texts, system, mode, ratio, max_tokens, temperature, blended, files, sampling)
    if url is not None:
        ask_server(url, given.value("model"), question, as_json=as_json)
    else:
        # as settings too: layers that the model does not have are found before its weights are read
        ask_here(given.with_blend(blend).resolve().settings, question, as_json=as_json)
