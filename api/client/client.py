"""`AsyncClient`: ingest texts, ask questions over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from kvblend.actors.messages import Document, IngestProgress, Mode, StoredChunk
from kvblend.api.client.errors import GenerationFailed, refused
from kvblend.api.client.generation import Generation
from kvblend.api.client.http import bearer_headers, get_json
from kvblend.api.client.pool import Pool
from kvblend.api.client.wire import (
    DocumentLike,
    Frame,
    SamplingOptions,
    create_frame,
    document_fields,
    websocket_url,
)

BATCH_DOCUMENTS_MAX = 64
BATCH_CHARS_MAX = 1 << 19
Progress = Callable[[int, int], None]


class AsyncClient:
    """Speaks to one server: `async with AsyncClient("ws://127.0.0.1:8000") as client: ...`.

    Requests run at the same time over shared connections, opened when needed. `timeout_s` bounds connecting and the
    wait for each next event. `api_key` goes to the server in the `Authorization` header. Bound to the event loop it is
    first used on; not for several threads.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout_s: float = 300.0,
        connections_max: int = 64,
        api_key: str | None = None,
    ) -> None:
        self._url = websocket_url(url)
        self._model = model
        self._timeout_s = timeout_s
        self._headers = bearer_headers(api_key)
        self._pool = Pool(self._url, timeout_s, connections_max, self._headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. Requests still running are cancelled by the server."""
        await self._pool.close()

    def generate(
        self,
        query: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        system: str | None = None,
        previous_response_id: str | None = None,
        documents: Iterable[DocumentLike] = (),
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] | str | None = None,
        mode: Mode = "blend",
        recompute_ratio: float | str | None = None,
        max_kl: float | None = None,
        selector: str | None = None,
        divergence: str | None = None,
        residual: str | None = None,
        on_miss: Literal["fresh", "precompute"] | None = None,
        blend: Mapping[str, Any] | None = None,
        deadline_ms: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """A question over documents: `query`, or `messages` ending with the user's. Nothing is sent before it is read.

        A document is a text, `{"title", "text"}` or `{"id"}` of one ingested before. With `previous_response_id`, the
        `response_id` of an earlier generation, it goes on from there: system prompt, documents, question and answer of
        that one come first. `blend` holds any other fields of
        the request's `blend`, e.g. `{"check_layers": [1, 8], "recompute_ratios": [0.2, 0.1]}`. With `logprobs=n` each
        `Delta` has the log probabilities of its tokens and of the n likeliest ones.
        """
        frame = create_frame(
            query=query,
            messages=messages,
            system=system,
            previous_response_id=previous_response_id,
            documents=documents,
            model=self._model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            deadline_ms=deadline_ms,
            mode=mode,
            recompute_ratio=recompute_ratio,
            max_kl=max_kl,
            selector=selector,
            divergence=divergence,
            residual=residual,
            on_miss=on_miss,
            blend=blend,
            **sampling,
        )
        return Generation(self._pool, frame, self._timeout_s)

    async def ingest(
        self, texts: Iterable[DocumentLike], system: str | None = None, on_progress: Progress | None = None
    ) -> list[StoredChunk]:
        """Store the texts' KV; returns when all are durable, one entry per text in order.

        With `behind`, a list of texts, in a document's mapping it is computed behind these neighbours, where the server
        is set to `conditioning: neighbours`; it is then computed anew although it was stored before.

        Sent in batches; `on_progress(done, total)` counts over all of them. Raises as a generation does: then earlier
        batches are stored, and storing a text again costs nothing.
        """
        documents = document_fields(texts)
        total, stored = len(documents), list[StoredChunk]()
        for batch in split_batches(documents):
            frame = create_frame(system=system, documents=batch, generate=False, model=self._model)
            async with Generation(self._pool, frame, self._timeout_s) as run:
                async for event in run:
                    if isinstance(event, IngestProgress) and on_progress is not None:
                        on_progress(len(stored) + event.done, total)
            if run.result.reason != "stop":
                raise GenerationFailed("internal", f"ingesting ended early: {run.result.detail}", None, "")
            stored += run.result.chunks
        return stored

    async def health(self) -> bool:
        """Whether the server is alive; ConnectionLost if it cannot be reached."""
        status, _ = await get_json(self._url, "/health", self._timeout_s)
        return status == 200

    async def ready(self) -> dict[str, Any]:
        """The server's readiness: `ready`, `reasons`, `model`, `details`.

        ConnectionLost if it cannot be reached, RequestRefused (401) for a key that it does not know.
        """
        status, body = await get_json(self._url, "/ready", self._timeout_s, self._headers)
        if status == 401:
            raise refused(401, "unauthorized", str(dict(body.get("error") or {}).get("message", "refused")))
        return body


def count_chars(document: Frame) -> int:
    """Characters in a document's texts and in those of its neighbours."""
    own = sum(len(value) for value in document.values() if isinstance(value, str))
    near = document.get("behind")
    return own + sum(map(count_chars, near if isinstance(near, list) else ()))


def split_batches(documents: Sequence[Frame]) -> Iterator[list[Document | Frame]]:
    """Batches small enough for one frame and for progress worth showing; a text too large alone stays alone."""
    batch: list[Document | Frame] = []
    chars = 0
    for document in documents:
        size = count_chars(document)
        if batch and (len(batch) >= BATCH_DOCUMENTS_MAX or chars + size > BATCH_CHARS_MAX):
            yield batch
            batch, chars = [], 0
        batch.append(document)
        chars += size
    if batch:
        yield batch
