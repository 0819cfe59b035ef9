from __future__ import annotations

import json
from typing import Any

import pytest

from kvblend.engine.evaluation.results import QuestionResult, RunResult


def result(index: int = 0, **changes: Any) -> QuestionResult:
    values: dict[str, Any] = {
        "method": "query", "ratio": 0.1, "kl": (0.1, 0.2), "kl_cont": (0.3,), "nll": 1.0, "nll_full": 0.9, "top1": 0.5,
        "f1": 0.2, "em": 0.0, "rouge_l": 0.1, "answer": "x", "first_divergence": 2, "ttft_ms": 3.0,
        "charged_ratio": 0.1, "estimates": {"entropy_cont": [0.1]},
    }  # fmt: skip
    return QuestionResult(index, (RunResult(**{**values, **changes}),))


@pytest.mark.parametrize("ratio", [0.1, None])
def test_a_result_survives_a_file(ratio: float | None) -> None:
    whole = result(3, ratio=ratio, kl_store=(0.5, 0.25))
    assert QuestionResult.from_data(json.loads(json.dumps(whole.to_data()))) == whole


def test_a_run_is_found_by_method_and_ratio() -> None:
    whole = result(ratio=None)
    assert whole.find("query", None) is whole.runs[0]
    with pytest.raises(KeyError, match=r"question 0 has no run of query at 0\.1"):
        whole.find("query", 0.1)


def test_what_lacks_a_field_is_refused() -> None:
    data = result().to_data()
    del data["runs"][0]["kl"]
    with pytest.raises(ValueError, match="not a result of this version: 'kl'"):
        QuestionResult.from_data(data)
