"""The loader's pure core: which layers of which request are read next, and in what order they are handed on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReadLayer:
    """Read one layer of all leased segments of a request."""

    request_id: str
    layer: int


@dataclass(frozen=True, slots=True)
class DeliverLayer:
    """Hand a layer to the blender; layers of one request are delivered in order."""

    request_id: str
    layer: int


@dataclass(frozen=True, slots=True)
class CloseLoad:
    """Nothing is read for this request any more: its leases may close."""

    request_id: str


LoadCommand = ReadLayer | DeliverLayer | CloseLoad


@dataclass(slots=True)
class _Load:
    next_read: int = 0
    next_delivery: int = 0
    reading: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    closing: bool = False


class LoadingState:
    """Keeps at most `window` reads of a request in flight; a request that is closed waits for its reads to return."""

    def __init__(self, num_layers: int, window: int) -> None:
        if num_layers < 1 or window < 1:
            raise ValueError(f"num_layers {num_layers} and window {window} must be at least 1")
        self.num_layers = num_layers
        self.window = window
        self._loads: dict[str, _Load] = {}

    @property
    def active(self) -> int:
        """Requests that load or close."""
        return len(self._loads)

    def start(self, request_id: str) -> list[LoadCommand]:
        """Begin loading. Raises ValueError where the request loads already."""
        if request_id in self._loads:
            raise ValueError(f"request {request_id} is loading already")
        self._loads[request_id] = _Load()
        return self._read_more(request_id, self._loads[request_id])

    def layer_read(self, request_id: str, layer: int) -> list[LoadCommand]:
        """A read came back: deliver what is next in order, read on. A closing request closes with its last read."""
        load = self._loads.get(request_id)
        if load is None or layer not in load.reading:
            return []
        load.reading.discard(layer)
        if load.closing:
            return self._close_if_quiet(request_id, load)
        load.read.add(layer)
        commands: list[LoadCommand] = []
        while load.next_delivery in load.read:
            load.read.discard(load.next_delivery)
            commands.append(DeliverLayer(request_id, load.next_delivery))
            load.next_delivery += 1
        return commands + self._read_more(request_id, load)

    def close(self, request_id: str) -> list[LoadCommand]:
        """End a request's loading, done or not. Idempotent."""
        load = self._loads.get(request_id)
        if load is None:
            return [CloseLoad(request_id)]
        load.closing = True
        return self._close_if_quiet(request_id, load)

    def _close_if_quiet(self, request_id: str, load: _Load) -> list[LoadCommand]:
        if load.reading:
            return []
        del self._loads[request_id]
        return [CloseLoad(request_id)]

    def _read_more(self, request_id: str, load: _Load) -> list[LoadCommand]:
        commands: list[LoadCommand] = []
        while len(load.reading) < self.window and load.next_read < self.num_layers:
            load.reading.add(load.next_read)
            commands.append(ReadLayer(request_id, load.next_read))
            load.next_read += 1
        return commands
