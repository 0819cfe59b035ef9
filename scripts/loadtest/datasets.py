"""Texts and prompts from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.jobs import BadData, Job

TEXT_CHARS_MAX = 1 << 20


def read_folder(folder: Path) -> tuple[str, ...]:
    """The texts of the `.txt` and `.md` files below a folder, in the order of their names."""
    texts = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".md") and p.is_file()):
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadData(f"--dataset-path: {path}: {error}") from error
        if len(text) > TEXT_CHARS_MAX:
            raise BadData(f"--dataset-path: {path} has {len(text)} characters; the limit is {TEXT_CHARS_MAX}")
        texts += [text] if text else []
    if not texts:
        raise BadData(f"--dataset-path: {folder} has no .txt or .md file with text")
    return tuple(texts)


def read_custom(path: Path, count: int, output_len: int) -> tuple[tuple[str, ...], list[Job]]:
    """Lines `{"prompt", "documents"?, "output_tokens"?}`, from the first again where there are too few."""
    pool: dict[str, int] = {}
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"--dataset-path: {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_read_row(f"--dataset-path: {path}:{number}", line, pool, output_len))
    if not rows:
        raise BadData(f"--dataset-path: {path} has no line")
    jobs = [replace(rows[index % len(rows)], index=index) for index in range(count)]
    return tuple(pool), jobs


def _read_row(where: str, line: str, pool: dict[str, int], output_len: int) -> Job:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise BadData(f"{where}: is no JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise BadData(f"{where}: prompt: is no text")
    documents, length = row.get("documents", []), row.get("output_tokens", output_len)
    if not isinstance(documents, list) or not all(isinstance(text, str) and text.strip() for text in documents):
        raise BadData(f"{where}: documents: is no list of texts")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise BadData(f"{where}: output_tokens: is no whole number from 1")
    return Job(0, row["prompt"], tuple(pool.setdefault(text, len(pool)) for text in documents), length)
