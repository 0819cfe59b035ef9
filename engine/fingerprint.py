"""The name of a model's arithmetic: equal fingerprints mean that stored KV may be shared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from blake3 import blake3

from kvblend.engine.config import ModelConfig

_VERSION = 1
# neither changes the KV of a given list of token ids
_UNRELATED = ("context_length", "bos_id", "eos_ids")


def model_fingerprint(config: ModelConfig, weight_digests: Sequence[bytes], tokenizer_digest: bytes) -> str:
    """64 hexadecimal digits over sizes, RoPE, the weight files in order, and the tokenizer.

    The dtype a model is loaded in is no part of it: that is a property of what is stored.
    """
    shape = {name: value for name, value in asdict(config).items() if name not in _UNRELATED}
    # floats are written exactly: a rounded RoPE base would be another model under the same name
    state = [
        _VERSION,
        json.dumps(shape, sort_keys=True),
        [digest.hex() for digest in weight_digests],
        tokenizer_digest.hex(),
    ]
    return blake3(json.dumps(state).encode()).hexdigest()
