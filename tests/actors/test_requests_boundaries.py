"""Documents, parts of a message and the separator are three ways to say the same prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from model_files import CHATML, tokenizer_json
from tiny_models import tiny_config

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import ChatMessage, Document, Generate, Sampling
from kvblend.actors.requests import JobBuilder, check_request
from kvblend.actors.settings import Settings
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.openai.bodies import parse_chat, parse_text
from kvblend.engine.assembly import Engine
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.layout import PromptLayout
from kvblend.engine.runner import Runner
from kvblend.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
TEMPLATE = ChatTemplate(CHATML, bos="<|im_start|>", eos="<|im_end|>")
TEXTS, QUESTION = ("the mill turned", "by the river"), "who held the key?"


def layout_of(request: Generate, **settings: Any) -> PromptLayout:
    chosen = Settings(system="be brief.", **settings)
    engine = Engine(cast(Runner, None), tiny_config(), TOKENIZER, TEMPLATE, "print", "float32", "none")
    check_request(request, chosen, "m")
    return JobBuilder(chosen, engine).answer(replace(request, sampling=Sampling(max_tokens=4)), {}).layout


def chat(content: Any, **fields: Any) -> Generate:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return parse_chat(body, "c", "m", ApiLimits()).requests[0]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


BY_DOCUMENTS = chat(QUESTION, documents=[{"text": text} for text in TEXTS])
BY_PARTS = chat([part(text) for text in (*TEXTS, QUESTION)])
BY_SEPARATOR = chat(" # # ".join((*TEXTS, QUESTION)))
MIXED = chat([part(TEXTS[1]), part(QUESTION)], documents=[{"text": TEXTS[0]}])


@pytest.mark.parametrize("request_", [BY_PARTS, BY_SEPARATOR, MIXED], ids=["parts", "separator", "mixed"])
def test_all_ways_give_the_same_segments_and_ids(request_: Generate) -> None:
    assert layout_of(request_) == layout_of(BY_DOCUMENTS)
    assert sum(1 for _ in layout_of(request_).chunks()) == 2


def test_a_plain_prompt_finds_the_chunks_of_a_conversation() -> None:
    prompt = " # # ".join(("be brief.", *TEXTS, QUESTION))
    plain = layout_of(parse_text({"prompt": prompt}, "c", "m", ApiLimits()).requests[0])
    assert [s.token_ids for _, s in plain.chunks()] == [s.token_ids for _, s in layout_of(BY_DOCUMENTS).chunks()]


def test_another_separator_counts_where_it_is_set() -> None:
    request = chat("|".join((*TEXTS, QUESTION)))
    assert layout_of(request, separator="|") == layout_of(BY_DOCUMENTS)
    assert sum(1 for _ in layout_of(request).chunks()) == 0


def test_without_a_separator_nothing_is_cut() -> None:
    assert sum(1 for _ in layout_of(BY_SEPARATOR, separator="").chunks()) == 0


def test_later_messages_are_not_cut() -> None:
    turns = (ChatMessage("user", "q"), ChatMessage("assistant", "a"), ChatMessage("user", "b # # c"))
    assert sum(1 for _ in layout_of(Generate("c", turns)).chunks()) == 0


def test_a_message_of_separators_asks_nothing() -> None:
    with pytest.raises(RequestError) as caught:
        layout_of(chat(" # #  # # "))
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("request_", [BY_SEPARATOR, Generate("c", prompt=" # # ".join(("s", *TEXTS, "q")))])
def test_chunks_behind_separators_count_as_documents(request_: Generate) -> None:
    with pytest.raises(RequestError, match="at most 1"):
        layout_of(request_, documents_max=1)


def test_documents_stand_in_a_plain_prompt_too() -> None:
    request = Generate("c", documents=(Document(TEXTS[0]),), prompt=QUESTION)
    assert sum(1 for _ in layout_of(request).chunks()) == 1


def test_ids_outside_the_vocabulary_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        layout_of(Generate("c", prompt=(1, 10**6)))
    assert caught.value.param == "prompt"
