from __future__ import annotations

from kvblend.actors.streams import TokenStream
from kvblend.api.server.port import EventStream, SystemPort
from tests.api.scripted import ScriptedSystem


def as_stream(stream: TokenStream) -> EventStream:
    """Fits, says the type checker."""
    return stream


def as_port(system: ScriptedSystem) -> SystemPort:
    """Fits, says the type checker."""
    return system


def test_a_token_stream_is_an_event_stream() -> None:
    assert as_stream(TokenStream("r")).drain is not None


async def test_a_scripted_system_is_a_system() -> None:
    assert as_port(ScriptedSystem()).model == "scripted"
