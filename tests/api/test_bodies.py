from __future__ import annotations

from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions, ChatMessage, Document, Generate, Sampling
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.answers import Asked
from kvblend.api.server.openai.bodies import parse_chat, parse_text
from kvblend.api.server.requests import HARMLESS

LIMITS = ApiLimits(prompt_ids_max=8)
USER = {"role": "user", "content": "q"}


def chat(**fields: Any) -> Asked:
    return parse_chat({"messages": [USER], **fields}, "c", "m", LIMITS)


def text(**fields: Any) -> Asked:
    return parse_text({"prompt": "p", **fields}, "c", "m", LIMITS)


def test_every_field_of_a_conversation_is_read() -> None:
    asked = chat(
        model="m",
        messages=[{"role": "system", "content": "s"}, USER],
        documents=[{"title": "t", "text": "x"}, {"id": "c1"}],
        max_completion_tokens=5,
        temperature=1,
        top_p=0.5,
        seed=7,
        stop=["END"],
        deadline_ms=1000,
        blend={"mode": "reuse", "recompute_ratio": 0.2},
        stream=True,
        stream_options={"include_usage": True},
    )
    assert asked.requests == [
        Generate(
            "c",
            (ChatMessage("user", "q"),),
            (Document("x", "t"), Document(id="c1")),
            "s",
            "m",
            Sampling(5, 1.0, 0.5, 7, ("END",)),
            BlendOptions("reuse", 0.2),
            1000.0,
        )
    ]
    assert (asked.stream, asked.include_usage) == (True, True)


def test_both_names_of_the_longest_answer_may_agree() -> None:
    assert chat(max_tokens=4, max_completion_tokens=4).requests[0].sampling.max_tokens == 4


def test_harmless_fields_are_ignored() -> None:
    assert chat(**dict.fromkeys(HARMLESS, "x")).requests == chat().requests


def test_values_that_ask_for_nothing_are_taken() -> None:
    asked = chat(
        n=1, logprobs=False, tools=[], tool_choice="none", presence_penalty=0.0, response_format={"type": "text"}
    )
    assert asked.requests == chat().requests


def test_null_is_as_good_as_absent() -> None:
    assert chat(n=None, stop=None, logprobs=None, stream_options=None, tools=None).requests == chat().requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "q"}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages"),
        ({"messages": [{**USER, "role": "tool"}]}, "messages[0].role"),
        ({"messages": [{**USER, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "developer", "content": "x"}, USER]}, "messages[1].role"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"prompt": "x"}, "prompt"),
        ({"best": 1}, "best"),
    ],
)
def test_a_bad_field_of_a_conversation_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("a", ["a"]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_a_prompt_is_a_text_ids_or_a_list(prompt: Any, taken: list[Any]) -> None:
    assert [request.prompt for request in text(prompt=prompt).requests] == taken


def test_several_prompts_have_ids_of_their_own() -> None:
    assert [request.request_id for request in text(prompt=["a", "b"]).requests] == ["c-0", "c-1"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1 << 40]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": ["a", []]}, "prompt[1]"),
        ({"prompt": [1] * 9}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": [USER]}, "messages"),
        ({"max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_a_bad_field_of_a_prompt_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        text(**fields)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
