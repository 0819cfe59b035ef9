"""`kvblend ask`: its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the text.")] = False,
) -> None:
    """Ask one question over chunk files and stream the answer."""
    given.check_remote(url)
    from kvblend.cli.ask import ask_here, ask_server
    from kvblend.cli.backends import Question
    from kvblend.cli.inputs import read_blend, read_ratio, read_texts

    files = tuple(chunk_file or ())
    texts, options = tuple(read_texts(files)), read_blend(blend or ())
    ratio = read_ratio(recompute_ratio)
    bound = {} if max_kl is None else {"max_kl": max_kl}
    question = Question(query, texts, system, mode, ratio, max_tokens, temperature, {**options, **bound}, files)
    if url is not None:
        ask_server(url, given.value("model"), question, as_json=as_json)
    else:
        # as settings too: layers that the model does not have are found before its weights are read
        ask_here(given.with_blend(blend).resolve().settings, question, as_json=as_json)
