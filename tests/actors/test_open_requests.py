"""Accepted requests: one stream each, one end each, ids that come again."""

from __future__ import annotations

import asyncio

import pytest

from kvblend.actors.messages import Delta, Failed, Finished, Usage
from kvblend.actors.open_requests import OpenRequests, stream_of
from kvblend.actors.streams import TokenStream


def done(request_id: str) -> Finished:
    return Finished(request_id, "stop", Usage())


def opened(requests: OpenRequests, request_id: str = "r") -> tuple[str, TokenStream]:
    job_id = requests.new_job_id(request_id)
    return job_id, requests.open(job_id)


@pytest.fixture
def abandoned() -> list[str]:
    return []


@pytest.fixture
async def requests(abandoned: list[str]) -> OpenRequests:
    return OpenRequests(abandoned.append)


@pytest.mark.parametrize(("job", "request_id"), [("r#1", "r"), ("a#b#2", "a#b"), ("/precompute/3", ""), ("plain", "")])
def test_a_job_leads_back_to_its_request(job: str, request_id: str) -> None:
    assert stream_of(job) == request_id


async def test_no_two_jobs_have_the_same_id(requests: OpenRequests) -> None:
    first, second = requests.new_job_id("r"), requests.new_job_id("r")
    assert first != second
    assert stream_of(first) == stream_of(second) == "r"


async def test_events_of_a_job_reach_the_reader_under_the_requests_id(requests: OpenRequests) -> None:
    job, stream = opened(requests)
    requests.push_of_job(Delta(job, "hi", (1,)))
    assert stream.drain_nowait() == [Delta("r", "hi", (1,))]


async def test_a_terminal_event_closes_the_request(requests: OpenRequests) -> None:
    job, stream = opened(requests)
    assert ("r" in requests, len(requests), requests.ids()) == (True, 1, ["r"])
    requests.push_of_job(done(job))
    assert stream.ended
    assert ("r" in requests, len(requests), requests.get("r")) == (False, 0, None)


async def test_late_news_of_the_first_job_is_not_taken_for_news_of_the_second(requests: OpenRequests) -> None:
    first, _ = opened(requests)
    requests.push_of_job(done(first))
    _, stream = opened(requests)
    requests.push_of_job(done(first))
    assert not stream.ended


async def test_an_id_that_is_open_is_refused(requests: OpenRequests) -> None:
    opened(requests)
    with pytest.raises(ValueError, match="'r' is open already"):
        opened(requests)


async def test_events_nobody_waits_for_end_here(requests: OpenRequests) -> None:
    requests.push(done("x"))
    requests.push_of_job(done("/precompute/1"))
    assert len(requests) == 0


async def test_an_abandoned_stream_is_reported_by_request(requests: OpenRequests, abandoned: list[str]) -> None:
    _, stream = opened(requests)
    stream.abandon()
    assert abandoned == ["r"]


async def test_all_can_be_failed_at_once(requests: OpenRequests) -> None:
    streams = [opened(requests, name)[1] for name in ("a", "b")]
    requests.fail_all("the sky fell")
    assert [stream.terminal for stream in streams] == [Failed(n, "internal", "the sky fell") for n in ("a", "b")]
    assert len(requests) == 0


async def test_a_timer_goes_off_for_an_open_request(requests: OpenRequests) -> None:
    opened(requests)
    rang = asyncio.Event()
    requests.arm("r", 0.0, rang.set)
    await asyncio.wait_for(rang.wait(), 5.0)


async def test_the_end_of_a_request_stops_its_timer(requests: OpenRequests) -> None:
    job, _ = opened(requests)
    requests.arm("r", 3600.0, lambda: None)
    request = requests.get("r")
    assert request is not None
    assert request.timer is not None
    requests.push_of_job(done(job))
    assert request.timer.cancelled()


async def test_no_timer_is_set_for_who_has_ended(requests: OpenRequests) -> None:
    requests.arm("r", 0.0, lambda: pytest.fail("rang for nobody"))
    await asyncio.sleep(0)


async def test_quiet_comes_with_the_last_end(requests: OpenRequests) -> None:
    jobs = [opened(requests, name)[0] for name in ("a", "b")]
    waiting = asyncio.create_task(requests.until_quiet())
    await asyncio.sleep(0)
    requests.push_of_job(done(jobs[0]))
    await asyncio.sleep(0)
    assert not waiting.done()
    requests.push_of_job(done(jobs[1]))
    await waiting
