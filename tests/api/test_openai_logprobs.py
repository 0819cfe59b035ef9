"""Sampling and log probabilities end to end: the unmodified `openai` package and `AsyncClient` over a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from model_files import save_llama
from openai import AsyncOpenAI
from small_system import running, serving_any

from kvblend.actors.messages import Delta, TokenLogprob
from kvblend.actors.system import System
from kvblend.api.client import AsyncClient

ASK: Any = [{"role": "user", "content": "who held the key?"}]
COUNT = 8


class Rig:
    """A server over a tiny model, and a client of it."""

    def __init__(self, system: System, port: int, client: AsyncOpenAI) -> None:
        self.system, self.port, self.client = system, port, client

    async def chat(self, **fields: Any) -> Any:
        return await self.client.chat.completions.create(
            **{"model": "tiny", "messages": ASK, "max_tokens": COUNT, "temperature": 0, **fields}
        )

    async def text(self, **fields: Any) -> Any:
        return await self.client.completions.create(
            **{"model": "tiny", "prompt": "the river and", "max_tokens": COUNT, "temperature": 0, **fields}
        )


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    model = save_llama(tmp_path / "tiny", max_position_embeddings=1024)
    async with running(model, store=tmp_path / "kv") as system, serving_any(system) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=30) as client:
            yield Rig(system, port, client)


def as_text(tokens: list[Any]) -> str:
    return b"".join(bytes(one.bytes or ()) for one in tokens).decode("utf-8", "replace")


async def test_a_conversations_tokens_have_log_probabilities_whole_and_streamed(rig: Rig) -> None:
    wanted = {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    answer = await rig.chat(**wanted)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == COUNT
    assert as_text(content) == answer.choices[0].message.content
    for one in content:
        assert [other.logprob for other in one.top_logprobs] == sorted(
            (o.logprob for o in one.top_logprobs), reverse=True
        )
        # greedy: the chosen one is the likeliest
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
    pieces = [chunk.choices[0] async for chunk in await rig.chat(**wanted, stream=True)]
    streamed = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content]
    assert [(one.token, one.bytes) for one in streamed] == [(one.token, one.bytes) for one in content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=1e-4)


async def test_without_asking_there_are_none(rig: Rig) -> None:
    assert (await rig.chat()).choices[0].logprobs is None
    assert all([chunk.choices[0].logprobs is None async for chunk in await rig.chat(stream=True)])
    assert (await rig.text()).choices[0].logprobs is None


async def test_a_plain_prompts_offsets_point_into_the_text(rig: Rig) -> None:
    wanted = {"logprobs": 2, "extra_body": {"ignore_eos": True}}
    choice = (await rig.text(**wanted)).choices[0]
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == COUNT
    for token, at, top, logprob in zip(
        told.tokens, told.text_offset, told.top_logprobs, told.token_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        if not token.startswith(("bytes:", "<|")):
            assert choice.text[at:].startswith(token)
    pieces = [chunk.choices[0] async for chunk in await rig.text(**wanted, stream=True)]
    offsets = [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset]
    assert offsets == told.text_offset


async def test_a_response_has_them_where_they_are_included(rig: Rig) -> None:
    wanted: Any = {
        "model": "tiny",
        "input": "who held the key?",
        "max_output_tokens": COUNT,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    response: Any = await rig.client.responses.create(**wanted)
    part = response.output[0].content[0]
    assert len(part.logprobs) == response.usage.output_tokens == COUNT
    assert response.top_logprobs == 2
    assert as_text(part.logprobs) == part.text
    assert [len(one.top_logprobs) for one in part.logprobs] == [2] * COUNT
    seen: list[Any] = []
    async for event in await rig.client.responses.create(**wanted, stream=True):
        if event.type == "response.output_text.delta":
            seen += event.logprobs
        elif event.type == "response.output_text.done":
            assert [one.token for one in event.logprobs] == [one.token for one in seen]
    assert [one.token for one in seen] == [one.token for one in part.logprobs]


async def test_our_own_client_has_them_typed(rig: Rig) -> None:
    seen: list[TokenLogprob] = []
    async with AsyncClient(f"ws://127.0.0.1:{rig.port}") as client:
        run = client.generate("who held the key?", max_tokens=COUNT, ignore_eos=True, logprobs=1)
        ids: list[int] = []
        async for event in run:
            if isinstance(event, Delta):
                seen += event.logprobs
                ids += event.token_ids
    assert [one.token_id for one in seen] == ids
    assert len(seen) == run.usage.output_tokens == COUNT
    assert [one.top[0].token_id for one in seen] == ids
    assert b"".join(one.bytes or b"" for one in seen).decode("utf-8", "replace") == run.text_so_far


async def test_one_candidate_at_any_temperature_is_the_greedy_answer(rig: Rig) -> None:
    greedy = await rig.chat()
    other = await rig.chat(temperature=1.7, seed=3, extra_body={"top_k": 1})
    assert other.choices[0].message.content == greedy.choices[0].message.content


async def test_a_token_that_ends_the_answer_has_no_text(rig: Rig) -> None:
    whole = await rig.chat(logprobs=True, extra_body={"ignore_eos": True})
    run = [event async for event in AsyncClient(f"ws://127.0.0.1:{rig.port}").generate(ASK[0]["content"], max_tokens=3)]
    second = [token for event in run if isinstance(event, Delta) for token in event.token_ids][1]
    cut = await rig.chat(logprobs=True, extra_body={"ignore_eos": True, "stop_token_ids": [second]})
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens <= 2
    assert len(cut.choices[0].logprobs.content) == cut.usage.completion_tokens
    assert whole.choices[0].message.content.startswith(cut.choices[0].message.content)


async def test_what_was_said_is_said_again_only_without_a_penalty(rig: Rig) -> None:
    plain = await rig.text(max_tokens=40, logprobs=0, extra_body={"ignore_eos": True})
    penalised = await rig.text(max_tokens=40, logprobs=0, frequency_penalty=2, presence_penalty=2)
    repeated = [len(a.choices[0].logprobs.tokens) - len(set(a.choices[0].logprobs.tokens)) for a in (plain, penalised)]
    assert repeated[1] < repeated[0]


async def test_a_token_outside_the_vocabulary_is_refused_by_the_model(rig: Rig) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await rig.chat(extra_body={"stop_token_ids": [1, 1 << 20]})
    assert refused.value.param == "stop_token_ids[1]"
