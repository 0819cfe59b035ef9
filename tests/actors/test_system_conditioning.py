"""The whole system with chunks computed behind the warm text or their neighbours: stored once, found, kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from small_system import TEXTS, answer, request, running

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import Document, Finished
from kvblend.actors.system import System
from kvblend.store.format import ChunkHeader, parse_header

# its quarter must hold some of the warm text
CONTEXT = 8192
SHUFFLED = (TEXTS[2], TEXTS[0], TEXTS[3], TEXTS[1])


@pytest.fixture(scope="module")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    return save_llama(folder, num_hidden_layers=4, max_position_embeddings=CONTEXT)


async def ingest(system: System, texts: Any, name: str = "i", **changes: Any) -> Finished:
    _, end = await answer(system, name, texts, "", generate=False, **changes)
    await system.settle()
    return end


def header_of(store: Path, chunk_id: str) -> ChunkHeader:
    raw = (store / "chunks" / chunk_id[:2] / f"{chunk_id}.kvc").read_bytes()
    return parse_header(raw, len(raw))


def kv_bytes(store: Path, chunk_id: str) -> int:
    """The bytes of one K and V of each layer of a stored chunk."""
    header = header_of(store, chunk_id)
    return header.shape.layer_bytes(header.num_tokens)


def extra_bytes(store: Path, chunk_id: str) -> int:
    """How many bytes stand behind K and V in each layer of a stored chunk."""
    (length,) = {span.length for span in header_of(store, chunk_id).layers}
    return length - kv_bytes(store, chunk_id)


def near(text: str, *others: str) -> Document:
    return Document(text, behind=tuple(map(Document, others)))


NEAR = [near(text, *(other for other in TEXTS if other != text)) for text in TEXTS]


async def test_ingested_warm_chunks_are_all_found_but_the_first(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="warm") as system:
        end = await ingest(system, TEXTS)
        assert [chunk.conditioning for chunk in end.chunks] == ["warm"] * 4
        _, first = await answer(system, "a", SHUFFLED)
        await system.settle()
        _, second = await answer(system, "b", SHUFFLED)
    # the first chunk wants its exact variant, which is kept when it has been computed once
    assert (first.usage.chunk_hits, first.usage.chunk_misses) == (3, 1)
    assert (second.usage.chunk_hits, second.usage.chunk_misses) == (4, 0)


async def test_the_warm_text_is_computed_and_stored_once(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="warm") as system:
        await ingest(system, TEXTS)
        stats = system.store_stats()
        # system prompt, warm text, four chunks; nothing is written twice
        assert (stats.chunks, stats.writes) == (6, 6)


async def test_warm_chunks_are_stored_with_their_sensitivity_and_chosen_by_it(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    async with running(tiny_model_path, store=tmp_path, conditioning="warm", echo=False) as system:
        stored = await ingest(system, TEXTS)
    assert [extra_bytes(tmp_path, chunk.id) for chunk in stored.chunks] == [4 * chunk.tokens for chunk in stored.chunks]
    async with running(tiny_model_path, store=tmp_path, conditioning="warm", selector="sensitive") as system:
        _, end = await answer(system, "a", SHUFFLED, recompute_ratio=0.5)
    assert end.reason in ("stop", "length")
    assert (end.usage.chunk_hits, end.usage.chunk_misses) == (3, 1)


async def test_an_echo_is_a_second_k_and_v_in_the_chunks_file(tiny_model_path: Path, tmp_path: Path) -> None:
    sizes = []
    for echo in (False, True):
        async with running(tiny_model_path, store=tmp_path, conditioning="warm", echo=echo) as system:
            stored = await ingest(system, TEXTS)
            sizes.append([extra_bytes(tmp_path, chunk.id) for chunk in stored.chunks])
    assert [more - less for less, more in zip(*sizes, strict=True)] == [
        kv_bytes(tmp_path, chunk.id) for chunk in stored.chunks
    ]


async def test_an_echo_serves_texts_that_overlap(tiny_model_path: Path, tmp_path: Path) -> None:
    overlapping = (*TEXTS, TEXTS[1] + " And once more.")
    async with running(tiny_model_path, store=tmp_path, conditioning="warm", on_miss="precompute") as system:
        await ingest(system, overlapping)
        _, end = await answer(system, "a", overlapping, recompute_ratio=0.0)
    assert end.reason in ("stop", "length")
    assert end.usage.chunk_hits >= 4


async def test_chunks_behind_the_system_prompt_are_stored_as_k_and_v_alone(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    async with running(tiny_model_path, store=tmp_path, conditioning="system") as system:
        stored = await ingest(system, TEXTS)
    assert [extra_bytes(tmp_path, chunk.id) for chunk in stored.chunks] == [0] * 4


async def test_missed_chunks_are_computed_warm_after_the_answer(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="warm") as system:
        await answer(system, "a", TEXTS)
        await system.settle()
        end = await ingest(system, TEXTS)
    assert [chunk.created for chunk in end.chunks] == [False] * 4


async def test_on_miss_precompute_computes_warm_before_the_answer(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, conditioning="warm") as system:
        _, end = await answer(system, "a", TEXTS, on_miss="precompute")
        stored = await ingest(system, TEXTS)
    assert end.usage.chunk_hits >= 3
    assert [chunk.created for chunk in stored.chunks] == [False] * 4


@pytest.mark.parametrize("conditioning", ["warm", "neighbours"])
async def test_ratio_one_gives_the_text_of_full_prefill(
    tiny_model_path: Path, tmp_path: Path, conditioning: str
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning=conditioning) as system:
        full, _ = await answer(system, "f", SHUFFLED, mode="full", max_tokens=16)
        await ingest(system, NEAR if conditioning == "neighbours" else TEXTS)
        blended, end = await answer(system, "b", SHUFFLED, recompute_ratio=1.0, max_tokens=16)
    assert blended == full
    assert end.usage.chunk_hits == 3


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ({"conditioning": "warm"}, {"conditioning": "system"}),
        ({"conditioning": "warm"}, {"conditioning": "bare"}),
        ({"conditioning": "neighbours"}, {"conditioning": "warm"}),
        ({"conditioning": "warm"}, {"conditioning": "warm", "salt": "x"}),
        ({"conditioning": "warm"}, {"conditioning": "warm", "system": "be long."}),
        ({"conditioning": "neighbours"}, {"conditioning": "neighbours", "salt": "x"}),
        ({"conditioning": "neighbours"}, {"conditioning": "neighbours", "system": "be long."}),
    ],
)
async def test_what_was_computed_behind_another_text_is_a_miss(
    tiny_model_path: Path, tmp_path: Path, stored: dict[str, str], asked: dict[str, str]
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", **stored) as system:
        await ingest(system, NEAR if stored["conditioning"] == "neighbours" else TEXTS)
    async with running(tiny_model_path, store=tmp_path / "s", **asked) as system:
        _, end = await answer(system, "a", SHUFFLED)
    assert (end.usage.chunk_hits, end.usage.chunk_misses) == (0, 4)


async def test_a_warm_server_takes_what_was_stored_behind_the_system_prompt(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s") as system:
        await ingest(system, TEXTS)
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="warm") as system:
        _, end = await answer(system, "a", SHUFFLED)
    assert end.usage.chunk_hits == 4


async def test_chunks_with_neighbours_are_found_without_knowing_them(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="neighbours") as system:
        end = await ingest(system, NEAR)
        assert [chunk.conditioning for chunk in end.chunks] == ["neighbours"] * 4
        # of what they were computed behind nothing but the system prompt is kept
        assert system.store_stats().chunks == 5
        _, asked = await answer(system, "a", SHUFFLED)
    usage = asked.usage
    assert (usage.chunk_hits, usage.chunk_misses) == (3, 1)
    assert usage.tokens_reused + usage.tokens_recomputed + usage.tokens_fresh == usage.prompt_tokens


async def test_storing_with_other_neighbours_replaces(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="neighbours") as system:
        first = await ingest(system, [near(TEXTS[0], TEXTS[1])])
        path = next((tmp_path / "s").rglob(f"{first.chunks[0].id}.kvc"))
        before = path.read_bytes()
        again = await ingest(system, [near(TEXTS[0], TEXTS[1])], "j")
        assert path.read_bytes() == before
        other = await ingest(system, [near(TEXTS[0], TEXTS[2])], "k")
        assert path.read_bytes() != before
        assert system.store_stats().chunks == 2
    assert [end.chunks[0].id for end in (again, other)] == [first.chunks[0].id] * 2
    assert [end.chunks[0].created for end in (again, other)] == [True, True]


async def test_one_document_twice_in_an_ingest_with_neighbours_is_stored(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="neighbours") as system:
        end = await ingest(system, [NEAR[0], NEAR[0], NEAR[0]])
    assert len({chunk.id for chunk in end.chunks}) == 1


async def test_a_document_too_long_for_the_warm_text_is_stored_and_the_usage_says_so(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    async with running(tiny_model_path, store=tmp_path / "s", conditioning="warm", kv_tokens_max=2304) as system:
        end = await ingest(system, ["the river and the mill. " * 200, "a bell."])
    assert [chunk.conditioning for chunk in end.chunks] == ["system", "warm"]
    (note,) = end.usage.notes
    assert note.startswith("documents[0]: too long to be computed behind the warm text")


async def test_neighbours_for_a_server_of_another_kind_are_refused(tiny_model_path: Path) -> None:
    async with running(tiny_model_path, conditioning="warm") as system:
        with pytest.raises(RequestError, match="conditioning must be 'neighbours'"):
            await system.submit(request("i", [NEAR[0]], "", generate=False))
