"""Chat templates cut at their contents, whatever the template does to them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import pytest
from model_files import CHATML

from kvblend.engine.chat import SYSTEM, ChatRole, ChatTemplate, Hole
from kvblend.engine.config import UnsupportedModel

TURNS: list[tuple[ChatRole, str]] = [("user", "q1"), ("assistant", "a1"), ("user", "q2")]
ONE: list[tuple[ChatRole, str]] = [("user", "q")]
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
)
# as Gemma's: no turn of its own for the system prompt, and another name for the assistant
FIRST_CARRIES_SYSTEM = (
    "{{ bos_token }}{% set told = messages[0]['role'] == 'system' %}"
    "{% for m in (messages[1:] if told else messages) %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
    "{{ messages[0]['content'] + '\n\n' if told and loop.first }}{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LAST_CARRIES_SYSTEM = (
    "{% set s = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages if m['role'] != 'system' %}[I]{{ s + ' ' if loop.last }}{{ m['content'] }}[/I]{% endfor %}"
)


def joined(template: ChatTemplate, system: str | None, turns: Sequence[tuple[ChatRole, str]]) -> str:
    return "".join(p if isinstance(p, str) else p.content for p in template.split(system, turns))


def test_pieces_and_holes_alternate_in_prompt_order() -> None:
    assert ChatTemplate(CHATML).split("sys", ONE) == [
        "<|im_start|>system\n",
        Hole(SYSTEM, "sys"),
        "<|im_end|>\n<|im_start|>user\n",
        Hole(0, "q"),
        "<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_joined_pieces_are_the_rendered_conversation() -> None:
    assert joined(ChatTemplate(CHATML), "sys", TURNS) == (
        "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_system_prompt_leaves_it_to_the_template() -> None:
    source = "{% if messages[0]['role'] != 'system' %}own default|{% endif %}" + CHATML
    assert joined(ChatTemplate(source), None, ONE).startswith("own default|")


def test_a_content_cannot_steer_the_template() -> None:
    source = "{% for m in messages %}{{ 'X' if 'evil' in m['content'] }}{{ m['content'] }}{% endfor %}"
    assert joined(ChatTemplate(source), None, [("user", "evil {{ 1 + 1 }}")]) == "evil {{ 1 + 1 }}"


def test_a_content_that_looks_like_a_placeholder_is_a_content() -> None:
    content = "\ue0001\ue000 \ue0000\ue000"
    assert ChatTemplate(CHATML).split("s", [("user", content)])[3] == Hole(0, content)


@pytest.mark.parametrize("filters", ["trim", "upper", "lower", "title", "e", "string", "trim | replace(' ', '')"])
def test_altering_filters_do_not_lose_a_content(filters: str) -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m['content'] | " + filters + " }}>{% endfor %}")
    assert joined(template, " A b ", [("user", " q ")]) == "< A b >< q >"


def test_a_template_that_refuses_a_system_prompt_gets_it_in_the_first_message() -> None:
    template = ChatTemplate(NO_SYSTEM, bos="<s>", eos="</s>")
    assert joined(template, "sys", TURNS) == "<s>[user] sys\n\nq1</s>[assistant] a1</s>[user] q2</s>"


def test_a_template_that_drops_a_system_prompt_gets_it_in_the_first_message() -> None:
    source = "{% for m in messages if m['role'] != 'system' %}[{{ m['content'] }}]{% endfor %}"
    assert joined(ChatTemplate(source), "sys", ONE) == "[sys\n\nq]"


def test_an_empty_system_prompt_needs_no_joint() -> None:
    assert joined(ChatTemplate(NO_SYSTEM), "", ONE) == "[user] q"


def test_a_system_prompt_may_stand_behind_the_first_message() -> None:
    assert joined(ChatTemplate(LAST_CARRIES_SYSTEM), "sys", TURNS) == "[I]q1[/I][I]a1[/I][I]sys q2[/I]"


def test_a_system_prompt_may_stand_in_the_first_turn() -> None:
    assert ChatTemplate(FIRST_CARRIES_SYSTEM, bos="<bos>").split("sys", TURNS) == [
        "<bos><start_of_turn>user\n",
        Hole(SYSTEM, "sys"),
        "\n\n",
        Hole(0, "q1"),
        "<end_of_turn>\n<start_of_turn>model\n",
        Hole(1, "a1"),
        "<end_of_turn>\n<start_of_turn>user\n",
        Hole(2, "q2"),
        "<end_of_turn>\n<start_of_turn>model\n",
    ]


def test_an_order_of_roles_the_template_refuses_is_the_callers_error() -> None:
    source = "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('end with user') }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match="end with user"):
        ChatTemplate(source).split(None, [("user", "q"), ("assistant", "a")])


@pytest.mark.parametrize("turns", [[], [("assistant", "a")]])
def test_a_conversation_begins_with_a_user(turns: list[tuple[ChatRole, str]]) -> None:
    with pytest.raises(ValueError, match="begin with a user message"):
        ChatTemplate(CHATML).split(None, turns)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% for m in messages %}", "cannot be read"),
        ("{{ messages[7]['content'].x.y }}", "fails"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "message 0 2 times"),
        ("hello", "message 0 0 times"),
        ("{% for m in messages %}{{ m['content'] | reverse }}{% endfor %}", "message"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|fails"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(source: str, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ChatTemplate(source).split(None, ONE)


def test_both_reasons_are_told_where_a_system_prompt_does_not_help() -> None:
    with pytest.raises(UnsupportedModel, match=r"message 0 0 times.*with a system message"):
        ChatTemplate("hello").split("sys", ONE)


def test_without_a_template_texts_stand_in_order() -> None:
    assert joined(ChatTemplate(None), "sys", TURNS) == "sys\n\nq1\na1\nq2\n"


@pytest.mark.parametrize("system", [None, ""])
def test_without_a_template_and_a_system_prompt_the_question_comes_first(system: str | None) -> None:
    assert joined(ChatTemplate(None), system, ONE) == "q\n"


def test_the_date_stands_still_unless_it_is_set() -> None:
    source = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert joined(ChatTemplate(source), "s", ONE).startswith("26 Jul 2024")
    assert joined(ChatTemplate(source, today=datetime.date(2031, 1, 2)), "s", ONE).startswith("02 Jan 2031")


def test_json_is_written_as_models_expect_it() -> None:
    source = "{{ ['<é>'] | tojson }}" + CHATML
    assert joined(ChatTemplate(source), "s", ONE).startswith('["<é>"]')


def test_generation_marks_are_their_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    assert joined(ChatTemplate(source), None, ONE) == "q"


def test_loops_can_be_left_early() -> None:
    source = "{% for m in messages %}{{ m['content'] }}{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}"
    assert joined(ChatTemplate(source), None, ONE) == "q"


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m['content'] }}\n    {% endif %}\n{% endfor %}"
    assert joined(ChatTemplate(source), None, ONE) == "q\n"


def test_the_same_kind_of_conversation_is_rendered_once() -> None:
    template = ChatTemplate(CHATML)
    template.split("one", ONE)
    template._template = None
    assert template.split("two", [("user", "other")])[3] == Hole(0, "other")


def test_pieces_equal_transformers_rendering() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "system", "content": "sys"}, *({"role": r, "content": c} for r, c in TURNS)]
    rendered = render_jinja_template([messages], chat_template=CHATML, add_generation_prompt=True)[0]
    assert joined(ChatTemplate(CHATML), "sys", TURNS) == rendered[0]
