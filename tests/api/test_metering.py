from __future__ import annotations

from kvblend.actors.messages import ChatMessage, Delta, Failed, Finished, Generate, StreamEvent
from kvblend.api.server.gate import Gate
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.metering import MeteredStream
from kvblend.api.server.openai.metrics import Metrics
from tests.api.scripted import USAGE, ScriptedSystem

REQUEST = Generate("r", (ChatMessage("user", "q"),))


class Canned:
    """A stream of given batches."""

    def __init__(self, *batches: list[StreamEvent]) -> None:
        self.batches = list(batches)
        self.abandoned = 0

    async def drain(self) -> list[StreamEvent]:
        return self.batches.pop(0) if self.batches else []

    def abandon(self) -> None:
        self.abandoned += 1


def metered(*batches: list[StreamEvent], request: Generate = REQUEST) -> tuple[MeteredStream, Metrics, Canned]:
    metrics, canned = Metrics(ScriptedSystem(), Gate(ApiLimits())), Canned(*batches)
    return MeteredStream(canned, request, metrics), metrics, canned


def value(metrics: Metrics, name: str) -> float:
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith(f"kvblend:{name} ")]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


async def test_gaps_between_tokens_are_counted_one_by_one() -> None:
    stream, metrics, _ = metered([Delta("r", "a", (1,))], [Delta("r", "bc", (2, 3))], [Delta("r", "d", (4,))])
    for _ in range(3):
        await stream.drain()
    assert value(metrics, "inter_token_latency_seconds_count") == 3


async def test_events_pass_unchanged() -> None:
    events: list[StreamEvent] = [Delta("r", "a", (1,)), Finished("r", "stop", USAGE)]
    stream, _, _ = metered(events)
    assert await stream.drain() == events


async def test_an_end_is_counted_once() -> None:
    stream, metrics, canned = metered([Finished("r", "stop", USAGE)])
    await stream.drain()
    stream.abandon()
    assert value(metrics, 'request_success_total{finished_reason="stop"}') == 1
    assert value(metrics, 'request_success_total{finished_reason="abandoned"}') == 0
    assert (value(metrics, "open_streams"), canned.abandoned) == (0, 1)


async def test_a_reader_that_left_counts_as_that() -> None:
    stream, metrics, canned = metered()
    assert value(metrics, "open_streams") == 1
    stream.abandon()
    assert value(metrics, 'request_success_total{finished_reason="abandoned"}') == 1
    assert (value(metrics, "open_streams"), canned.abandoned) == (0, 1)


async def test_a_failure_is_counted_by_code() -> None:
    stream, metrics, _ = metered([Failed("r", "internal", "x")])
    await stream.drain()
    assert value(metrics, 'request_failure_total{code="internal"}') == 1


async def test_storing_is_no_answer() -> None:
    storing = Generate("r", generate=False)
    stream, metrics, _ = metered([Finished("r", "stop", USAGE)], request=storing)
    await stream.drain()
    assert value(metrics, "e2e_request_latency_seconds_count") == 0
    assert value(metrics, 'request_success_total{finished_reason="stop"}') == 1
