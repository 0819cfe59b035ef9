"""What the benchmarks print about the machine, and the text they run on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def describe_machine() -> dict[str, object]:
    """Processor, cores, torch and its threads."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def real_text() -> str:
    """The project's own prose, about 20,000 tokens: documents, samples, licence."""
    files = [
        *sorted((ROOT / "src/kvblend/samples").glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "LICENSE",
    ]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def wait_passively() -> None:
    """Have threads of torch that wait leave the processor to others, as the command line sets it.

    torch reads the variable when it is imported, so this starts the program again where it is not set.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.argv])
