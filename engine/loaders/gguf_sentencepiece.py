"""SentencePiece vocabularies of GGUF files (`tokenizer.ggml.model` "llama") as the `tokenizers` library writes BPE.

SentencePiece joins the neighbours whose union has the best score. A vocabulary's scores fall in the order in which its
pieces were learnt, so the same is said by merges: every way to make a piece of two others, pieces in order of score.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvblend.engine.config import BadModelFile, UnsupportedModel

# token types of the format
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6
_MARK = "\u2581"


def describe_sentencepiece(
    path: Path,
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    special: Collection[int],
) -> dict[str, Any]:
    """The tokenizer as a JSON object of the `tokenizers` library.

    `tokens` and `types` are the file's, of one length; `special` are the control tokens, which no text can form.
    BadModelFile names a missing or inconsistent field, UnsupportedModel what is not executed.
    """
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise UnsupportedModel(f"{path}: tokenizer.ggml.remove_extra_whitespaces is true; only false is supported")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(s, float) for s in scores):
        raise BadModelFile(f"{path}: tokenizer.ggml.scores does not give one number for each of {len(tokens)} tokens")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise BadModelFile(f"{path}: the unknown token is {unknown!r}; the vocabulary has {len(tokens)} tokens")
    # converters disagree about how these write their spaces; they are met in the text itself
    contents = [t.replace(_MARK, " ") if k == _USER_DEFINED else t for t, k in zip(tokens, types, strict=True)]
    pieces = {t: s for t, s, k in zip(tokens, scores, types, strict=True) if k == _NORMAL}
    for i in special:
        pieces.pop(tokens[i], None)
    added = [i for i, k in enumerate(types) if i in special or k == _USER_DEFINED]
    return {
        "version": "1.0",
        # a run of spaces is looked for behind the replacement, where a written mark counts as a space too
        "added_tokens": [
            added_token(i, contents[i], i in special, normalized=not prefix and not contents[i].strip(" "))
            for i in added
        ],
        "normalizer": _normalizer(prefix),
        "pre_tokenizer": None,
        "decoder": _decoder(prefix),
        "model": {
            "type": "BPE",
            "vocab": {content: i for i, content in enumerate(contents)},
            "merges": list_merges(pieces),
            "unk_token": contents[unknown],
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
        },
    }


def list_merges(pieces: Mapping[str, float]) -> list[list[str]]:
    """Every pair of pieces whose union is a piece, best score of the union first."""
    return [
        [piece[:cut], piece[cut:]]
        for piece in sorted(pieces, key=lambda piece: -pieces[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def added_token(token_id: int, content: str, special: bool, *, normalized: bool = False) -> dict[str, Any]:
    """A token that is looked for before text is cut; `normalized`: in the text as the normaliser leaves it."""
    return {
        "id": token_id,
        "content": content,
        "special": special,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
    }


def _normalizer(prefix: bool) -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    if not prefix:
        return spaces
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _MARK}, spaces]}


def _decoder(prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
