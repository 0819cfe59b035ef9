"""The flags of settings: one list of names gives a command its flags. Imports nothing heavy before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvblend.cli.config.given import Given
from kvblend.cli.failures import BadInput
from kvblend.cli.options import SETTING_OPTIONS

if TYPE_CHECKING:
    from kvblend.cli.config.layers import Configuration

_CONFIG_OPTIONS: dict[str, Any] = {
    "config": Annotated[
        Path | None, typer.Option(help="Settings in a TOML or YAML file (or KVBLEND_CONFIG).", dir_okay=False)
    ],
    "lmcache_config": Annotated[
        Path | None, typer.Option(help="A YAML file of LMCache's (or LMCACHE_CONFIG_FILE).", dir_okay=False)
    ],
}


def label_of(name: str, value: object = None) -> str:
    """What a setting is called on the command line; a switch that is off has a name of its own."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Flags:
    """What was given on the command line. A command that wants settings takes this as its parameter `given`."""

    values: Mapping[str, Given] = field(default_factory=dict)
    config: Path | None = None
    lmcache_config: Path | None = None

    def with_blend(self, blend: list[str] | None) -> Flags:
        """These and what `--blend` items say; BadInput where both give one."""
        from kvblend.cli.inputs import read_blend

        options = read_blend(blend or ())
        for name in options:
            if name in self.values:
                raise BadInput(f"--blend {name} and {label_of(name)}: give one of the two")
        more = {name: Given(value, "flag", f"--blend {name}") for name, value in options.items()}
        return Flags({**self.values, **more}, self.config, self.lmcache_config)

    def value(self, name: str) -> Any:
        """The value of a flag, None where it was not given."""
        return self.values[name].value if name in self.values else None

    def check_remote(self, url: str | None) -> None:
        """BadInput where flags of a system of this process are given together with a server's URL."""
        local = [given.label for name, given in self.values.items() if name != "model"]
        local += [label_of(name) for name in _CONFIG_OPTIONS if getattr(self, name) is not None]
        if url is not None and local:
            raise BadInput(f"{local[0]} is of no use with --url: the server has its own; give one of the two")

    def resolve(self) -> Configuration:
        """All settings, from all sources; what was set aside is said on stderr. BadInput names what is wrong."""
        from kvblend.cli.config.layers import resolve

        found = resolve(self.values, self.config, self.lmcache_config)
        for note in found.notes:
            typer.echo(f"note: {note}", err=True)
        return found


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the flags of these settings, `--config` and `--lmcache-config`, where its `given` stands.

    The name `blend` stands for `--blend NAME=VALUE`, which goes into `given` as well.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            config = {name: values.pop(name) for name in _CONFIG_OPTIONS}
            found = {name: values.pop(name) for name in names}
            blend = found.pop("blend", None)
            given = {n: Given(v, "flag", label_of(n, v)) for n, v in found.items() if v is not None}
            command(given=Flags(given, **config).with_blend(blend), **values)

        options = {**{name: SETTING_OPTIONS[name] for name in names}, **_CONFIG_OPTIONS}
        flags = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
            for name, option in options.items()
        ]
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            parameters += flags if parameter.name == "given" else own
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        # typer makes a command's options from its signature
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
