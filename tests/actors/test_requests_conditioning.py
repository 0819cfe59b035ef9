"""Jobs that store documents behind the warm text or behind their neighbours, and what is refused of neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from model_files import CHATML, tokenizer_json
from tiny_models import tiny_config

from kvblend.actors.core.conditioning import NEIGHBOURS, Conditioning
from kvblend.actors.core.events import Job
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import ChatMessage, Document, Generate, Sampling
from kvblend.actors.requests import JobBuilder, check_request, server_conditioning
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.conditioning import warm_ids
from kvblend.engine.prompt import chunk_ids, system_ids
from kvblend.engine.runner import Runner
from kvblend.engine.tokenizer import Tokenizer
from kvblend.store.keys import ChunkKey

TOKENIZER = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
TEMPLATE = ChatTemplate(CHATML, bos="<|im_start|>", eos="<|im_end|>")
MILL, BRIDGE, BELL = Document("the mill turned"), Document("by the river", title="bridge"), Document("the bell rang")
NEAR = replace(MILL, behind=(BRIDGE, BELL))
STORING = Generate("r", (), (MILL, BRIDGE), sampling=Sampling(max_tokens=5), generate=False)
HEAD = system_ids(TOKENIZER, TEMPLATE, "be brief.")
CONTEXT = 8192
WARM = warm_ids(TOKENIZER, CONTEXT)


def ids_of(document: Document) -> tuple[int, ...]:
    return chunk_ids(TOKENIZER, document.title, document.text)


def builder(context: int = CONTEXT, conditioning: str = "warm", **settings: Any) -> JobBuilder:
    config = tiny_config(context_length=context)
    engine = Engine(cast(Runner, None), config, TOKENIZER, TEMPLATE, "print", "float32", "none")
    return JobBuilder(Settings(system="be brief.", conditioning=cast(Any, conditioning), **settings), engine)


def stored(*documents: Document, context: int = CONTEXT, conditioning: str = "warm", **settings: Any) -> list[Job]:
    names = [f"s{index}" for index in range(len(documents))]
    return builder(context, conditioning, **settings).stores(replace(STORING, documents=documents), {}, names)


def test_a_warm_server_stores_documents_behind_the_warm_text() -> None:
    job = stored(MILL)[0]
    assert [segment.token_ids for segment in job.layout.segments] == [HEAD, WARM, ids_of(MILL)]
    rule = Conditioning("warm", WARM, echo=True)
    assert job.stored_key == ChunkKey.of("print", "", rule.behind(HEAD, 1), ids_of(MILL))
    assert (job.conditioning, job.note, job.replace, job.echo) == ("warm", "", False, True)


def test_a_chunk_with_an_echo_needs_room_for_its_copy() -> None:
    (with_echo,), (without,) = stored(MILL), stored(MILL, echo=False)
    assert with_echo.tokens_max == without.tokens_max + len(ids_of(MILL))
    assert without.stored_key != with_echo.stored_key


def test_the_warm_text_itself_is_stored_behind_the_system_prompt() -> None:
    assert stored(MILL)[0].keys[1].keep == ChunkKey.of("print", "", HEAD, WARM)


def test_what_a_warm_server_stores_is_what_an_answer_looks_up_first() -> None:
    asked = replace(STORING, messages=(ChatMessage("user", "who?"),), generate=True)
    job = builder().answer(asked, {})
    exact, own = job.keys[2].lookup[:2]
    assert (exact[1], own) == (True, (stored(BRIDGE)[0].stored_key, False))


def test_a_document_too_long_for_the_warm_text_falls_back_and_says_so() -> None:
    room = len(HEAD) + len(WARM) + len(ids_of(MILL))
    for less, label in ((0, "warm"), (1, "system")):
        job = stored(MILL, kv_tokens_max=room - less)[0]
        assert job.conditioning == label
        assert job.note.startswith("documents[0]: too long") == bool(less)
    assert job.stored_key == ChunkKey.of("print", "", HEAD, ids_of(MILL))


def test_the_rule_counts_the_models_context_and_the_kv_slots() -> None:
    engine = Engine(cast(Runner, None), tiny_config(context_length=512), TOKENIZER, TEMPLATE, "p", "float32", "none")
    limits = [server_conditioning(Settings(kv_tokens_max=slots), engine).tokens_max for slots in (300, 4096)]
    assert limits == [300, 512]


def test_a_document_with_neighbours_is_computed_behind_them_and_replaces_what_was_there() -> None:
    job = stored(NEAR, conditioning="neighbours")[0]
    assert [segment.token_ids for segment in job.layout.segments] == [HEAD, ids_of(BRIDGE), ids_of(BELL), ids_of(MILL)]
    assert job.stored_key == ChunkKey.of("print", "", (*HEAD, *NEIGHBOURS), ids_of(MILL))
    assert (job.conditioning, job.replace, job.keys[-1].lookup) == ("neighbours", True, ())


def test_of_neighbours_nothing_is_stored() -> None:
    job = stored(NEAR, conditioning="neighbours")[0]
    assert [keys.keep is not None for keys in job.keys] == [True, False, False, True]


def test_without_a_system_segment_no_neighbour_is_stored_either() -> None:
    job = builder(conditioning="neighbours")._store("s", STORING, (), [ids_of(BELL)], ids_of(MILL), "documents[0]")
    assert [keys.keep is not None for keys in job.keys] == [False, True]


def test_a_server_with_neighbours_finds_them_by_the_documents_text_alone() -> None:
    asked = replace(STORING, documents=(BELL, MILL), messages=(ChatMessage("user", "who?"),), generate=True)
    job = builder(conditioning="neighbours").answer(asked, {})
    assert job.keys[2].lookup[1] == (stored(NEAR, conditioning="neighbours")[0].stored_key, False)


def test_a_document_without_neighbours_is_stored_warm() -> None:
    assert stored(MILL, conditioning="neighbours")[0].conditioning == "warm"


def test_neighbours_that_do_not_fit_are_left_out_from_the_last_and_that_is_said() -> None:
    room = len(HEAD) + len(ids_of(BRIDGE)) + len(ids_of(MILL))
    job = stored(NEAR, conditioning="neighbours", kv_tokens_max=max(256, room), context=room)[0]
    assert [segment.token_ids for segment in job.layout.segments] == [HEAD, ids_of(BRIDGE), ids_of(MILL)]
    assert job.note == f"documents[0]: 1 of 2 neighbours fit into {room} tokens"


def test_where_no_neighbour_fits_the_key_does_not_speak_of_neighbours() -> None:
    job = stored(NEAR, conditioning="neighbours", context=len(HEAD) + len(ids_of(MILL)))[0]
    assert (job.stored_key, job.replace) == (ChunkKey.of("print", "", HEAD, ids_of(MILL)), False)
    assert job.note.startswith("documents[0]: 0 of 2 neighbours fit")


def test_a_document_is_no_neighbour_of_its_own() -> None:
    with pytest.raises(RequestError, match="own neighbour") as caught:
        stored(MILL, replace(BELL, behind=(BRIDGE, BELL)), conditioning="neighbours")
    assert caught.value.param == "documents[1].behind[1]"


def test_a_blank_neighbour_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        stored(replace(BELL, behind=(BRIDGE, Document(" "))), conditioning="neighbours")
    assert caught.value.param == "documents[0].behind[1].text"


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a question": ({"generate": True, "messages": (ChatMessage("user", "?"),)}, "neighbours", "documents[1].behind"),
    "another server": ({}, "warm", "documents[1].behind"),
    "too many": ({"documents": (MILL, replace(BELL, behind=(MILL,) * 9))}, "neighbours", "documents[1].behind"),
    "an id": (
        {"documents": (MILL, replace(BELL, behind=(MILL, Document(id="ab"))))},
        "neighbours",
        "documents[1].behind[1]",
    ),
    "nested": ({"documents": (MILL, replace(BELL, behind=(NEAR,)))}, "neighbours", "documents[1].behind[0]"),
}


@pytest.mark.parametrize("name", BAD)
def test_neighbours_are_refused_where_they_may_not_be(name: str) -> None:
    changes, conditioning, param = BAD[name]
    request = replace(STORING, **{"documents": (BRIDGE, NEAR), **changes})
    with pytest.raises(RequestError) as caught:
        check_request(request, Settings(conditioning=cast(Any, conditioning)), "tiny")
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_eight_neighbours_are_taken() -> None:
    request = replace(STORING, documents=(replace(BELL, behind=(MILL,) * 8),))
    check_request(request, Settings(conditioning="neighbours"), "tiny")


def test_a_text_of_the_corpus_takes_the_place_of_the_shipped_one() -> None:
    job = stored(MILL, warm_text="the bell rang.\n\nby the river.")[0]
    wanted = [*chunk_ids(TOKENIZER, "", "the bell rang."), *chunk_ids(TOKENIZER, "", "by the river.")]
    assert list(job.layout.segments[1].token_ids) == wanted
