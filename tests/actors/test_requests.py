"""From a request to a job: what is refused, with its field; layouts, options, keys and limits of jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from model_files import CHATML, tokenizer_json
from tiny_models import tiny_config

from kvblend.actors.core.events import BlendShape, Job
from kvblend.actors.errors import RequestError
from kvblend.actors.messages import BlendOptions, ChatMessage, Document, Generate, Sampling, SelectionOptions
from kvblend.actors.requests import JobBuilder, check_request, check_sampling
from kvblend.actors.settings import Settings
from kvblend.engine.assembly import Engine
from kvblend.engine.chat import ChatTemplate
from kvblend.engine.prompt import chunk_ids, system_ids
from kvblend.engine.runner import Runner
from kvblend.engine.tokenizer import Tokenizer
from kvblend.store.keys import ChunkKey, tenant_of

TOKENIZER = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
TEMPLATE = ChatTemplate(CHATML, bos="<|im_start|>", eos="<|im_end|>")
MILL, BRIDGE = Document("the mill turned"), Document("by the river", title="bridge")
GOOD = Generate("r", (ChatMessage("user", "who?"),), (MILL, BRIDGE), sampling=Sampling(max_tokens=5))
STORING = replace(GOOD, messages=(), generate=False)
SETTINGS: dict[str, Any] = {"system": "be brief.", "documents_max": 3, "max_tokens_max": 64}


def engine(context: int = 512) -> Engine:
    config = tiny_config(context_length=context)
    return Engine(cast(Runner, None), config, TOKENIZER, TEMPLATE, "print", "float32", "none")


def builder(context: int = 512, **settings: Any) -> JobBuilder:
    return JobBuilder(Settings(**{**SETTINGS, **settings}), engine(context))


def answered(request: Generate = GOOD, **settings: Any) -> Job:
    return builder(**settings).answer(request, {})


def stored(request: Generate = STORING, **settings: Any) -> list[Job]:
    return builder(**settings).stores(request, {}, [f"s{index}" for index in range(len(request.documents))])


def ids_of(document: Document) -> tuple[int, ...]:
    return chunk_ids(TOKENIZER, document.title, document.text)


def head_ids(system: str = "be brief.") -> tuple[int, ...]:
    return system_ids(TOKENIZER, TEMPLATE, system)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no id": ({"request_id": ""}, "request_id"),
    "long id": ({"request_id": "x" * 257}, "request_id"),
    "inner id": ({"request_id": "/precompute/1"}, "request_id"),
    "documents": ({"documents": (MILL,) * 4}, "documents"),
    "no question": ({"messages": ()}, "input"),
    "nothing to store": ({"generate": False, "documents": ()}, "documents"),
    "deadline": ({"deadline_ms": 0.0}, "deadline_ms"),
    "endless deadline": ({"deadline_ms": float("inf")}, "deadline_ms"),
    "mode": ({"blend": BlendOptions(mode=cast(Any, "magic"))}, "blend.mode"),
    "ratio": ({"blend": BlendOptions(recompute_ratio=1.01)}, "blend.recompute_ratio"),
    "no ratio": ({"blend": BlendOptions(recompute_ratio=float("nan"))}, "blend.recompute_ratio"),
    "ratio in words": ({"blend": BlendOptions(recompute_ratio=cast(Any, "all"))}, "blend.recompute_ratio"),
    "selection": ({"blend": BlendOptions(selection=SelectionOptions(cast(Any, "plain")))}, "blend.selector"),
    "on_miss": ({"blend": BlendOptions(on_miss=cast(Any, "panic"))}, "blend.on_miss"),
    "sampling": ({"sampling": Sampling(max_tokens=0)}, "max_output_tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_refused_by_its_name(name: str) -> None:
    changes, param = BAD[name]
    with pytest.raises(RequestError) as caught:
        check_request(replace(GOOD, **changes), Settings(**SETTINGS), "tiny")
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


BAD_SAMPLING: dict[str, tuple[dict[str, Any], str]] = {
    "too many tokens": ({"max_tokens": 65}, "max_output_tokens"),
    "cold": ({"temperature": -0.1}, "temperature"),
    "hot": ({"temperature": 101.0}, "temperature"),
    "no temperature": ({"temperature": float("nan")}, "temperature"),
    "no mass": ({"top_p": 0.0}, "top_p"),
    "more than all": ({"top_p": 1.1}, "top_p"),
    "long seed": ({"seed": 1 << 64}, "seed"),
    "empty stop": ({"stop": ("x", "")}, "stop"),
    "negative candidates": ({"top_k": -1}, "top_k"),
    "more than the likeliest": ({"min_p": 1.1}, "min_p"),
    "no repetition": ({"repetition_penalty": 0.0}, "repetition_penalty"),
    "no number": ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    "presence": ({"presence_penalty": 2.1}, "presence_penalty"),
    "frequency": ({"frequency_penalty": -2.1}, "frequency_penalty"),
    "stop ids": ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
    "longer than the longest": ({"min_tokens": 6}, "min_tokens"),
    "logprobs": ({"logprobs": 21}, "top_logprobs"),
}


@pytest.mark.parametrize("name", BAD_SAMPLING)
def test_bad_sampling_is_refused_by_its_name(name: str) -> None:
    changes, param = BAD_SAMPLING[name]
    with pytest.raises(RequestError) as caught:
        check_sampling(Sampling(**{"max_tokens": 5, **changes}), Settings(**SETTINGS))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 64}, {"temperature": 100.0, "top_p": 1.0}, {"seed": -(1 << 63)}, {"min_tokens": 5}]
)
def test_sampling_at_its_limits_is_taken(changes: dict[str, Any]) -> None:
    check_sampling(Sampling(**{"max_tokens": 5, **changes}), Settings(**SETTINGS))


@pytest.mark.parametrize("request_", [GOOD, STORING, replace(GOOD, model="tiny", documents=(), deadline_ms=0.1)])
def test_a_good_request_passes(request_: Generate) -> None:
    check_request(request_, Settings(**SETTINGS), "tiny")


def test_another_model_is_not_found() -> None:
    with pytest.raises(RequestError, match="served: 'tiny'") as caught:
        check_request(replace(GOOD, model="huge"), Settings(), "tiny")
    assert (caught.value.code, caught.value.param) == ("not_found", "model")


def test_the_error_names_value_and_limit() -> None:
    with pytest.raises(RequestError, match=r"blend\.recompute_ratio is 7.0; it must lie in 0\.\.1"):
        check_request(replace(GOOD, blend=BlendOptions(recompute_ratio=7.0)), Settings(), "tiny")


def test_a_prompt_is_system_chunks_and_question() -> None:
    segments = answered().layout.segments
    assert [segment.kind for segment in segments] == ["system", "chunk", "chunk", "question"]
    assert [segment.token_ids for segment in segments[1:3]] == [ids_of(MILL), ids_of(BRIDGE)]


@pytest.mark.parametrize(("given", "used"), [(None, "be brief."), ("be loud.", "be loud."), ("", "")])
def test_the_system_prompt_is_the_requests_or_the_servers(given: str | None, used: str) -> None:
    assert answered(replace(GOOD, system=given)).layout.segments[0].token_ids == head_ids(used)


def test_a_document_by_id_is_laid_out_with_its_stored_tokens() -> None:
    request = replace(GOOD, documents=(MILL, Document(id="ab" * 32)))
    assert builder().answer(request, {1: (5, 6, 7)}).layout.segments[2].token_ids == (5, 6, 7)


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {answered().sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert None not in seeds


def test_a_given_seed_is_kept_even_zero() -> None:
    assert answered(replace(GOOD, sampling=Sampling(max_tokens=5, seed=0))).sampling.seed == 0


@pytest.mark.parametrize(("given", "used"), [(None, 0.4), (0.0, 0.0), (1.0, 1.0)])
def test_the_ratio_is_the_requests_or_the_servers(given: float | None, used: float) -> None:
    job = answered(replace(GOOD, blend=BlendOptions(recompute_ratio=given)), recompute_ratio=0.4)
    assert job.recompute_ratio == used


def test_a_request_for_the_ratio_that_loading_hides_says_so_in_its_job() -> None:
    job = answered(replace(GOOD, blend=BlendOptions(recompute_ratio="auto"), deadline_ms=900.0), recompute_ratio=0.4)
    assert (job.recompute_ratio, job.shape, job.deadline_ms) == (0.4, BlendShape(2, False, True), 900.0)


@pytest.mark.parametrize(("tenant", "client"), [("", "ws-1"), ("t", "t")])
def test_a_job_is_of_the_tenant_or_else_of_the_client(tenant: str, client: str) -> None:
    assert answered(replace(GOOD, tenant=tenant, client="ws-1")).client == client


def test_a_layer_the_model_does_not_have_is_refused() -> None:
    request = replace(GOOD, blend=BlendOptions(selection=SelectionOptions(check_layers=(1, 4))))
    check_request(request, Settings(**SETTINGS), "tiny")
    with pytest.raises(RequestError, match=r"blend\.check_layers is \(1, 4\); the model has layers 0\.\.3") as caught:
        answered(request)
    assert caught.value.param == "blend.check_layers"


@pytest.mark.parametrize(
    ("given", "used"), [({"recompute_ratios": (0.3,)}, 0.3), ({"thresholds": (0.1,)}, 1.0), ({"sinks": 2}, 0.4)]
)
def test_a_selection_that_says_how_many_sets_the_budget(given: dict[str, Any], used: float) -> None:
    request = replace(GOOD, blend=BlendOptions(selection=SelectionOptions(**given)))
    assert answered(request, recompute_ratio=0.4).recompute_ratio == used


def test_on_miss_is_the_requests_or_the_servers() -> None:
    given = replace(GOOD, blend=BlendOptions(on_miss="fresh"))
    jobs = [answered(request, on_miss="precompute") for request in (GOOD, given)]
    assert [job.on_miss for job in jobs] == ["precompute", "fresh"]


def test_full_mode_looks_nothing_up() -> None:
    job = answered(replace(GOOD, blend=BlendOptions(mode="full")))
    assert not any(keys.lookup for keys in job.keys)


@pytest.mark.parametrize("generate", [True, False])
def test_a_blank_document_is_refused_with_its_place(generate: bool) -> None:
    request = replace(GOOD, documents=(MILL, Document(" \n")), generate=generate)
    with pytest.raises(RequestError) as caught:
        answered(request) if generate else stored(request)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "documents[1].text")


def test_a_prompt_beyond_the_context_is_too_large() -> None:
    with pytest.raises(RequestError, match="context holds 32") as caught:
        builder(32).answer(GOOD, {})
    assert (caught.value.code, caught.value.param) == ("too_large", "input")


def test_an_answer_beyond_the_context_asks_for_too_many_tokens() -> None:
    room = answered().layout.num_tokens
    with pytest.raises(RequestError) as caught:
        builder(room + 4).answer(GOOD, {})
    assert (caught.value.code, caught.value.param) == ("invalid_request", "max_output_tokens")


def test_prompt_and_answer_may_fill_the_context() -> None:
    room = answered().layout.num_tokens
    assert builder(room + 5).answer(GOOD, {}).tokens_max == room + 5


def test_a_request_beyond_all_kv_slots_is_too_large() -> None:
    request = replace(GOOD, sampling=Sampling(max_tokens=300))
    with pytest.raises(RequestError, match="kv_tokens_max allows 256") as caught:
        answered(request, kv_tokens_max=256)
    assert caught.value.code == "too_large"


def test_storing_makes_one_precompute_job_per_document() -> None:
    jobs = stored()
    assert [(job.request_id, job.kind) for job in jobs] == [("s0", "precompute"), ("s1", "precompute")]


def test_a_stored_document_is_kept_behind_the_system_prompt() -> None:
    job = stored(salt="x")[1]
    own = ChunkKey.of("print", "x", head_ids(), ids_of(BRIDGE))
    assert (job.keys[-1].lookup, job.keys[-1].keep) == (((own, True),), own)
    assert [segment.token_ids for segment in job.layout.segments] == [head_ids(), ids_of(BRIDGE)]


def test_storing_keeps_the_system_prompt_too() -> None:
    assert stored()[0].keys[0].keep == ChunkKey.of("print", "", (), head_ids())


def test_a_bare_server_stores_documents_behind_nothing() -> None:
    job = stored(conditioning="bare")[0]
    assert job.keys[-1].keep == ChunkKey.of("print", "", (), ids_of(MILL))
    assert len(job.layout.segments) == 1


@pytest.mark.parametrize("conditioning", ["system", "bare"])
def test_what_was_stored_is_what_an_answer_looks_up(conditioning: str) -> None:
    kept = stored(conditioning=conditioning)[1].keys[-1].keep
    assert kept in [key for key, _ in answered(conditioning=conditioning).keys[2].lookup]


def test_a_document_by_id_is_stored_with_its_tokens() -> None:
    request = replace(STORING, documents=(Document(id="ab" * 32),))
    assert builder().stores(request, {0: (5, 6, 7)}, ["s"])[0].layout.segments[-1].token_ids == (5, 6, 7)


def test_a_document_beyond_the_context_is_named() -> None:
    request = replace(STORING, documents=(MILL, Document("river " * 200)))
    with pytest.raises(RequestError) as caught:
        builder(64).stores(request, {}, ["a", "b"])
    assert (caught.value.code, caught.value.param) == ("too_large", "documents[1]")


def test_tenants_name_the_same_chunks_differently() -> None:
    tenants = ("", "a", "b")
    answers = [builder().answer(replace(GOOD, tenant=tenant), {}) for tenant in tenants]
    stores = [builder().stores(replace(STORING, tenant=tenant), {}, ("1", "2"))[0] for tenant in tenants]
    for jobs in (answers, stores):
        found = [set(all_keys(job)) for job in jobs]
        assert all(found)
        assert not found[0] & found[1]
        assert not found[1] & found[2]
        assert {key.tenant for key in found[1]} == {tenant_of("/tenant:a")}


def all_keys(job: Job) -> list[ChunkKey]:
    looked_up = [key for keys in job.keys for key, _ in keys.lookup]
    return looked_up + [key for keys in job.keys for key in (keys.keep, keys.precompute) if key is not None]
