"""The one fixed prompt of the evaluation: instruction, documents cut to a length, question."""

from __future__ import annotations

from dataclasses import dataclass

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.evaluation.questions import BadData, Question
from kvblend.engine.layout import PromptLayout
from kvblend.engine.prompt import PromptDocument, PromptError, build_prompt, cut_chunk_ids, system_ids
from kvblend.engine.tokenizer import Tokenizer

SYSTEM = "Answer the question based on the given passages. Answer the question within 5 words."
DOCUMENT_TOKENS_MAX = 512
GOLD_TOKENS_MAX = 32


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question as tokens: its prompt, and its first gold answer's ids as they would follow the prompt."""

    question: Question
    layout: PromptLayout
    gold: tuple[int, ...]


def instruction_ids(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """What stands before the first document of every prompt; empty where a template puts nothing there."""
    return system_ids(tokenizer, template, SYSTEM)


def prepare_question(
    tokenizer: Tokenizer, template: ChatTemplate, question: Question, index: int, tokens_max: int
) -> PreparedQuestion:
    """Lay out question number `index`. BadData where it has no tokens or does not fit `tokens_max` with an answer."""
    try:
        documents = [
            PromptDocument(token_ids=cut_chunk_ids(tokenizer, title, text, DOCUMENT_TOKENS_MAX))
            for title, text in question.documents
        ]
        turns = [("user", f"Question: {question.question}")]
        layout = build_prompt(tokenizer, template, SYSTEM, turns, documents)  # type: ignore[arg-type]
    except PromptError as error:
        raise BadData(f"data[{index}]: {error}") from None
    gold = tuple(tokenizer.encode(question.answers[0], special=False)[:GOLD_TOKENS_MAX])
    if not gold:
        raise BadData(f"data[{index}].answers[0] is {question.answers[0]!r}; it gives no tokens")
    if layout.num_tokens + GOLD_TOKENS_MAX > tokens_max:
        raise BadData(
            f"data[{index}] has a prompt of {layout.num_tokens} tokens; with {GOLD_TOKENS_MAX} for the answer it does "
            f"not fit the model's context of {tokens_max}"
        )
    return PreparedQuestion(question, layout, gold)
