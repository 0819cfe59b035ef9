"""A request's texts as a prompt: template, system prompt, documents and question, each tokenised alone.

Documents stand at the start of the first user message. Their ids are joined, not their texts: so a document has the
same ids in every prompt and at every place, which is what makes its KV findable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvblend.engine.chat import ChatRole, ChatTemplate, Hole
from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.engine.tokenizer import Tokenizer

DOCUMENT_END = "\n\n"


class PromptError(ValueError):
    """A text that cannot become a prompt; `param` is the path of the field, as `documents[2].text`."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class PromptDocument:
    """A document as text with an optional title, or as the token ids it was stored under."""

    title: str = ""
    text: str = ""
    token_ids: tuple[int, ...] | None = None


def build_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    system: str | None,
    turns: Sequence[tuple[ChatRole, str]],
    documents: Sequence[PromptDocument] = (),
) -> PromptLayout:
    """Lay out one prompt: SYSTEM (all before the first document), a CHUNK for each document, QUESTION (all after).

    `system` None leaves the system prompt to the template. A template without any text before the documents gives no
    SYSTEM segment. Raises PromptError naming the field: no or blank messages, blank documents, texts that are not valid
    Unicode, ids outside the vocabulary, an order of roles the template refuses.
    """
    if not turns:
        raise PromptError("messages", "is empty; at least 1 message is needed")
    for index, (_, content) in enumerate(turns):
        if not content.strip():
            raise PromptError(f"messages[{index}].content", "is blank; it must give at least 1 token")
    before, after = _encode_turns(tokenizer, template, system, turns)
    parts: list[tuple[SegmentKind, Sequence[int]]] = [(SegmentKind.SYSTEM, before)] if before else []
    for index, document in enumerate(documents):
        parts.append((SegmentKind.CHUNK, document_ids(tokenizer, document, f"documents[{index}]")))
    return PromptLayout.of([*parts, (SegmentKind.QUESTION, after)])


def system_ids(tokenizer: Tokenizer, template: ChatTemplate, system: str | None) -> tuple[int, ...]:
    """The ids that stand before the first document behind this system prompt: what chunks are computed after.

    Empty where nothing stands there. PromptError where `system` is not valid Unicode.
    """
    return tuple(_encode_turns(tokenizer, template, system, (("user", "?"),))[0])


def chunk_ids(tokenizer: Tokenizer, title: str, text: str, field: str = "document") -> tuple[int, ...]:
    """A document's ids, the same in every prompt: `title` and a line break if there is one, `text`, an empty line.

    Control tokens in it are plain text. PromptError, naming `field`, where `text` is blank or not valid Unicode.
    """
    if not text.strip():
        raise PromptError(f"{field}.text", "is blank; it must give at least 1 token")
    _encode(tokenizer, title, f"{field}.title")
    whole = (f"{title}\n" if title else "") + text + DOCUMENT_END
    return tuple(_encode(tokenizer, whole, f"{field}.text"))


def cut_chunk_ids(tokenizer: Tokenizer, title: str, text: str, tokens_max: int) -> tuple[int, ...]:
    """A document's ids, at most `tokens_max` of them; a longer one loses its end but keeps the empty line behind it."""
    ids = chunk_ids(tokenizer, title, text)
    if len(ids) <= tokens_max:
        return ids
    end = tokenizer.encode(DOCUMENT_END, special=False)
    whole = tokenizer.encode((f"{title}\n" if title else "") + text, special=False)
    return (*whole[: tokens_max - len(end)], *end)


def document_ids(tokenizer: Tokenizer, document: PromptDocument, field: str) -> tuple[int, ...]:
    """The ids of a document given as text or as ids. PromptError, naming `field`, where it has none or wrong ones."""
    ids = document.token_ids
    if ids is None:
        return chunk_ids(tokenizer, document.title, document.text, field)
    if not ids:
        raise PromptError(f"{field}.token_ids", "is empty; at least 1 token is needed")
    if min(ids) < 0 or max(ids) >= tokenizer.vocab_size:
        raise PromptError(
            f"{field}.token_ids",
            f"holds {min(ids) if min(ids) < 0 else max(ids)}; ids lie in 0..{tokenizer.vocab_size - 1}",
        )
    return ids


def _encode_turns(
    tokenizer: Tokenizer, template: ChatTemplate, system: str | None, turns: Sequence[tuple[ChatRole, str]]
) -> tuple[list[int], list[int]]:
    """The ids before and after the start of the first user message's content."""
    try:
        pieces = template.split(system, turns)
    except ValueError as error:
        raise PromptError("messages", f"cannot be laid out: {error}") from None
    at = next(i for i, piece in enumerate(pieces) if isinstance(piece, Hole) and piece.index == 0)
    before, after = _encode_pieces(tokenizer, pieces[:at]), _encode_pieces(tokenizer, pieces[at:])
    # many templates write the token themselves
    if tokenizer.add_bos and tokenizer.bos_id is not None and before[:1] != [tokenizer.bos_id]:
        before.insert(0, tokenizer.bos_id)
    return before, after


def _encode_pieces(tokenizer: Tokenizer, pieces: Iterable[str | Hole]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece, special=True)
        else:
            field = f"messages[{piece.index}].content" if piece.index >= 0 else "system"
            ids += _encode(tokenizer, piece.content, field)
    return ids


def _encode(tokenizer: Tokenizer, text: str, field: str) -> list[int]:
    try:
        return tokenizer.encode(text, special=False)
    except ValueError as error:
        raise PromptError(field, f"cannot be tokenised: {error}") from None
