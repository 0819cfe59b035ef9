"""Which texts of a corpus are alike: by the words they share (BM25), never by a question or by their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvblend.cli.failures import BadInput


def choose_neighbours(texts: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """For each text the `count` most similar other ones, nearest first; fewer where the corpus has no more.

    Texts that occur twice are no neighbours of each other. Equally similar ones are taken in alphabetical order, so
    that the choice depends on nothing but the set of texts. BadInput where the library for it is missing.
    """
    corpus = sorted(set(texts))
    if len(corpus) < 2:
        return [() for _ in texts]
    bm25s = _library()
    words = bm25s.tokenize(corpus, stopwords="english", return_ids=False, show_progress=False)
    index = bm25s.BM25()
    if any(words):
        index.index(words, show_progress=False)
    chosen = {}
    for place, text in enumerate(corpus):
        # a text without a word in it is like no other
        scores = index.get_scores(words[place]).tolist() if words[place] else [0.0] * len(corpus)
        order = sorted(range(len(corpus)), key=lambda other: (-scores[other], other))
        chosen[text] = tuple(corpus[other] for other in order if other != place)[:count]
    return [chosen[text] for text in texts]


def _library() -> Any:
    try:
        import bm25s
    except ImportError:
        raise BadInput("--condition-on needs the library bm25s: pip install 'kvblend[neighbours]'") from None
    return bm25s
