from __future__ import annotations

import pytest

from kvblend.actors.errors import STATUS_BY_CODE, RequestError


@pytest.mark.parametrize("code", STATUS_BY_CODE)
def test_every_code_has_a_status_of_an_error(code: str) -> None:
    assert 400 <= RequestError(code, "why").status < 600


def test_an_unknown_code_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'odd'"):
        RequestError("odd", "why")


def test_the_message_is_the_exception_s_text() -> None:
    error = RequestError("too_large", "message of 5 MiB; at most 4 MiB", "input")
    assert (str(error), error.param) == (error.message, "input")
