"""What is asked: drawn from a seed, with the shares that were asked for."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadtest.jobs import BadData, Workload
from loadtest.options import read_options
from loadtest.workload import draw_chunks, make_workload


def made(*arguments: str, run: int = 0, rate: float = 5.0) -> Workload:
    return make_workload(read_options(arguments), run, rate)


@given(st.integers(1, 60), st.floats(0, 400), st.integers(0, 2**32), st.data())
def test_drawn_chunks_are_different_ones_of_the_pool(pool: int, alpha: float, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, pool))
    drawn = draw_chunks(pool, count, alpha, np.random.default_rng(seed))
    assert len(set(drawn)) == count
    assert set(drawn) <= set(range(pool))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_popularity_falls_with_the_power_of_the_rank(alpha: float) -> None:
    random = np.random.default_rng(3)
    drawn = collections.Counter(draw_chunks(10, 1, alpha, random)[0] for _ in range(20_000))
    assert drawn[0] / drawn[3] == pytest.approx(4**alpha, rel=0.1)


def test_the_same_seed_gives_the_same_workload() -> None:
    assert made("--seed", "7") == made("--seed", "7")


def test_another_seed_gives_another() -> None:
    assert made("--seed", "7").jobs[0].question != made("--seed", "8").jobs[0].question


def test_each_rate_has_chunks_of_its_own() -> None:
    assert not set(made().pool) & set(made(run=1).pool)


def test_a_kept_pool_is_the_same_for_all_rates() -> None:
    assert made("--keep-pool").pool == made("--keep-pool", run=1).pool


def test_a_kept_pool_is_asked_new_questions() -> None:
    questions = [{job.question for job in made("--keep-pool", run=run).jobs} for run in (0, 1)]
    assert not questions[0] & questions[1]


def test_a_chunk_has_as_many_words_as_asked_for() -> None:
    assert {len(text.split()) for text in made("--chunk-tokens", "37").pool} == {37}


def test_chunks_per_request_cover_their_span() -> None:
    assert {len(job.chunks) for job in made("--chunks-per-request", "2-4").jobs} == {2, 3, 4}


def test_sorted_order_is_the_pools() -> None:
    assert all(list(job.chunks) == sorted(job.chunks) for job in made("--chunk-order", "sorted").jobs)


def test_shuffled_order_is_not() -> None:
    assert any(list(job.chunks) != sorted(job.chunks) for job in made().jobs)


def test_repeats_ask_new_questions_on_earlier_chunks() -> None:
    jobs = made("--repeat-share", "1", "--num-prompts", "50").jobs
    assert len({frozenset(job.chunks) for job in jobs}) == 1
    assert len({job.question for job in jobs}) == 50


def test_behaviours_have_their_shares() -> None:
    line = "--num-prompts 4000 --cancel-rate 0.1 --disconnect-rate 0.2 --slow-reader-rate 0.3"
    found = collections.Counter(job.behaviour for job in made(*line.split()).jobs)
    shares = [found[name] / 4000 for name in ("cancel", "disconnect", "slow", "normal")]
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)


def test_who_stops_early_stops_within_the_answer() -> None:
    jobs = made("--cancel-rate", "1", "--output-len", "5").jobs
    assert {job.stop_after for job in jobs} == {1, 2, 3, 4}


def test_a_warmed_pool_is_sent_once_whole() -> None:
    workload = made("--warm-pool", "--chunk-pool", "14", "--num-warmups", "2")
    sent = [place for job in workload.warmups[:3] for place in job.chunks]
    assert sent == list(range(14))
    assert [job.index for job in workload.warmups] == [0, 1, 2, 3, 4]


def test_random_prompts_have_no_chunks() -> None:
    job = made("--dataset-name", "random", "--input-len", "9").jobs[0]
    assert (job.chunks, len(job.question.split())) == ((), 9)


def test_texts_of_a_folder_are_the_pool(tmp_path: Path) -> None:
    for name, text in (("b.md", "second"), ("a.txt", "first\n"), ("c.txt", " "), ("d.bin", "no")):
        (tmp_path / name).write_text(text)
    assert made("--dataset-path", str(tmp_path), "--chunks-per-request", "1").pool == ("first", "second")


def test_a_folder_with_too_few_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(BadData, match="has 1 texts only"):
        made("--dataset-path", str(tmp_path))


def test_custom_prompts_share_documents_and_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a?", "documents": ["x", "y"]}\n\n{"prompt": "b?", "documents": ["y"], "output_tokens": 3}'
    )
    workload = made("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "3")
    assert workload.pool == ("x", "y")
    assert [(job.question, job.chunks, job.output_tokens) for job in workload.jobs] == [
        ("a?", (0, 1), 128),
        ("b?", (1,), 3),
        ("a?", (0, 1), 128),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "has no line"),
        ("{", ":1: is no JSON"),
        ('{"prompt": ""}', ":1: prompt: is no text"),
        ('{"prompt": "a", "documents": [1]}', ":1: documents"),
        ('{"prompt": "a", "output_tokens": true}', ":1: output_tokens"),
    ],
)
def test_a_bad_line_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(BadData, match=complaint):
        made("--dataset-name", "custom", "--dataset-path", str(path))
