"""What `/v1/chat/completions` and `/v1/completions` call the same things."""

from __future__ import annotations

from typing import Any, Protocol

from kvblend.actors.messages import Usage
from kvblend.api.server.events import own_fields
from kvblend.api.server.logprobs import Logprobs, chat_logprobs, text_logprobs


class Shape(Protocol):
    """One of the two. `kind` is the object's name, `piece_kind` a streamed piece's, `prefix` begins its ids.

    `logprobs` None: none were asked for.
    """

    kind: str
    piece_kind: str
    prefix: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that begins a stream, if there is one."""
        ...

    def piece(self, index: int, text: str, logprobs: Logprobs | None = None) -> dict[str, Any]:
        """A streamed choice with new text."""
        ...

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """A streamed choice that ends."""
        ...

    def whole(self, index: int, text: str, reason: str, logprobs: Logprobs | None = None) -> dict[str, Any]:
        """A choice in one piece."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    piece_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `Shape.opening`."""
        return self._streamed(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, logprobs: Logprobs | None = None) -> dict[str, Any]:
        """See `Shape.piece`."""
        told = None if logprobs is None else chat_logprobs(logprobs)
        return {**self._streamed(index, {"content": text}), "logprobs": told}

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """See `Shape.ending`."""
        return self._streamed(index, {}, reason)

    def whole(self, index: int, text: str, reason: str, logprobs: Logprobs | None = None) -> dict[str, Any]:
        """See `Shape.whole`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        told = None if logprobs is None else chat_logprobs(logprobs)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": reason}

    @staticmethod
    def _streamed(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class TextShape:
    """`/v1/completions`."""

    kind = "text_completion"
    piece_kind = "text_completion"
    prefix = "cmpl-"

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `Shape.opening`."""
        return None

    def piece(self, index: int, text: str, logprobs: Logprobs | None = None) -> dict[str, Any]:
        """See `Shape.piece`."""
        told = None if logprobs is None else text_logprobs(logprobs)
        return {"index": index, "text": text, "logprobs": told, "finish_reason": None}

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        """See `Shape.ending`."""
        return self.whole(index, "", reason)

    def whole(self, index: int, text: str, reason: str, logprobs: Logprobs | None = None) -> dict[str, Any]:
        """See `Shape.whole`."""
        told = None if logprobs is None else text_logprobs(logprobs)
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}


def usage_body(usages: list[Usage]) -> dict[str, Any]:
    """`usage` under OpenAI's names, summed over the prompts of a call."""
    prompt, output = sum(u.prompt_tokens for u in usages), sum(u.output_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(u.tokens_reused for u in usages), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def kvblend_body(usages: list[Usage]) -> Any:
    """All figures under our names: an object, or a list of them where the call had several prompts."""
    figures = [own_fields(usage) for usage in usages]
    return figures[0] if len(figures) == 1 else figures
