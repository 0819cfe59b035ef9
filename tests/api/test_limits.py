from __future__ import annotations

import dataclasses

import pytest

from kvblend.api.client.connection import LANES_MAX
from kvblend.api.client.wire import MESSAGE_BYTES_MAX
from kvblend.api.server.limits import ApiLimits


def test_limits_cannot_be_changed_under_a_running_server() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ApiLimits().lanes_max = 3  # type: ignore[misc]


def test_the_client_keeps_to_the_servers_limits() -> None:
    assert (ApiLimits().message_bytes_max, ApiLimits().lanes_max) == (MESSAGE_BYTES_MAX, LANES_MAX)
