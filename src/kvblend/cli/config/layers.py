"""Values from all sources, the strongest first: flags, environment, file, defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvblend.actors.errors import RequestError
from kvblend.actors.settings import Settings
from kvblend.api.server.limits import ApiLimits
from kvblend.cli.config.fields import BadValue, default_of, known_fields, nearest
from kvblend.cli.config.files import read_entries
from kvblend.cli.config.given import Given
from kvblend.cli.config.lmcache import Meaning, NoMeaning, mean
from kvblend.cli.config.server_options import ServerOptions
from kvblend.cli.failures import BadInput
from kvblend.cli.inputs import read_text

PREFIX, LMCACHE_PREFIX = "KVBLEND_", "LMCACHE_"
API_KEY = f"{PREFIX}API_KEY"
"""The key that a command with `--url` shows to the server: no setting of a server."""
CONFIG, LMCACHE_CONFIG = f"{PREFIX}CONFIG", f"{LMCACHE_PREFIX}CONFIG_FILE"
# of LMCache's own process: nothing in them is about what is stored or computed
_LMCACHE_PROCESS = ("USE_EXPERIMENTAL", "TRACK_USAGE", "LOG_LEVEL")


Layer = dict[str, Given]


@dataclass(frozen=True, slots=True)
class Configuration:
    """All settings, checked. `given` says which did not come from a default; `notes` what was set aside, and why."""

    settings: Settings
    server: ServerOptions
    limits: ApiLimits
    given: Mapping[str, Given]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Reading:
    """Layers as they are read, and the notes on the way."""

    notes: list[str] = field(default_factory=list)
    problems: list[BadInput] = field(default_factory=list)

    def add(self, layer: Layer, name: str, given: Given) -> None:
        """Read a value as its field's type and put it into the layer, under the setting's name."""
        try:
            known = known_fields().get(name)
            if known is None:
                raise given.complain(f"is not a known setting{nearest(name, known_fields())}")
            value, text = _split_warm(name, given.value)
            if text is not None:
                layer["warm_text"] = Given(read_text(Path(text)), given.source, given.label, given.place)
            layer[name] = Given(known.read(value), given.source, given.label, given.place)
        except BadValue as error:
            self.problems.append(given.complain(str(error)))
        except BadInput as error:
            self.problems.append(error)

    def add_lmcache(self, layer: Layer, name: str, given: Given) -> None:
        """The same for a name of LMCache."""
        try:
            meaning: Meaning = mean(name, given.value)
        except NoMeaning as error:
            self.problems.append(given.complain(str(error)))
            return
        if meaning.note:
            self.notes.append(str(given.complain(f"is set aside: {meaning.note}")))
        for ours, value in meaning.settings.items():
            self.add(layer, ours, Given(value, given.source, given.label, given.place))


def resolve(
    flags: Mapping[str, Given],
    config: Path | None = None,
    lmcache_config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Configuration:
    """Flags before `KVBLEND_*`, then `LMCACHE_*`, the configuration file, LMCache's file, the defaults.

    The files may be named by `KVBLEND_CONFIG` and `LMCACHE_CONFIG_FILE`. BadInput for all that is unknown or
    unfitting, a line each.
    """
    environ = os.environ if environ is None else environ
    reading = _Reading()
    first: Layer = {}
    for name, given in flags.items():
        reading.add(first, name, given)
    layers = [first, *_environment(reading, environ)]
    config = config or _path(environ, CONFIG)
    lmcache_config = lmcache_config or _path(environ, LMCACHE_CONFIG)
    if config is not None:
        layers.append(file_layer(reading, config))
    if lmcache_config is not None:
        layers.append(file_layer(reading, lmcache_config, lmcache=True))
    _raise(reading.problems)
    return _assemble(_merge(layers), tuple(reading.notes))


def check_file(path: Path, *, lmcache: bool = False) -> Configuration:
    """What a file alone would set over the defaults; BadInput for all that is wrong in it, a line each."""
    reading = _Reading()
    layer = file_layer(reading, path, lmcache=lmcache)
    _raise(reading.problems)
    return _assemble(layer, tuple(reading.notes))


def file_layer(reading: _Reading, path: Path, *, lmcache: bool = False) -> Layer:
    """The layer of one file."""
    layer: Layer = {}
    add: Callable[[Layer, str, Given], None] = reading.add_lmcache if lmcache else reading.add
    for entry in read_entries(path):
        place = f"{path}, line {entry.line}" if entry.line else str(path)
        add(layer, entry.name, Given(entry.value, "file", entry.name, place))
    return layer


def _environment(reading: _Reading, environ: Mapping[str, str]) -> tuple[Layer, Layer]:
    ours: Layer = {}
    theirs: Layer = {}
    names = {f"{PREFIX}{name.upper()}": name for name in known_fields()}
    for variable in sorted(environ):
        given = Given(environ[variable], "environment", variable)
        if variable.startswith(PREFIX) and variable not in (CONFIG, API_KEY):
            if variable in names:
                reading.add(ours, names[variable], given)
            else:
                near = nearest(variable, [*names, CONFIG])
                reading.problems.append(given.complain(f"is not a known setting{near}"))
        elif variable.startswith(LMCACHE_PREFIX) and variable != LMCACHE_CONFIG:
            name = variable.removeprefix(LMCACHE_PREFIX)
            if name not in _LMCACHE_PROCESS:
                reading.add_lmcache(theirs, name.lower(), given)
    return ours, theirs


def _path(environ: Mapping[str, str], variable: str) -> Path | None:
    return Path(environ[variable]).expanduser() if environ.get(variable) else None


def _split_warm(name: str, value: Any) -> tuple[Any, str | None]:
    """`warm:FILE` of `conditioning` apart: the word, and the file that the text is in."""
    if name == "conditioning" and isinstance(value, str) and value.startswith("warm:"):
        return "warm", value.removeprefix("warm:")
    return value, None


def _merge(layers: Iterable[Layer]) -> Layer:
    """The strongest value of each name; a `conditioning` sets aside the `warm_text` of weaker layers."""
    out: Layer = {}
    for layer in layers:
        if "conditioning" in out:
            layer = {name: given for name, given in layer.items() if name != "warm_text"}
        out = {**layer, **out}
    return out


def _raise(problems: list[BadInput]) -> None:
    if problems:
        raise BadInput("\n".join(problem.message for problem in problems))


def _assemble(given: Layer, notes: tuple[str, ...]) -> Configuration:
    values: dict[type, dict[str, Any]] = {}
    for name, known in known_fields().items():
        value = given[name].value if name in given else default_of(known)
        values.setdefault(known.owner, {})[name] = value
    try:
        settings = Settings(**values[Settings])
    except RequestError as error:
        raise _located(error, given) from None
    return Configuration(settings, ServerOptions(**values[ServerOptions]), ApiLimits(**values[ApiLimits]), given, notes)


def _located(error: RequestError, given: Layer) -> BadInput | RequestError:
    """The error under the name that the user gave the value by."""
    culprit = given.get(error.param or "")
    if culprit is None or error.param is None:
        return error
    message = error.message.removeprefix(error.param).lstrip(":").strip()
    return culprit.complain(message)
