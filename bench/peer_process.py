"""Engines as child processes that answer one JSON line for each they are given; and where peers are found."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_runner import ENGINES

CLOSE_S = 20.0


def find_peers(named: Sequence[str], folder: Path, only: str | None = None) -> tuple[dict[str, str], list[str]]:
    """`(name -> its Python, a line for each peer that is not there)`.

    `named` are `NAME=PYTHON`, `folder` holds one venv per peer, `only` names the wanted peers, joined by commas.
    Raises SystemExit for a name that is unknown, a Python that does not exist, or a wanted peer that is not there.
    """
    known = ", ".join(ENGINES)
    pythons: dict[str, str] = {}
    for text in named:
        name, equals, python = text.partition("=")
        if not equals or name not in ENGINES:
            raise SystemExit(f"--peer is {text!r}; it must be NAME=PYTHON with a name of: {known}")
        if not os.access(python, os.X_OK):
            raise SystemExit(f"--peer {name}: {python!r} is no Python that can be run")
        pythons[name] = python
    wanted = list(ENGINES) if only is None else [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in ENGINES:
            raise SystemExit(f"--only names {name!r}; choose of: {known}")
        own = folder / name / "bin" / "python"
        if name not in pythons and own.exists():
            pythons[name] = str(own)
    if "transformers" in wanted and "transformers" not in pythons and importlib.util.find_spec("transformers"):
        pythons["transformers"] = sys.executable
    found = {name: pythons[name] for name in wanted if name in pythons}
    there = ", ".join(found) or "none"
    lines = [
        f"peer {name} is not there (no {folder / name}, no --peer {name}=PYTHON); available: {there}"
        for name in wanted
        if name not in found
    ]
    if lines and only is not None:
        raise SystemExit(lines[0])
    return found, lines


class EngineProcess:
    """One engine. `facts` is what it said when it was ready."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._command = list(command)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> dict[str, Any] | None:
        """Start it and wait until it is ready; None, with a line on stderr, where it does not get there."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if self.name == "kvblend":
            # as its command line sets it
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None  # a pipe was asked for
        line = self._process.stdout.readline()
        if not line:
            print(f"{self.name} did not start: {self.last_words()}", file=sys.stderr, flush=True)
            return None
        self.facts = json.loads(line)
        return self.facts

    def ask(self, given: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises SystemExit where it fails or ends."""
        process = self._process
        assert process is not None  # started before
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"it ended: {self.last_words()}"}
        if "error" in reply:
            raise SystemExit(f"{self.name} failed: {reply['error']}")
        return reply

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """End its input, and it after a while; nothing is left running."""
        if self._process is None:
            return
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._errors.close()
