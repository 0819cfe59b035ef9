"""A prompt that is taken as it is, without a chat template: text or token ids, cut into chunks at a separator."""

from __future__ import annotations

from collections.abc import Sequence

from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.engine.prompt import PromptDocument, PromptError, chunk_ids, document_ids
from kvblend.engine.tokenizer import Tokenizer

FIELD = "prompt"


def build_plain_prompt(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    separator: str,
    documents: Sequence[PromptDocument] = (),
) -> PromptLayout:
    """Lay out `head, separator, chunk, separator, ..., question`: SYSTEM, a CHUNK for each piece between, QUESTION.

    The separators are no part of the prompt, nor are blank pieces. A prompt of one piece is all QUESTION; `documents`
    stand behind the head, before the chunks that the prompt has itself. Text pieces between are tokenised as documents
    are; in the head and the question control tokens are recognised, for whoever writes a plain prompt writes the
    template too, and the token that begins a text is added where the model wants one. Token ids are taken as they
    are: nothing is added and none is assumed in front of the separator's. An empty `separator` cuts nowhere. Raises
    PromptError naming the field.
    """
    head, between, question = (
        _cut_text(tokenizer, prompt, separator)
        if isinstance(prompt, str)
        else _cut_ids(tokenizer, tuple(prompt), separator)
    )
    parts: list[tuple[SegmentKind, Sequence[int]]] = [(SegmentKind.SYSTEM, head)] if head else []
    for index, document in enumerate(documents):
        parts.append((SegmentKind.CHUNK, document_ids(tokenizer, document, f"documents[{index}]")))
    parts += [(SegmentKind.CHUNK, ids) for ids in between]
    return PromptLayout.of([*parts, (SegmentKind.QUESTION, question)])


def split_text(text: str, separator: str) -> list[str]:
    """The pieces of `text` between separators, without blank ones; `[text]` where there is no separator."""
    if not separator or separator not in text:
        return [text]
    return [piece for piece in text.split(separator) if piece.strip()]


def split_ids(ids: Sequence[int], separator: Sequence[int]) -> list[tuple[int, ...]]:
    """The runs of `ids` between occurrences of `separator`, found from the left, without empty ones."""
    width, start, at = len(separator), 0, 0
    pieces: list[tuple[int, ...]] = []
    first, wanted = (separator[0], tuple(separator)) if width else (-1, ())
    while width and at <= len(ids) - width:
        if ids[at] == first and tuple(ids[at : at + width]) == wanted:
            pieces.append(tuple(ids[start:at]))
            start = at = at + width
        else:
            at += 1
    pieces.append(tuple(ids[start:]))
    return [piece for piece in pieces if piece]


def _cut_text(
    tokenizer: Tokenizer, prompt: str, separator: str
) -> tuple[list[int], list[tuple[int, ...]], Sequence[int]]:
    pieces = split_text(prompt, separator)
    if not pieces or not pieces[-1]:
        raise PromptError(FIELD, "is empty; it must give at least 1 token")
    ends = [_encode_marked(tokenizer, piece) for piece in (pieces[:1] if len(pieces) > 1 else []) + pieces[-1:]]
    between = [chunk_ids(tokenizer, "", piece, FIELD) for piece in pieces[1:-1]]
    head, question = (ends[0], ends[-1]) if len(ends) > 1 else ([], ends[0])
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        first = head or question
        if first[:1] != [tokenizer.bos_id]:
            first.insert(0, tokenizer.bos_id)
    return head, between, question


def _cut_ids(
    tokenizer: Tokenizer, ids: tuple[int, ...], separator: str
) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]:
    if not ids:
        raise PromptError(FIELD, "is empty; at least 1 token is needed")
    wrong = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= wrong < tokenizer.vocab_size:
        raise PromptError(FIELD, f"holds {wrong}; ids lie in 0..{tokenizer.vocab_size - 1}")
    pieces = split_ids(ids, tokenizer.encode(separator, special=False))
    if not pieces:
        raise PromptError(FIELD, "holds nothing but separators; at least 1 token is needed")
    return (pieces[0] if len(pieces) > 1 else ()), pieces[1:-1], pieces[-1]


def _encode_marked(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text, special=True)
    except ValueError as error:
        raise PromptError(FIELD, f"cannot be tokenised: {error}") from None
