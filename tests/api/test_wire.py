from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvblend.actors.messages import (
    Accepted,
    Delta,
    Document,
    Failed,
    Finished,
    IngestProgress,
    LoadingDecision,
    Planned,
    Sampling,
    StoredChunk,
    StreamEvent,
    TokenLogprob,
    Usage,
)
from kvblend.api.client.wire import create_frame, decode, encode, parse_chunk, parse_event, parse_usage, websocket_url
from kvblend.api.server.events import ResponseEvents, usage_fields
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.requests import Create, FrameIds, parse_frame

LOGPROB = TokenLogprob(
    1, -0.25, "\\xc3", b"\xc3", (TokenLogprob(1, -0.25, "\\xc3", b"\xc3"), TokenLogprob(3, -2.0, "<end>"))
)
USAGE = Usage(prompt_tokens=9, tiers={"disk": 1}, notes=("a",), charged_ratio=0.5)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "ws://h:1/v1/responses"),
        ("https://h/", "wss://h/v1/responses"),
        ("ws://h:1/v1", "ws://h:1/v1/responses"),
        ("ws://h:1/v1/responses", "ws://h:1/v1/responses"),
        ("wss://h/base", "wss://h/base/v1/responses"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert websocket_url(url) == expected


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "", "ws://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        websocket_url(url)


def test_what_is_none_is_left_to_the_server() -> None:
    assert create_frame(query="q") == {"type": "response.create", "input": "q"}


@pytest.mark.parametrize(
    "events",
    [
        [
            Accepted("resp_1", "m"),
            Planned("resp_1", USAGE),
            Delta("resp_1", "hé", (1, 2)),
            Finished("resp_1", "stop", USAGE),
        ],
        [
            Accepted("resp_1", "m"),
            Delta("resp_1", "é", (1, 2), (LOGPROB, TokenLogprob(2, -9.0, "x", b"x", (), 1))),
            Delta("resp_1", "", (3,), (TokenLogprob(3, -0.5, "<end>"),)),
            Finished("resp_1", "stop", USAGE),
        ],
        [Accepted("resp_1", "m"), Finished("resp_1", "length", USAGE)],
        [Accepted("resp_1", "m"), Delta("resp_1", "x", (1,)), Finished("resp_1", "cancelled", USAGE, detail="why")],
        [Accepted("resp_1", "m"), Failed("resp_1", "deadline_exceeded", "late", "deadline_ms")],
    ],
)
def test_events_survive_the_wire(events: list[StreamEvent]) -> None:
    assert there_and_back(events, generate=True) == events


def test_an_ingest_survives_the_wire() -> None:
    chunks = (StoredChunk("c", 5, False),)
    events: list[StreamEvent] = [
        Accepted("resp_1", "m"),
        IngestProgress("resp_1", 1, 1),
        Finished("resp_1", "stop", USAGE, chunks),
    ]
    assert there_and_back(events, generate=False) == events


def there_and_back(events: list[StreamEvent], *, generate: bool) -> list[StreamEvent]:
    translator = ResponseEvents("resp_1", "m", 0.0, FrameIds("e", "s"), extended=True, generate=generate)
    frames: list[dict[str, Any]] = [decode(encode(frame)) for event in events for frame in translator.translate(event)]
    return [event for frame in frames if (event := parse_event(frame)) is not None]


def test_every_figure_of_usage_survives() -> None:
    values: dict[str, Any] = {}
    for index, field in enumerate(dataclasses.fields(Usage)):
        special: dict[str, Any] = {
            "mode": "full",
            "tiers": {"host": 2},
            "tier_tokens": {"host": 40},
            "loading": LoadingDecision(True, 0.2, 3.0, 4.0, 5, "disk"),
            "notes": ("n",),
        }
        values[field.name] = special.get(field.name, index)
    usage = Usage(**values)
    assert parse_usage(decode(encode(usage_fields(usage)))) == usage


def test_figures_of_a_newer_server_are_left_out() -> None:
    assert parse_usage({"prompt_tokens": 3, "tokens_dreamt": 9}) == Usage(prompt_tokens=3)


def test_one_text_in_place_of_a_list_of_documents_is_refused() -> None:
    with pytest.raises(ValueError, match="give a list of documents"):
        create_frame(query="what?", documents="abcdef")


def test_neighbours_are_written_as_documents_are() -> None:
    document = Document("x", behind=(Document("y", "t"),))
    frame = create_frame(documents=[document, {"text": "z", "behind": ["plain", {"text": "w"}]}], generate=False)
    assert frame["documents"] == [
        {"text": "x", "behind": [{"title": "t", "text": "y"}]},
        {"text": "z", "behind": [{"text": "plain"}, {"text": "w"}]},
    ]


def test_one_text_as_neighbours_is_refused() -> None:
    with pytest.raises(ValueError, match="give a list of documents"):
        create_frame(documents=[{"text": "x", "behind": "abc"}], generate=False)


def test_a_chunk_of_an_older_server_has_no_conditioning() -> None:
    fields = {"id": "c", "tokens": 3, "created": True}
    assert parse_chunk(fields) == StoredChunk("c", 3, True)
    assert parse_chunk({**fields, "conditioning": "warm"}) == StoredChunk("c", 3, True, "warm")


def test_sampling_is_written_as_a_server_reads_it() -> None:
    asked = Sampling(
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        stop_token_ids=(9, 8),
        ignore_eos=True,
        min_tokens=2,
        logprobs=3,
    )
    usual = dataclasses.asdict(Sampling())
    said: dict[str, Any] = {k: v for k, v in dataclasses.asdict(asked).items() if v != usual[k]}
    command = parse_frame(decode(encode(create_frame(query="q", **said))), "resp_1", "m", ApiLimits())
    assert isinstance(command, Create)
    assert command.request.sampling == asked


def test_a_bound_stands_in_blend() -> None:
    assert create_frame(query="q", max_kl=0.05)["blend"] == {"max_kl": 0.05}


def test_the_estimate_is_read_from_the_figures() -> None:
    assert parse_usage({"kl_estimate": 0.02}).kl_estimate == 0.02
    assert parse_usage({}).kl_estimate is None
