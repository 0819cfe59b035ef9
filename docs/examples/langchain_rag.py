"""Questions over retrieved documents with LangChain: a document that was read once is not read again.

    pip install langchain-openai
    kvblend serve --model smollm2 --port 8000
    python docs/examples/langchain_rag.py --base-url http://127.0.0.1:8000/v1

Each document is a text part of the user's message, and the question is its last part. kvblend takes such parts as
chunks: their KV is stored with the first question and found again by the next, whatever their order is then.
"""

from __future__ import annotations

import argparse
import os
import re

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

NOTES = {
    "Mill": "The mill at the river was built in 1871. Its wheel turned day and night when the water of the river rose.",
    "Bakery": "The baker by the bridge bought all his flour at the mill and opened every morning at five o'clock.",
    "Sluice": "The mayor kept the key of the sluice at the mill. Nobody else was let near it, not even the miller.",
    "Harbour": "Ships reached the harbour in spring only, when the ice had gone, and left it again in October.",
}
QUESTIONS = ("Who kept the key of the sluice at the mill?", "When did the wheel of the mill turn?")


class WordRetriever(BaseRetriever):
    """Finds the documents that share most words with the question; stands for the retriever that you have."""

    documents: list[Document]
    count: int = 3

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        asked = words_of(query)
        by_rank = sorted(self.documents, key=lambda one: -len(asked & words_of(one.page_content)))
        return by_rank[: self.count]


def words_of(text: str) -> set[str]:
    """The different words of a text, in small letters."""
    return set(re.findall(r"\w+", text.lower()))


def build_messages(found: dict[str, object]) -> list[BaseMessage]:
    """The prompt: a text part for each document, and the question as the last one."""
    documents = found["documents"]
    if not isinstance(documents, list):
        raise TypeError("documents must be a list")
    texts = [f"{one.metadata['title']}\n{one.page_content}" for one in documents]
    parts: list[str | dict[str, str]] = [{"type": "text", "text": text} for text in [*texts, str(found["question"])]]
    return [SystemMessage("Answer from the passages, briefly."), HumanMessage(content=parts)]


def build_chain(base_url: str, api_key: str, model: str, max_tokens: int) -> Runnable[str, AIMessage]:
    """Retriever, prompt and model as one chain from a question to its answer."""
    retriever = WordRetriever(documents=[Document(text, metadata={"title": name}) for name, text in NOTES.items()])
    chat = ChatOpenAI(
        base_url=base_url, api_key=SecretStr(api_key), model=model, temperature=0, max_completion_tokens=max_tokens
    )
    found = {"documents": retriever, "question": RunnablePassthrough()}
    return found | RunnableLambda(build_messages) | chat


def main() -> None:
    """Ask both questions; print each answer and how many tokens of its prompt came from stored KV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    # a server without keys wants none; the library does
    key = os.environ.get("KVBLEND_API_KEY", "-")
    chain = build_chain(given.base_url, key, given.model, given.max_tokens)
    for question in QUESTIONS:
        answer = chain.invoke(question)
        print(f"{question}\n  {answer.text.strip()}")
        if (usage := answer.usage_metadata) is not None:
            cached = usage.get("input_token_details", {}).get("cache_read", 0)
            print(f"  {cached} of {usage['input_tokens']} prompt tokens were stored")


if __name__ == "__main__":
    main()
