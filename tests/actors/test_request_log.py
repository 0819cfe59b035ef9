from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvblend.actors.messages import Failed, Finished, StoredChunk, Usage
from kvblend.actors.open_requests import OpenRequests
from kvblend.actors.request_log import log_end

USAGE = Usage(
    mode="blend",
    prompt_tokens=100,
    output_tokens=3,
    chunk_hits=2,
    chunk_misses=1,
    tokens_reused=60,
    tokens_recomputed=10,
    tokens_fresh=30,
    ttft_ms=5.04,
    total_ms=9.0,
    notes=("the text of a note",),
)


@pytest.fixture
def records() -> Iterator[list[Any]]:
    found: list[Any] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    log, keeper = logging.getLogger("kvblend.requests"), Keeper()
    before = log.level
    log.addHandler(keeper)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(keeper)
    log.setLevel(before)


def test_the_line_says_what_was_reused(records: list[Any]) -> None:
    log_end(Finished("resp_1", "length", USAGE))
    (record,) = records
    assert (record.getMessage(), record.request_id, record.outcome, record.mode) == (
        "request finished",
        "resp_1",
        "length",
        "blend",
    )
    assert (record.prompt_tokens, record.tokens_reused, record.tokens_recomputed, record.tokens_fresh) == (
        100,
        60,
        10,
        30,
    )
    assert (record.chunk_hits, record.chunk_misses, record.ttft_ms, record.total_ms) == (2, 1, 5.0, 9.0)
    assert "note" not in str(record.__dict__)


def test_storing_says_how_many(records: list[Any]) -> None:
    log_end(Finished("resp_1", "stop", Usage(), (StoredChunk("a", 3, True),)))
    assert records[0].chunks_stored == 1


@pytest.mark.parametrize(("code", "level"), [("deadline_exceeded", logging.INFO), ("internal", logging.WARNING)])
def test_a_failure_has_its_code_and_not_its_text(records: list[Any], code: str, level: int) -> None:
    log_end(Failed("resp_1", code, "quotes the prompt"))
    assert (records[0].outcome, records[0].levelno) == (code, level)
    assert "quotes" not in str(records[0].__dict__)


async def test_every_request_that_ends_has_one_line_and_its_parts_none(records: list[Any]) -> None:
    requests = OpenRequests(lambda _: None)
    for job in ("resp_1#1", "/resp_1#1/0#2"):
        requests.open(job)
    requests.push_of_job(Finished("/resp_1#1/0#2", "stop", USAGE))
    requests.push_of_job(Finished("resp_1#1", "stop", USAGE))
    requests.push_of_job(Finished("resp_1#1", "stop", USAGE))
    assert [record.request_id for record in records] == ["resp_1"]
