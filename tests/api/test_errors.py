from __future__ import annotations

import pytest

from kvblend.api.client import errors


@pytest.mark.parametrize(
    ("status", "kind"), [(429, errors.ServerBusy), (503, errors.ServerBusy), (400, errors.RequestRefused)]
)
def test_only_what_may_be_taken_later_is_busy(status: int, kind: type[errors.RequestRefused]) -> None:
    assert type(errors.refused(status, "c", "m")) is kind


def test_a_timeout_is_one_of_pythons_too() -> None:
    assert issubclass(errors.ResponseTimeout, TimeoutError)
    assert issubclass(errors.ResponseTimeout, errors.KvblendError)
