"""Errors under the names that the user typed, where a request calls the field something else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.reporting import explain

QUESTION_FLAGS = {
    "input": "--query",
    "messages": "--query",
    "instructions": "--system",
    "model": "--model",
    "max_output_tokens": "--max-tokens",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "seed": "--seed",
    "stop_token_ids": "--stop-token-id",
    "stop": "--stop",
    "min_tokens": "--min-tokens",
    "top_logprobs": "--logprobs",
    "recompute_ratio": "--recompute-ratio",
    "max_kl": "--max-kl",
    "mode": "--mode",
}
_VERBS = ("is ", "has ", "must ", "holds ")


def document_names(names: Sequence[object]) -> dict[str, str]:
    """The paths of a request's documents, and what the user calls these."""
    return {f"documents[{index}]": str(name) for index, name in enumerate(names)}


def renamed(message: str, param: str, names: Mapping[str, str]) -> str | None:
    """The message about `param` under its name in `names`, None where it has none there."""
    plain = param.removeprefix("blend.")
    blend = {plain: f"--blend {plain}"} if plain != param and plain not in names else {}
    for ours, theirs in {**names, **blend}.items():
        if plain.removeprefix(ours)[:1] in ("", ".", "[") and plain.startswith(ours):
            about = message.removeprefix(param).removeprefix(plain).removeprefix(":").strip()
            return f"{theirs}{' ' if about.startswith(_VERBS) else ': '}{about}"
    return None


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a request that is made inside name what the user typed; others pass as they are.

    One that names no field is about the document, where there is just one.
    """
    try:
        yield
    except Exception as error:
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        documents = [path for path in names if path.startswith("documents[")]
        if param is None and code == "too_large" and len(documents) == 1:
            param = documents[0]
        said = renamed(explain(error)[0], param, names) if isinstance(param, str) else None
        if code == "too_large" and param == "input":
            # the whole prompt is too long, not what the user asked
            said = explain(error)[0].removeprefix("input: ")
        if said is None:
            raise
        raise (BadInput if explain(error)[1] == 2 else CommandError)(said) from error
