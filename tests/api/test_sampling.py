"""Sampling fields of all three forms: read alike, refused by name, value and limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Sampling
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.bodies import parse_chat, parse_text
from kvblend.api.server.requests import parse_body

LIMITS = ApiLimits()
INCLUDE = "message.output_text.logprobs"


def chat(**fields: Any) -> Sampling:
    body = {"messages": [{"role": "user", "content": "q"}], **fields}
    return parse_chat(body, "c", "m", LIMITS).requests[0].sampling


def text(**fields: Any) -> Sampling:
    return parse_text({"prompt": "p", **fields}, "c", "m", LIMITS).requests[0].sampling


def response(**fields: Any) -> Sampling:
    return parse_body({"input": "q", **fields}, "c", "m", LIMITS)[0].request.sampling


FORMS = pytest.mark.parametrize("form", [chat, text, response])
Form = Callable[..., Sampling]


@FORMS
def test_every_field_is_read(form: Form) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "ignore_eos": True,
        "min_tokens": 2,
    }
    expected = Sampling(stop=("END",), stop_token_ids=(9, 8), **fields)  # type: ignore[arg-type]
    assert form(**fields, stop=["END"], stop_token_ids=[9, 8]) == expected


@FORMS
@pytest.mark.parametrize("value", [-1, 0, None])
def test_all_candidates_have_three_names(form: Form, value: int | None) -> None:
    assert form(top_k=value) == Sampling()


@FORMS
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"top_k": -2}, "top_k", "is -2; it must lie in -1.."),
        ({"top_k": 1.5}, "top_k", "must be a whole number"),
        ({"min_p": 1.1}, "min_p", "in 0..1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "in 0.01..100"),
        ({"presence_penalty": 2.1}, "presence_penalty", "in -2..2"),
        ({"frequency_penalty": "much"}, "frequency_penalty", "must be a number"),
        ({"stop_token_ids": 3}, "stop_token_ids", "must be a list"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1]", "must be a token id"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "is -1; it must lie in 0.."),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "the limit is 64"),
        ({"ignore_eos": 1}, "ignore_eos", "must be true or false"),
        ({"min_tokens": -1}, "min_tokens", "is -1; it must lie in 0.."),
        ({"min_tokens": 129}, "min_tokens", "is 129; the longest answer has 128"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_limit(
    form: Form, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        form(**fields)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("form", "fields", "wanted"),
    [
        (chat, {}, None),
        (chat, {"logprobs": False, "top_logprobs": 0}, None),
        (chat, {"logprobs": True}, 0),
        (chat, {"logprobs": True, "top_logprobs": 20}, 20),
        (text, {}, None),
        (text, {"logprobs": 0}, 0),
        (text, {"logprobs": 5}, 5),
        (response, {"top_logprobs": 0}, None),
        (response, {"include": []}, None),
        (response, {"top_logprobs": 3}, 3),
        (response, {"include": [INCLUDE]}, 0),
        (response, {"include": [INCLUDE], "top_logprobs": 2}, 2),
    ],
)
def test_log_probabilities_are_asked_for_as_each_form_does(
    form: Form, fields: dict[str, Any], wanted: int | None
) -> None:
    assert form(**fields).logprobs == wanted


@pytest.mark.parametrize(
    ("form", "fields", "param"),
    [
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (response, {"top_logprobs": 21}, "top_logprobs"),
        (response, {"include": ["reasoning.encrypted_content"]}, "include[0]"),
        (response, {"include": INCLUDE}, "include"),
        (response, {"logprobs": True}, "logprobs"),
    ],
)
def test_what_contradicts_itself_or_is_too_much_is_named(form: Form, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        form(**fields)
    assert caught.value.param == param
