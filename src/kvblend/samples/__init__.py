"""Sample documents about the project itself, a question, and the words of its answer: what `kvblend demo` uses."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

SYSTEM = "You answer questions from the given passages. Be brief and exact."
QUESTION = "What are the three important actors?"
ANSWER = "the scheduler, the loader, and the blender"


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: its heading, and its text without the heading."""

    title: str
    text: str


def load() -> list[Sample]:
    """All sample documents, in the order of their file names."""
    files = sorted((f for f in resources.files(__name__).iterdir() if f.name.endswith(".md")), key=lambda f: f.name)
    samples = []
    for file in files:
        heading, _, text = file.read_text(encoding="utf-8").partition("\n")
        samples.append(Sample(heading.removeprefix("# ").strip(), text.strip()))
    return samples
