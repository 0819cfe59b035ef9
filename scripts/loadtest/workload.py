"""What is asked: a pool of chunks, and requests over it, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from loadtest.datasets import read_custom, read_folder
from loadtest.jobs import BadData, Job, Workload
from loadtest.options import Options
from loadtest.schedule import arrivals

POOL, REQUESTS, TIMES, WARMUPS = range(4)
# short and common: most vocabularies have each as one token
COMMON = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over man me even most
made after also did many before must through back years where much your way well down should because each just those
people how too little state good very make world still own see men work long get here between both life being under
never day same another know while last might us great old year off come since against go came right used take three
house water city river road paper light field winter summer market school office train letter
"""
WORDS = COMMON.split()


def make_workload(options: Options, run: int, rate: float) -> Workload:
    """The requests of the `run`-th rate. BadData for a data set that cannot be used."""
    pool_run = 0 if options.keep_pool else run
    random = generator(options, run, REQUESTS)
    if options.dataset_name == "custom":
        pool, jobs = read_custom(_path(options), options.num_prompts, options.output_len)
    elif options.dataset_name == "random":
        pool = ()
        jobs = [Job(i, words(random, options.input_len), (), options.output_len) for i in range(options.num_prompts)]
    else:
        pool = read_folder(_path(options)) if options.dataset_path else make_pool(options, pool_run)
        if options.chunks_per_request[1] > len(pool):
            raise BadData(f"--chunks-per-request: {options.dataset_path} has {len(pool)} texts only")
        jobs = list(rag_jobs(options, len(pool), options.num_prompts, random))
    times = arrivals(len(jobs), rate, options.burstiness, generator(options, run, TIMES))
    jobs = [_behaving(replace(job, at_s=float(at)), options, random) for job, at in zip(jobs, times, strict=True)]
    return Workload(pool, tuple(jobs), tuple(_warmups(options, run, pool)))


def generator(options: Options, run: int, purpose: int) -> np.random.Generator:
    """Random numbers of their own for each purpose, so that one option does not change what another draws."""
    return np.random.default_rng([options.seed, run, purpose])


def words(random: np.random.Generator, count: int) -> str:
    """`count` words in sentences."""
    chosen = [WORDS[place] for place in random.integers(len(WORDS), size=count)]
    ends = range(11, count, 12)
    for place in ends:
        chosen[place] += "."
    return " ".join(chosen)


def make_pool(options: Options, run: int) -> tuple[str, ...]:
    """Texts that differ from their first words on."""
    random = generator(options, run, POOL)
    return tuple(words(random, options.chunk_tokens) for _ in range(options.chunk_pool))


def draw_chunks(pool: int, count: int, alpha: float, random: np.random.Generator) -> tuple[int, ...]:
    """`count` different chunks; the one at place r is drawn with a weight of (r + 1) ** -alpha."""
    # the smallest of exponential times with these rates: drawing without replacement, in logarithms against underflow
    times = np.log(random.exponential(size=pool)) + alpha * np.log(np.arange(1, pool + 1))
    return tuple(int(place) for place in np.argsort(times)[:count])


def rag_jobs(options: Options, pool: int, count: int, random: np.random.Generator) -> Iterator[Job]:
    """Questions over chunks of the pool, some over the same chunks as an earlier one."""
    past: list[tuple[int, ...]] = []
    least, most = options.chunks_per_request
    for index in range(count):
        if past and random.random() < options.repeat_share:
            chunks = past[int(random.integers(len(past)))]
        else:
            chunks = draw_chunks(pool, int(random.integers(least, most + 1)), options.zipf_alpha, random)
        past.append(chunks)
        in_order = random.permutation(chunks) if options.chunk_order == "shuffled" else sorted(chunks)
        question = words(random, options.question_tokens) + "?"
        yield Job(index, question, tuple(int(place) for place in in_order), options.output_len)


def _behaving(job: Job, options: Options, random: np.random.Generator) -> Job:
    drawn, after = random.random(), int(random.integers(1, max(2, job.output_tokens)))
    bounds = np.cumsum([options.cancel_rate, options.disconnect_rate, options.slow_reader_rate])
    if drawn < bounds[0]:
        return replace(job, behaviour="cancel", stop_after=after)
    if drawn < bounds[1]:
        return replace(job, behaviour="disconnect", stop_after=after)
    return replace(job, behaviour="slow") if drawn < bounds[2] else job


def _warmups(options: Options, run: int, pool: tuple[str, ...]) -> Iterator[Job]:
    random = generator(options, run, WARMUPS)
    index = 0
    if options.warm_pool:
        step = max(1, options.chunks_per_request[1])
        for first in range(0, len(pool), step):
            yield Job(index, words(random, 8) + "?", tuple(range(first, min(first + step, len(pool)))), 1)
            index += 1
    for job in range(options.num_warmups):
        chunks = draw_chunks(len(pool), options.chunks_per_request[1], options.zipf_alpha, random) if pool else ()
        yield Job(index + job, words(random, options.question_tokens) + "?", chunks, options.output_len)


def _path(options: Options) -> Path:
    if options.dataset_path is None:
        raise BadData("--dataset-path: is missing")
    return options.dataset_path
