from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions, ChatMessage, Document, Generate, Sampling, SelectionOptions
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.requests import Cancel, Create, FrameIds, parse_frame

LIMITS = ApiLimits()


def parse(**fields: Any) -> Generate:
    command = parse_frame({"type": "response.create", **fields}, "resp_1", "m", LIMITS)
    assert isinstance(command, Create)
    return command.request


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**{"input": "q", **fields})
    return caught.value


def test_a_bare_question_has_all_defaults() -> None:
    assert parse(input="q") == Generate("resp_1", (ChatMessage("user", "q"),))


def test_every_field_is_read() -> None:
    request = parse(
        model="m",
        input=[{"role": "user", "content": "q"}],
        instructions="s",
        documents=[{"title": "t", "text": "x"}, {"id": "c1"}],
        max_output_tokens=5,
        temperature=1,
        top_p=0.5,
        seed=7,
        stop="END",
        deadline_ms=1000,
        blend={"mode": "reuse", "recompute_ratio": 0.2, "divergence": "v", "selector": "query", "residual": "mean"},
    )
    assert request == Generate(
        "resp_1",
        (ChatMessage("user", "q"),),
        (Document("x", "t"), Document(id="c1")),
        "s",
        "m",
        Sampling(5, 1.0, 0.5, 7, ("END",)),
        BlendOptions("reuse", 0.2, SelectionOptions("query", divergence="v", residual="mean")),
        1000.0,
    )


def test_a_bound_is_read() -> None:
    assert parse(input="q", blend={"max_kl": 0.05}).blend == BlendOptions(max_kl=0.05)


def test_ids_of_lane_and_event_are_kept() -> None:
    frame = {"type": "response.create", "input": "q", "stream_id": "s", "event_id": "e"}
    command = parse_frame(frame, "resp_1", "m", LIMITS)
    assert isinstance(command, Create)
    assert (command.stream_id, command.event_id) == ("s", "e")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_leading_system_message_equals_instructions(role: str) -> None:
    turns = [{"role": role, "content": "s"}, {"role": "user", "content": "q"}]
    assert parse(messages=turns) == parse(input="q", instructions="s")


def test_a_document_may_have_neighbours() -> None:
    near = [{"text": "y"}, {"title": "t", "text": "z"}]
    request = parse(generate=False, documents=[{"text": "x", "behind": near}, {"id": "c", "behind": near[:1]}])
    first, second = request.documents
    assert first.behind == (Document("y"), Document("z", "t"))
    assert (second.id, second.behind) == ("c", (Document("y"),))


def test_chunks_is_another_name_of_documents() -> None:
    assert parse(input="q", chunks=[{"text": "x"}]) == parse(input="q", documents=[{"text": "x"}])


def test_an_ingest_needs_no_input() -> None:
    request = parse(generate=False, documents=[{"text": "x"}])
    assert (request.generate, request.messages) == (False, ())


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n"}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"messages": [USER]}, "messages"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "q"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "q"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": ["q"]}]}, "input[0].content[0]"),
        ({"input": [USER, {"role": "assistant", "content": "a"}]}, "input"),
        ({"input": [USER, {"role": "system", "content": "s"}, USER]}, "input[1].role"),
        ({"input": [{"role": "system", "content": "s"}, USER], "instructions": "t"}, "input[0].role"),
        ({"input": [{**USER, "names": "x"}]}, "input[0].names"),
        ({"input": [USER] * 257}, "input"),
        ({"instructions": 3}, "instructions"),
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"documents": [{}]}, "documents[0].text"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"documents": [{"text": "x"}, {"id": "a", "text": "b"}]}, "documents[1].id"),
        ({"documents": [{"text": "x", "url": "y"}]}, "documents[0].url"),
        ({"documents": [{"text": "x", "behind": "y"}]}, "documents[0].behind"),
        ({"documents": [{"text": "x", "behind": ["y"]}]}, "documents[0].behind[0]"),
        ({"documents": [{"text": "x", "behind": [{"text": "y"}, {"title": "y"}]}]}, "documents[0].behind[1].text"),
        ({"documents": [{"text": "x", "behind": [{"id": "y"}]}]}, "documents[0].behind[0].id"),
        ({"documents": [{"text": "x", "behind": [{"text": "y"}] * 9}]}, "documents[0].behind"),
        ({"documents": [{"text": "x"}], "chunks": [{"text": "x"}]}, "chunks"),
        ({"generate": False}, "documents"),
        ({"generate": "no"}, "generate"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {}}, "stop"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1e308}, "deadline_ms"),
        ({"blend": []}, "blend"),
        ({"blend": {"mode": "fast"}}, "blend.mode"),
        ({"blend": {"recompute_ratio": 1.01}}, "blend.recompute_ratio"),
        ({"blend": {"max_kl": -0.1}}, "blend.max_kl"),
        ({"blend": {"max_kl": 1001}}, "blend.max_kl"),
        ({"blend": {"max_kl": "small"}}, "blend.max_kl"),
        ({"blend": {"max_kl": True}}, "blend.max_kl"),
        ({"blend": {"recompute_ratio": "most"}}, "blend.recompute_ratio"),
        ({"blend": {"recompute_ratio": float("nan")}}, "blend.recompute_ratio"),
        ({"blend": {"divergence": "q"}}, "blend.divergence"),
        ({"blend": {"selector": "luck"}}, "blend.selector"),
        ({"blend": {"residual": 1}}, "blend.residual"),
        ({"blend": {"check_layers": 1}}, "blend.check_layers"),
        ({"blend": {"check_layers": []}}, "blend.check_layers"),
        ({"blend": {"check_layers": [2, 1]}}, "blend.check_layers"),
        ({"blend": {"check_layers": [[1]]}}, "blend.check_layers"),
        ({"blend": {"recompute_ratios": [0.2, 1.1]}}, "blend.recompute_ratios"),
        ({"blend": {"thresholds": [float("nan")]}}, "blend.thresholds"),
        ({"blend": {"score_layers": "some"}}, "blend.score_layers"),
        ({"blend": {"sinks": -1}}, "blend.sinks"),
        ({"blend": {"span": True}}, "blend.span"),
        ({"blend": {"chunk_budget": {}}}, "blend.chunk_budget"),
        ({"blend": {"probes": 10**400}}, "blend.probes"),
        ({"blend": {"residual_fraction": "all"}}, "blend.residual_fraction"),
        ({"blend": {"seed": 1 << 64}}, "blend.seed"),
        ({"blend": {"on_miss": "x"}}, "blend.on_miss"),
        ({"blend": {"ratio": 1}}, "blend.ratio"),
        ({"event_id": "x" * 129}, "event_id"),
        ({"stream_id": 4}, "stream_id"),
        ({"stream": True}, "stream"),
    ],
)
def test_a_bad_field_is_named_with_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == ("invalid_request", param)
    assert error.message.startswith(f"{param}: ")


def test_another_model_is_not_found() -> None:
    error = refusal(model="gpt")
    assert (error.code, error.param) == ("not_found", "model")
    assert "'gpt'" in error.message


def test_cancels_name_one_of_two() -> None:
    frame = {"type": "response.cancel", "response_id": "r"}
    assert parse_frame(frame, "x", "m", LIMITS) == Cancel("r", None, None)
    for ids in ({}, {"response_id": "r", "stream_id": "s"}):
        with pytest.raises(RequestError, match="either response_id or stream_id"):
            parse_frame({"type": "response.cancel", **ids}, "x", "m", LIMITS)


@pytest.mark.parametrize("frame", [None, [], "x", {}, {"type": 3}, {"type": "response.dance"}])
def test_other_frames_are_refused(frame: object) -> None:
    with pytest.raises(RequestError):
        parse_frame(frame, "x", "m", LIMITS)


KEYS = st.sampled_from(
    [
        "type",
        "input",
        "messages",
        "documents",
        "chunks",
        "blend",
        "stop",
        "seed",
        "temperature",
        "generate",
        "role",
        "x",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAVES |= st.sampled_from(["user", "response.create", "response.cancel"])
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)


@given(st.dictionaries(KEYS, TREES, max_size=8), st.sampled_from(["response.create", "response.cancel"]))
def test_any_frame_is_parsed_or_refused(frame: dict[str, Any], kind: str) -> None:
    with contextlib.suppress(RequestError):
        parse_frame({**frame, "type": kind}, "resp_1", "m", LIMITS)


def test_ids_for_errors_are_read_leniently() -> None:
    assert FrameIds.of({"event_id": "e", "stream_id": 3}, LIMITS) == FrameIds("e", None)
    assert FrameIds.of({"event_id": "x" * 1000}, LIMITS) == FrameIds()
    assert FrameIds.of([1], LIMITS) == FrameIds()


def test_every_field_of_a_selection_is_read() -> None:
    fields = {
        "selector": "union",
        "check_layers": [1, 4],
        "divergence": "kv",
        "recompute_ratios": [0.5, 0.25],
        "thresholds": [0.1, 1],
        "score_layers": [0, 3],
        "sinks": 4,
        "span": 8,
        "chunk_budget": "need",
        "probes": 0.5,
        "residual": "ridge",
        "residual_fraction": 1,
        "seed": 7,
    }
    assert set(fields) == set(SelectionOptions.names())
    wanted = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    assert parse(input="q", blend=fields).blend.selection == SelectionOptions(**wanted)  # type: ignore[arg-type]
