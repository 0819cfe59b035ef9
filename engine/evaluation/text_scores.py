"""How near a generated answer is to the gold ones: SQuAD's normalisation, token F1, exact match, Rouge-L."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rouge_score.rouge_scorer import RougeScorer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class TextScores:
    """Each in 0..1, the best over all gold answers."""

    f1: float
    em: float
    rouge_l: float


def score_text(answer: str, golds: Sequence[str]) -> TextScores:
    """Compare one answer with at least one gold answer."""
    return TextScores(
        f1=max(token_f1(answer, gold) for gold in golds),
        em=max(float(normalise(answer) == normalise(gold)) for gold in golds),
        rouge_l=max(float(_scorer().score(gold, answer)["rougeL"].fmeasure) for gold in golds),
    )


def normalise(text: str) -> str:
    """Lower case without punctuation and articles, words parted by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of the precision and the recall of normalised words; 1 where both are empty."""
    said, wanted = normalise(answer).split(), normalise(gold).split()
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2.0 * common / (len(said) + len(wanted))


@functools.cache
def _scorer() -> RougeScorer:
    return RougeScorer(["rougeL"], use_stemmer=False)
