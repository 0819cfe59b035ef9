"""A seeded generator of questions that no single chunk answers: an alias here, its value there; values to combine.

What stands in a probe is made up, so that no model has it by heart. Texts hold digits in catalogue numbers and facts
only: filler cannot answer by accident. The words come from `engine.evaluation.vocabulary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from kvblend.engine.evaluation.questions import Question
from kvblend.engine.evaluation.vocabulary import (
    ALIAS_COLOURS,
    ALIAS_THINGS,
    DOMAINS,
    FILLER,
    FILLER_SLOTS,
    PLACE_KINDS,
    PLACES,
    REPORTS,
    Domain,
)

T = TypeVar("T")
CHUNKS = 6
# half are two hops over an alias, a quarter each compares two values or adds them up
_KINDS = ("alias", "larger", "alias", "sum")


class Dice:
    """Reproducible draws from a path of seeds: the same on every machine and with every version of any library."""

    def __init__(self, *path: int | str) -> None:
        self._path = repr(path).encode()
        self._drawn = 0

    def below(self, count: int) -> int:
        """A whole number in `0..count-1`; `count` is at least 1."""
        self._drawn += 1
        digest = blake3(self._path + self._drawn.to_bytes(8, "little")).digest(8)
        return int.from_bytes(digest, "little") % count

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items in a random order; there must be as many."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Thing:
    """One made-up thing: its catalogue number, its name and the value of its domain's quantity."""

    code: str
    alias: str
    value: int


def make_probes(seed: int, count: int, words: int = 100) -> list[Question]:
    """`count` different questions over six chunks of `words` to about `words + 45` words each, in shuffled orders.

    The same seed gives the same questions; a larger count only appends. Raises ValueError for a count below 0 or for
    fewer than 10 words.
    """
    if count < 0:
        raise ValueError(f"count is {count}; it must be at least 0")
    if words < 10:
        raise ValueError(f"words is {words}; it must be at least 10")
    probes: list[Question] = []
    asked: set[str] = set()
    attempt = 0
    while len(probes) < count:
        kind = _KINDS[len(probes) % len(_KINDS)]
        probe = _make_probe(Dice(seed, attempt), kind, words)
        attempt += 1
        if probe.question not in asked:
            asked.add(probe.question)
            probes.append(probe)
    return probes


def _make_probe(dice: Dice, kind: str, words: int) -> Question:
    domain = dice.pick(DOMAINS)
    things = _things(dice, domain)
    if kind == "alias":
        facts, question, answers = _ask_alias(dice, domain, things)
    elif kind == "larger":
        facts, question, answers = _ask_larger(dice, domain, things)
    else:
        facts, question, answers = _ask_sum(dice, domain, things)
    places = dice.some(PLACES, CHUNKS)
    documents = []
    for place, fact in zip(places, dice.some(facts, CHUNKS), strict=True):
        title = f"{place} {dice.pick(PLACE_KINDS)}, {dice.pick(REPORTS)}"
        documents.append((title, _text(dice, fact, words)))
    return Question(tuple(documents), question, answers)


def _things(dice: Dice, domain: Domain) -> list[Thing]:
    """Six things without a number, a word of a name or a value in common."""
    codes = dice.some(range(100, 1000), CHUNKS)
    letters = dice.some("ACDFHJKLMNPRTVWX", CHUNKS)
    names = zip(dice.some(ALIAS_COLOURS, CHUNKS), dice.some(ALIAS_THINGS, CHUNKS), strict=True)
    # a catalogue number's digits must not read as a value
    values = dice.some([v for v in range(domain.low, domain.high) if v not in codes], CHUNKS)
    return [
        Thing(f"{domain.prefix}-{letter}{code}", f"{colour} {thing}", value)
        for code, letter, (colour, thing), value in zip(codes, letters, names, values, strict=True)
    ]


def _ask_alias(dice: Dice, domain: Domain, things: list[Thing]) -> tuple[list[str], str, tuple[str, ...]]:
    """Two hops: the target's name in one chunk, its value in another; the same of others as distractors."""
    target, other, third, fourth = things[:4]
    facts = [
        _called(dice, domain, target), _valued(dice, domain, target),
        _called(dice, domain, other), _valued(dice, domain, other),
        _called(dice, domain, third), _valued(dice, domain, fourth),
    ]  # fmt: skip
    question = dice.pick(
        (
            f"What is {domain.ask} of the {domain.noun} with the number {target.code}?",
            f"What is {domain.ask} of {target.code}?",
            f"According to the passages, what is {domain.ask} of the {domain.noun} {target.code}?",
        )
    )
    return facts, question, (f"{target.value} {domain.unit}", str(target.value))


def _ask_larger(dice: Dice, domain: Domain, things: list[Thing]) -> tuple[list[str], str, tuple[str, ...]]:
    """Two values in two chunks to be compared, between four others."""
    first, second = things[:2]
    larger = first if first.value > second.value else second
    quantity = domain.ask.removeprefix("the ")
    question = dice.pick(
        (
            f"Which has the larger {quantity}, the {first.alias} or the {second.alias}?",
            f"Of the {first.alias} and the {second.alias}, which one has the larger {quantity}?",
        )
    )
    facts = [_valued(dice, domain, thing) for thing in things]
    return facts, question, (f"the {larger.alias}", larger.alias)


def _ask_sum(dice: Dice, domain: Domain, things: list[Thing]) -> tuple[list[str], str, tuple[str, ...]]:
    """Two values in two chunks to be added up, between four others."""
    first, second = things[:2]
    total = first.value + second.value
    question = f"Added up, what is {domain.ask} of the {first.alias} and the {second.alias} together?"
    facts = [_valued(dice, domain, thing) for thing in things]
    return facts, question, (f"{total} {domain.unit}", str(total))


def _called(dice: Dice, domain: Domain, thing: Thing) -> str:
    return dice.pick(domain.aliases).format(noun=domain.noun, code=thing.code, alias=thing.alias)


def _valued(dice: Dice, domain: Domain, thing: Thing) -> str:
    return dice.pick(domain.values).format(name=thing.alias, value=thing.value)


def _text(dice: Dice, fact: str, words: int) -> str:
    """Filler of at least `words` words with the fact as one of its sentences, anywhere in it."""
    sentences: list[str] = []
    templates = dice.some(FILLER, len(FILLER))
    wanted = max(0, words + dice.below(26) - len(fact.split()))
    while templates and sum(len(sentence.split()) for sentence in sentences) < wanted:
        sentence = templates.pop().format(**{name: dice.pick(choices) for name, choices in FILLER_SLOTS.items()})
        sentences.append(sentence[0].upper() + sentence[1:])
    sentences.insert(dice.below(len(sentences) + 1), fact)
    return " ".join(sentences)
