"""What an evaluation keeps of one question and one run, as plain data that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one question. Lists have one entry per position.

    `kl` and `kl_cont` are KL(full || method) in nats over the gold answer and over the full prefill's own continuation;
    `nll` and `nll_full` -log p per gold token. `first_divergence` counts the leading tokens that the generated text
    shares with the full prefill's. `ttft_ms` runs from KV in memory to the first token's logits. `estimates` is what
    the run shows without knowing the full prefill. `kl_store`, where chunks are stored in a narrow form, is KL(the same
    run over chunks stored as computed || this run) over the gold answer.
    """

    method: str
    ratio: float | None
    kl: tuple[float, ...]
    kl_cont: tuple[float, ...]
    nll: float
    nll_full: float
    top1: float
    f1: float
    em: float
    rouge_l: float
    answer: str
    first_divergence: int
    ttft_ms: float
    charged_ratio: float
    estimates: dict[str, Any]
    kl_store: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """All runs of question number `index`."""

    index: int
    runs: tuple[RunResult, ...]

    def find(self, method: str, ratio: float | None) -> RunResult:
        """The run of this name and ratio; KeyError where there is none."""
        for run in self.runs:
            if (run.method, run.ratio) == (method, ratio):
                return run
        raise KeyError(f"question {self.index} has no run of {method} at {ratio}")

    def to_data(self) -> dict[str, Any]:
        """As dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> QuestionResult:
        """The inverse of `to_data`; ValueError where a field is missing or unknown."""
        try:
            return cls(int(data["index"]), tuple(_run_from(run) for run in data["runs"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a result of this version: {error}") from None


def _run_from(data: Mapping[str, Any]) -> RunResult:
    values = {field.name: data[field.name] for field in fields(RunResult)}
    return RunResult(**{**values, **{name: tuple(values[name]) for name in ("kl", "kl_cont", "kl_store")}})
