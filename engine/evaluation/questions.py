"""One question over retrieved chunks, with its gold answers; and how a data file's content becomes questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

DOCUMENTS_MAX = 6
_SHOWN_CHARS = 60


class BadData(ValueError):
    """Evaluation data that cannot be used; the message names the index, the field and the value."""


@dataclass(frozen=True, slots=True)
class Question:
    """`documents` are `(title, text)` in prompt order; `answers` holds at least one gold answer.

    `spare` are documents of its list that do not stand in the prompt.
    """

    documents: tuple[tuple[str, str], ...]
    question: str
    answers: tuple[str, ...]
    spare: tuple[tuple[str, str], ...] = ()


def parse_questions(data: object) -> list[Question]:
    """Questions from `[{ctxs: [{title, text}], question, answers}]`: the first six contexts of each, in order.

    Nothing is filtered; other fields are ignored. Raises BadData for anything missing, empty or of a wrong type.
    """
    if not isinstance(data, list):
        raise BadData(f"the data is {_shown(data)}; it must be a list of questions")
    if not data:
        raise BadData("the data is an empty list; at least 1 question is needed")
    return [_parse_question(item, f"data[{index}]") for index, item in enumerate(data)]


def pick_passages(asked: Sequence[Question], others: Sequence[Question], count: int) -> list[tuple[str, str]]:
    """`count` documents of the corpus for chunks to be computed behind, none of which stands in a prompt of `asked`.

    Taken from the lists of `others`, questions that are not asked; where these have too few, from what is left of the
    lists of `asked`. In the order of their digests: no question has a say in it.
    """
    prompts = {document for question in asked for document in question.documents}
    found: list[tuple[str, str]] = []
    for group in ([d for q in others for d in (*q.documents, *q.spare)], [d for q in asked for d in q.spare]):
        fitting = dict.fromkeys(document for document in group if document not in prompts and document not in found)
        found += sorted(fitting, key=lambda document: sha256("\0".join(document).encode()).digest())
    return found[:count]


def _parse_question(item: object, where: str) -> Question:
    fields = _fields(item, where, ("ctxs", "question", "answers"))
    contexts = _filled_list(fields["ctxs"], f"{where}.ctxs", "context")
    documents = []
    for index, context in enumerate(contexts):
        place = f"{where}.ctxs[{index}]"
        parts = _fields(context, place, ("title", "text"))
        if not isinstance(parts["title"], str):
            raise BadData(f"{place}.title is {_shown(parts['title'])}; it must be a text, which may be empty")
        documents.append((parts["title"], _text(parts["text"], f"{place}.text")))
    answers = _filled_list(fields["answers"], f"{where}.answers", "answer")
    texts = [_text(answer, f"{where}.answers[{index}]") for index, answer in enumerate(answers)]
    used, spare = documents[:DOCUMENTS_MAX], documents[DOCUMENTS_MAX:]
    return Question(tuple(used), _text(fields["question"], f"{where}.question"), tuple(texts), tuple(spare))


def _fields(item: object, where: str, names: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(item, dict):
        raise BadData(f"{where} is {_shown(item)}; it must be an object with {', '.join(names)}")
    for name in names:
        if name not in item:
            raise BadData(f"{where}.{name} is missing; there is {', '.join(map(str, item)) or 'nothing'}")
    return item


def _filled_list(value: object, where: str, what: str) -> list[object]:
    if not isinstance(value, list):
        raise BadData(f"{where} is {_shown(value)}; it must be a list of {what}s")
    if not value:
        raise BadData(f"{where} is []; at least 1 {what} is needed")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadData(f"{where} is {_shown(value)}; it must be a text that is not blank")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadData(f"{where} is not valid Unicode: a lone surrogate at character {error.start}") from None
    return value


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
