from __future__ import annotations

from kvblend.cli.failures import BadInput, CommandError


def test_bad_input_ends_with_2_and_other_failures_with_1() -> None:
    assert (BadInput("x").exit_code, CommandError("x").exit_code) == (2, 1)
