"""Results of an evaluation that is still running, one line per question, so that a broken one can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvblend.cli.failures import BadInput
from kvblend.engine.evaluation.methods import Run
from kvblend.engine.evaluation.questions import Question
from kvblend.engine.evaluation.results import QuestionResult

_VERSION = 1


def settings_digest(runs: Sequence[Run], **settings: object) -> str:
    """What must be the same for two evaluations to share results: the runs, and whatever else is named."""
    return _digest([_VERSION, sorted(settings.items()), [repr(run) for run in runs]])


def question_digest(question: Question) -> str:
    """Which question a result belongs to."""
    return _digest(asdict(question))


class PartialResults:
    """The file beside `--json`. Its first line names the settings; a line that was cut short is dropped."""

    def __init__(self, out: Path, settings: str) -> None:
        self.path = out.with_name(out.name + ".partial.jsonl")
        self._header = {"kvblend_eval": _VERSION, "settings": settings}

    def load(self, questions: Sequence[Question], *, restart: bool) -> dict[int, QuestionResult]:
        """Results that are there already, by index of the question; makes the file ready for more.

        BadInput where it was begun with other settings, unless `restart` empties it.
        """
        found: dict[int, QuestionResult] = {}
        lines = [] if restart or not self.path.exists() else self._lines()
        if lines and lines[0] != self._header:
            raise BadInput(
                f"{self.path} was begun with another model, dtype, device, methods or ratios; give those again to go "
                "on, --restart to begin anew, or another --json"
            )
        digests = dict(enumerate(map(question_digest, questions)))
        for line in lines[1:]:
            index = line.get("index")
            if isinstance(index, int) and index in digests and line.get("question") == digests[index]:
                found[index] = QuestionResult.from_data(line)
        self._write("".join(_line(line) for line in (self._header, *lines[1:])))
        return found

    def append(self, question: Question, result: QuestionResult) -> None:
        """Keep one more result."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"question": question_digest(question), **result.to_data()}))

    def remove(self) -> None:
        """The evaluation is complete: the file has done its work."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict):
                break
            lines.append(line)
        return lines

    def _write(self, text: str) -> None:
        write_whole(self.path, text)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never half of one."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _line(data: object) -> str:
    return json.dumps(data) + "\n"


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:32]
