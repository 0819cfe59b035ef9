"""Messages between the shells that no pure core sees, and the union each actor's mailbox takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvblend.actors.core import events as ev
from kvblend.actors.runtime.actor import Reply


@dataclass(frozen=True, slots=True)
class LayerLoaded:
    """Loader to blender: this layer of the request lies in the side table."""

    request_id: str
    layer: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The scheduler was replaced by an empty one: drop everything that it had asked for."""


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """To the scheduler: answer as soon as nothing is queued, running or being stored."""

    reply: Reply[bool]


SchedulerMessage = ev.SchedulerEvent | WhenIdle
LoaderMessage = ev.LoaderCommand | Reset
BlenderMessage = ev.BlenderCommand | LayerLoaded | Reset
