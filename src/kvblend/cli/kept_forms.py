"""Forms of chunks that an evaluation computed, in a folder: the next one with other methods need not compute them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvblend.engine.evaluation.chunk_kv import FormKey, Payloads

_MARK = b"kvblend chunk form 1\n"
_DIGEST_BYTES = 32


class FolderForms:
    """One file per form: a mark, the digest of what follows, the number of layers, and their payloads, equally long.

    `told` says what else the numbers depend on: the model, the compute dtype, the device, the program. A file that is
    damaged counts as missing.
    """

    def __init__(self, folder: Path, *told: str) -> None:
        self._folder = folder
        self._told = told

    def get(self, key: FormKey) -> Payloads | None:
        """The payloads kept under `key`; None where there are none, or none that is whole."""
        try:
            # tensors over these bytes must be writable, or torch warns of them
            content = bytearray(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        start = len(_MARK) + _DIGEST_BYTES
        body = memoryview(content)[start:]
        if content[:start] != _MARK + _digest(body):
            return None
        layers, numbers = int.from_bytes(body[:4], "little"), body[4:]
        size = len(numbers) // layers
        return [numbers[i * size : (i + 1) * size] for i in range(layers)]

    def put(self, key: FormKey, payloads: Payloads) -> None:
        """Write a file that a reader sees whole or not at all. Raises OSError where the disk does not take it."""
        body = b"".join((len(payloads).to_bytes(4, "little"), *payloads))
        path = self._path(key)
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(_MARK + _digest(body) + body)
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _path(self, key: FormKey) -> Path:
        name = hashlib.blake2b(repr((self._told, key)).encode(), digest_size=20).hexdigest()
        return self._folder / f"{name}.form"


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
