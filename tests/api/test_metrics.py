from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_http import call

from kvblend.actors.errors import RequestError
from kvblend.api.server.openai.metrics import share_out
from tests.api.scripted import USAGE, ScriptedSystem, Server, serving

ASK = {"messages": [{"role": "user", "content": "q"}]}


async def scrape(server: Server) -> dict[str, float]:
    answer = await call(server.port, "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = (re.fullmatch(r"(\S+) (\S+)", line) for line in answer.body.decode().splitlines())
    return {found[1]: float(found[2]) for found in lines if found is not None}


async def test_an_answer_is_counted_under_the_names_of_the_page() -> None:
    async with serving(ScriptedSystem()) as server:
        await call(server.port, "POST", "/v1/chat/completions", ASK)
        seen = await scrape(server)
    expected = {
        "kvblend:time_to_first_token_seconds_count": 1,
        "kvblend:e2e_request_latency_seconds_count": 1,
        "kvblend:request_queue_time_seconds_count": 1,
        'kvblend:chunk_lookup_total{result="hit"}': 2,
        'kvblend:chunk_lookup_total{result="miss"}': 1,
        "kvblend:blend_recomputed_tokens_total": 10,
        "kvblend:prompt_tokens_total": 100,
        "kvblend:generation_tokens_total": 3,
        'kvblend:kv_load_seconds_count{tier="host"}': 1,
        "kvblend:blend_recompute_ratio_count": 1,
        'kvblend:request_success_total{finished_reason="stop"}': 1,
        "kvblend:ws_slow_consumer_total": 0,
        "kvblend:open_streams": 0,
    }
    assert {name: seen.get(name) for name in expected} == expected


async def test_a_websockets_answer_counts_too() -> None:
    async with serving(ScriptedSystem()) as server:
        async with server.peer() as peer:
            await peer.create()
            await peer.finish()
        assert (await scrape(server))["kvblend:prompt_tokens_total"] == 100


async def test_a_refusal_is_counted_by_its_code() -> None:
    system = ScriptedSystem()
    system.refusal = RequestError("rate_limited", "slow down")
    async with serving(system) as server:
        await call(server.port, "POST", "/v1/chat/completions", ASK)
        assert (await scrape(server))['kvblend:request_failure_total{code="rate_limited"}'] == 1


async def test_the_state_is_read_when_it_is_asked_for() -> None:
    system = ScriptedSystem()
    async with serving(system) as server:
        system.numbers = {
            "engine": {"num_requests_running": 2, "num_requests_waiting": 5, "ratio_lever": 0.5},
            "store": {"host_bytes": 10, "disk_bytes": 20, "chunks": 3},
            "device_pool": {"num_bytes": 30, "hits": 6, "evictions": 2},
            "actors": {"loader.depth": 4, "loader.restarts": 1},
        }
        seen = await scrape(server)
    expected = {
        "kvblend:num_requests_running": 2,
        "kvblend:num_requests_waiting": 5,
        "kvblend:ratio_lever": 0.5,
        'kvblend:kv_tier_bytes{tier="host"}': 10,
        'kvblend:kv_tier_bytes{tier="disk"}': 20,
        'kvblend:kv_tier_bytes{tier="device_pool"}': 30,
        "kvblend:device_pool_hits_total": 6,
        "kvblend:device_pool_evictions_total": 2,
        "kvblend:chunks": 3,
        'kvblend:actor_mailbox_depth{actor="loader"}': 4,
        'kvblend:actor_restarts_total{actor="loader"}': 1,
    }
    assert {name: seen.get(name) for name in expected} == expected


@given(st.integers(0, 10**6), st.dictionaries(st.sampled_from(("host", "disk", "remote")), st.integers(0, 10**6)))
def test_shares_add_up(total: int, weights: dict[str, int]) -> None:
    shares = share_out(total, weights)
    assert sum(shares.values()) == total
    assert all(share >= 0 for share in shares.values())


def test_shares_follow_the_tokens_of_each_tier() -> None:
    assert share_out(90, {"host": 100, "disk": 200}) == {"host": 30, "disk": 60}


@pytest.mark.parametrize("estimate", [None, 0.02])
async def test_divergence_is_observed_where_it_was_bounded(estimate: float | None) -> None:
    from kvblend.api.server.gate import Gate
    from kvblend.api.server.limits import ApiLimits
    from kvblend.api.server.openai.metrics import Metrics

    metrics = Metrics(ScriptedSystem(), Gate(ApiLimits()))
    metrics.count_end("stop", replace(USAGE, kl_estimate=estimate), generate=True)
    assert f"kvblend:blend_divergence_count {float(estimate is not None)}" in metrics.text().decode()
