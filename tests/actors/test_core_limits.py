"""Pages of tokens."""

from __future__ import annotations

import pytest

from kvblend.actors.core.limits import Limits


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_begun_page_counts_whole(tokens: int, pages: int) -> None:
    assert Limits(pages=8, page_tokens=16).pages_of(tokens) == pages
