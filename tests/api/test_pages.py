from __future__ import annotations

from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.document import describe
from kvblend.api.server.openai.pages import render


def test_every_operation_stands_on_the_page() -> None:
    document = describe("m", ApiLimits())
    page = render(document)
    assert [path for path in document["paths"] if f"<code>{path}</code>" not in page] == []


def test_bodies_are_linked_to_their_schema() -> None:
    page = render(describe("m", ApiLimits()))
    assert 'href="#ChatCompletion"' in page
    assert 'id="ChatCompletion"' in page
