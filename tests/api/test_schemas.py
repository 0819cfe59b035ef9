from __future__ import annotations

from typing import Any

import pytest

from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.bodies import CHAT_FIELDS, CHAT_NEUTRAL, TEXT_FIELDS, TEXT_NEUTRAL, parse_chat
from kvblend.api.server.openai.chunks import FIELDS
from kvblend.api.server.openai.schemas import build_schemas

SCHEMAS = build_schemas("m", ApiLimits())


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("ChatCompletion", CHAT_FIELDS - CHAT_NEUTRAL.keys() - {"chunks"}),
        ("Completion", TEXT_FIELDS - TEXT_NEUTRAL.keys() - {"chunks"}),
        ("Chunks", set(FIELDS) - {"chunks"}),
    ],
)
def test_a_schema_has_the_fields_that_are_taken(name: str, taken: set[str]) -> None:
    assert set(SCHEMAS[name]["properties"]) == taken


def test_a_body_by_the_schema_is_taken() -> None:
    example: dict[str, Any] = {
        "model": SCHEMAS["ChatCompletion"]["properties"]["model"]["enum"][0],
        "messages": [{"role": role, "content": "x"} for role in ("system", "user")],
        "max_tokens": SCHEMAS["ChatCompletion"]["properties"]["max_tokens"]["maximum"],
        "seed": SCHEMAS["ChatCompletion"]["properties"]["seed"]["maximum"],
    }
    assert parse_chat(example, "c", "m", ApiLimits()).requests[0].sampling.seed == example["seed"]
