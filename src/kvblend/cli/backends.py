"""Where a command's requests run: on a server by its URL, or on a system of this process."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvblend.actors.errors import RequestError
from kvblend.actors.messages import (
    Failed,
    Finished,
    Generate,
    IngestProgress,
    Mode,
    StoredChunk,
    StreamEvent,
)
from kvblend.api.client import AsyncClient
from kvblend.api.client.client import split_batches
from kvblend.api.client.wire import DocumentLike, SamplingOptions, create_frame, document_fields
from kvblend.api.server.limits import ApiLimits
from kvblend.api.server.requests import Create, parse_frame
from kvblend.cli.config.layers import API_KEY
from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.naming import QUESTION_FLAGS, document_names, naming
from kvblend.cli.waiting import told_while_judged

if TYPE_CHECKING:
    from kvblend.actors.settings import Settings
    from kvblend.actors.system import System

Progress = Callable[[int, int], None]


class SamplingFields(SamplingOptions, total=False):
    """All of how tokens are chosen but the temperature; None is left to the server."""

    top_p: float | None
    seed: int | None
    stop: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Question:
    """What `ask` asks; `files` are where the documents were read from."""

    query: str
    documents: tuple[DocumentLike, ...] = ()
    system: str | None = None
    mode: str = "blend"
    recompute_ratio: float | str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    blend: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    sampling: SamplingFields = field(default_factory=SamplingFields)

    def names(self) -> dict[str, str]:
        """What the user calls the fields of the request: flags, and the documents' files."""
        return {**QUESTION_FLAGS, **document_names(self.files)}


class Backend(Protocol):
    """Answers questions and stores texts."""

    def answer(self, question: Question) -> AsyncIterator[StreamEvent]:
        """The events of one answer, `Finished` last; what cannot be answered raises."""
        ...

    async def ingest(
        self, documents: Sequence[DocumentLike], system: str | None, on_progress: Progress, names: Sequence[object] = ()
    ) -> list[StoredChunk]:
        """Store the documents; returns when they are durable. A refusal calls them by their `names`."""
        ...


def check_question(question: Question, model: str) -> Generate:
    """The request as a server would read it; RequestError for bad input, before any model is loaded."""
    fields = {name: getattr(question, name) for name in Question.__slots__ if name not in ("files", "sampling")}
    with naming(question.names()):
        return _parse(create_frame(**fields, **question.sampling), model)


class LocalBackend:
    """Runs on a system of this process; new chunks are durable when a request is over."""

    def __init__(self, system: System) -> None:
        self._system = system

    async def answer(self, question: Question) -> AsyncIterator[StreamEvent]:
        """See `Backend.answer`."""
        request = check_question(question, self._system.model)
        with naming(question.names()):
            async with contextlib.aclosing(self._run(request)) as events:
                async for event in events:
                    yield event

    async def ingest(
        self, documents: Sequence[DocumentLike], system: str | None, on_progress: Progress, names: Sequence[object] = ()
    ) -> list[StoredChunk]:
        """See `Backend.ingest`."""
        fields, stored = document_fields(documents), list[StoredChunk]()
        for batch in split_batches(fields):
            with naming(document_names(names[len(stored) : len(stored) + len(batch)])):
                request = _parse(create_frame(system=system, documents=batch, generate=False), self._system.model)
                async with contextlib.aclosing(self._run(request)) as events:
                    async for event in events:
                        if isinstance(event, IngestProgress):
                            on_progress(len(stored) + event.done, len(fields))
                        elif isinstance(event, Finished):
                            stored += event.chunks
        return stored

    async def _run(self, request: Generate) -> AsyncGenerator[StreamEvent, None]:
        with told_while_judged(self._system):
            stream = await self._system.submit(request)
        try:
            async for event in stream:
                if isinstance(event, Failed):
                    raise RequestError(event.code, event.message, event.param)
                if isinstance(event, Finished):
                    await self._system.settle()
                yield event
        finally:
            stream.abandon()


class RemoteBackend:
    """Runs on a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def answer(self, question: Question) -> AsyncIterator[StreamEvent]:
        """See `Backend.answer`."""
        generation = self._client.generate(
            question.query,
            system=question.system,
            documents=question.documents,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            mode=cast(Mode, question.mode),
            recompute_ratio=question.recompute_ratio,
            blend=question.blend,
            **question.sampling,
        )
        with naming(question.names()):
            async with generation:
                async for event in generation:
                    yield event

    async def ingest(
        self, documents: Sequence[DocumentLike], system: str | None, on_progress: Progress, names: Sequence[object] = ()
    ) -> list[StoredChunk]:
        """See `Backend.ingest`."""
        fields, stored = document_fields(documents), list[StoredChunk]()

        def forward(done: int, _: int) -> None:
            on_progress(len(stored) + done, len(fields))

        for batch in split_batches(fields):
            with naming(document_names(names[len(stored) : len(stored) + len(batch)])):
                stored += await self._client.ingest(batch, system, forward)
        return stored


@contextlib.asynccontextmanager
async def open_local(settings: Settings, name: str, path: Path) -> AsyncIterator[Backend]:
    """A system of this process, closed on the way out."""
    from kvblend.actors.system import System

    system = await System.start(settings, path, name)
    try:
        yield LocalBackend(system)
    finally:
        await system.close()


@contextlib.asynccontextmanager
async def open_remote(url: str, model: str | None) -> AsyncIterator[Backend]:
    """A connection to a server, with the key in `KVBLEND_API_KEY` if there is one; BadInput if `url` is no address."""
    try:
        client = AsyncClient(url, model=model, api_key=os.environ.get(API_KEY) or None)
    except ValueError as error:
        raise BadInput(str(error)) from error
    async with client:
        yield RemoteBackend(client)


def _parse(frame: dict[str, object], model: str) -> Generate:
    command = parse_frame(frame, f"resp_{secrets.token_hex(16)}", model, ApiLimits())
    if not isinstance(command, Create):
        raise CommandError("a request of the command line was not read as one")
    return command.request
