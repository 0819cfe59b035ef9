"""A tokenizer from the metadata of a GGUF file: SentencePiece, or byte-level BPE with pre-tokenisers known as exact."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvblend.engine.config import BadModelFile, UnsupportedModel
from kvblend.engine.loaders.gguf_sentencepiece import added_token, describe_sentencepiece
from kvblend.engine.tokenizer import Tokenizer

# token types of the format
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# words as the Llama 3 and Qwen 2 vocabularies were cut; they differ in how many digits stand together
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(first: dict[str, Any], use_regex: bool) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, _byte_level(use_regex)]}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2 = _byte_level(use_regex=True)
_SINGLE_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, use_regex=True)
_LLAMA3 = _sequence(_split(_WORDS.format(digits="{1,3}")), use_regex=False)
_QWEN2 = _sequence(_split(_WORDS.format(digits="")), use_regex=False)

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}
"""What can stand in `tokenizer.ggml.pre`, as the `tokenizers` library writes it."""


def build_tokenizer(path: Path, metadata: Mapping[str, Any], eos_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer a file describes.

    UnsupportedModel names a tokenizer model or pre-tokeniser that is not known to be exact here; BadModelFile names a
    missing or inconsistent field.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise BadModelFile(f"{path}: the field tokenizer.ggml.model is missing")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{path}: tokenizer {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    tokens = _strings(path, metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise BadModelFile(f"{path}: tokenizer.ggml.token_type does not give one type for each of {len(tokens)} tokens")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    for name, value in (("bos", bos), *(("eos", i) for i in eos_ids)):
        if value is not None and not 0 <= value < len(tokens):
            raise BadModelFile(f"{path}: the {name} token is {value}; the vocabulary has {len(tokens)} tokens")
    special = {i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN)} | set(eos_ids)
    if kind == "llama":
        source, begins = describe_sentencepiece(path, metadata, tokens, types, special), True
    else:
        source = _describe_byte_level(path, metadata, tokens, types, special)
        begins = source["model"]["ignore_merges"]
    try:
        return Tokenizer(
            json.dumps(source),
            bos_id=bos,
            eos_ids=eos_ids,
            # files that say nothing follow the convention of their vocabulary
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", begins)),
        )
    except BadModelFile as error:
        raise BadModelFile(f"{path}: {error}") from None


def _describe_byte_level(
    path: Path, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], special: set[int]
) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{path}: pre-tokeniser {pre!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges = _strings(path, metadata, "tokenizer.ggml.merges")
    added = [i for i, t in enumerate(types) if i in special or t == _USER_DEFINED]
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, tokens[i], i in special) for i in added],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [_pair(path, merge) for merge in merges],
            "ignore_merges": PRE_TOKENIZERS[pre] is _LLAMA3,
        },
    }


def _strings(path: Path, metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadModelFile(f"{path}: the field {name} is missing or is not a list of texts")
    return value


def _pair(path: Path, merge: str) -> list[str]:
    pair = merge.split(" ")
    if len(pair) != 2:
        raise BadModelFile(f"{path}: tokenizer.ggml.merges holds {merge!r}; a merge is two parts around one space")
    return pair
