"""A gate's findings: judged by their limits, written down and read back."""

from __future__ import annotations

import json
import math

import pytest

from kvblend.engine.evaluation.gate_report import GateCheck, GateReport

GOOD = GateCheck.of("prefix", 1e-6, 1e-3, "stored against fresh")
BAD = GateCheck.of("kl_mean", 0.7, 0.5, "mean KL")


def test_a_check_passes_up_to_its_limit() -> None:
    assert GOOD.passed
    assert GateCheck.of("x", 0.5, 0.5, "y").passed
    assert not BAD.passed
    assert not GateCheck.of("x", math.nan, 0.5, "y").passed


def test_a_report_passes_when_all_checks_do_and_there_are_some() -> None:
    assert GateReport((GOOD,)).passed
    assert not GateReport((GOOD, BAD)).passed
    assert not GateReport(()).passed


def test_reasons_name_the_failed_checks_only() -> None:
    assert GateReport((GOOD, BAD)).reasons == ("kl_mean: mean KL: 0.7 (at most 0.5)",)


def test_a_report_survives_being_written_as_json() -> None:
    endless = GateCheck.of("x", math.inf, 1.0, "y")
    report = GateReport((GOOD, BAD, endless))
    assert GateReport.from_fields(json.loads(json.dumps(report.to_fields(), allow_nan=False))) == report


@pytest.mark.parametrize("fields", [[{}], [{"name": "x"}], [{**GateReport((GOOD,)).to_fields()[0], "value": "many"}]])
def test_anything_else_is_no_report(fields: list[dict[str, object]]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        GateReport.from_fields(fields)
