from __future__ import annotations

import pytest

from kvblend.actors.errors import RequestError
from kvblend.api.client.errors import RequestRefused
from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.naming import QUESTION_FLAGS, document_names, naming, renamed

NAMES = {**QUESTION_FLAGS, **document_names(["a.md", "b.md"])}


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ("max_output_tokens: is 0; at least 1", "max_output_tokens", "--max-tokens is 0; at least 1"),
        ("recompute_ratio is 2", "recompute_ratio", "--recompute-ratio is 2"),
        ("blend.recompute_ratio: is 2", "blend.recompute_ratio", "--recompute-ratio is 2"),
        ("blend.span: is 0", "blend.span", "--blend span is 0"),
        ("documents[1].text: is empty", "documents[1].text", "b.md is empty"),
        ("documents[1]: the prompt has 9 tokens", "documents[1]", "b.md: the prompt has 9 tokens"),
        ("the request needs 9 KV slots", "documents[0]", "a.md: the request needs 9 KV slots"),
        ("documents[12]: is long", "documents[12]", None),
        ("what: is odd", "what", None),
    ],
)
def test_a_field_is_called_what_the_user_called_it(message: str, param: str, said: str | None) -> None:
    assert renamed(message, param, NAMES) == said


def test_bad_input_stays_bad_input() -> None:
    with pytest.raises(BadInput, match="--temperature is 9"), naming(NAMES):
        raise RequestError("invalid_request", "temperature: is 9", "temperature")


def test_other_failures_keep_their_exit_code() -> None:
    with pytest.raises(CommandError, match=r"a\.md: later") as caught, naming(NAMES):
        raise RequestError("overloaded", "later", "documents[0]")
    assert caught.value.exit_code == 1


def test_a_request_too_large_is_about_its_only_document() -> None:
    with pytest.raises(BadInput, match=r"big\.md: the request has 9 bytes"), naming(document_names(["big.md"])):
        raise RequestRefused(413, "too_large", "the request has 9 bytes; the limit is 8")


def test_a_prompt_that_is_too_long_is_not_put_on_the_question() -> None:
    with pytest.raises(BadInput, match=r"^the prompt has 9 tokens"), naming(NAMES):
        raise RequestError("too_large", "input: the prompt has 9 tokens", "input")


def test_what_names_no_field_passes_as_it_is() -> None:
    with pytest.raises(ValueError, match="odd"), naming(NAMES):
        raise ValueError("odd")
