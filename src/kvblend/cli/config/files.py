"""Configuration files: a flat table in TOML or YAML, each value with the line that it stands in."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvblend.cli.failures import BadInput

_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A key and its value; `line` counts from 1, 0 where it is not known."""

    name: str
    value: Any
    line: int


def read_entries(path: Path) -> list[FileEntry]:
    """The entries of a `.toml`, `.yaml` or `.yml` file, in order.

    BadInput names file and line for one that cannot be read, is malformed, or has a key twice.
    """
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise BadInput(f"configuration file {path} must end in .toml, .yaml or .yml")
    text = _read(path)
    return list(_toml(path, text) if kind == ".toml" else _yaml(path, text))


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > _BYTES_MAX:
            raise BadInput(f"configuration file {path} has {len(data)} bytes; the limit is {_BYTES_MAX}")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"configuration file {path} is not valid UTF-8: byte {error.start}") from error
    except OSError as error:
        raise BadInput(f"cannot read configuration file {path}: {error.strerror or error}") from error


def _toml(path: Path, text: str) -> Iterator[FileEntry]:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from error
    lines = text.splitlines()
    for name, value in table.items():
        # tomllib keeps no places; keys are plain words here, and a key stands in one line only
        word = re.compile(rf"\s*\[*\s*[\"']?{re.escape(name)}[\"']?\s*[=.\]]")
        yield FileEntry(name, value, next((n for n, line in enumerate(lines, 1) if word.match(line)), 0))


def _yaml(path: Path, text: str) -> Iterator[FileEntry]:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2's true and false only, so that `gate: off` is a word."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise BadInput(f"{path}, line 1: must be a table of names and values")
        seen: dict[str, int] = {}
        for key, node in root.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in seen:
                raise BadInput(f"{path}, line {line}: {name} is given twice, first in line {seen[name]}")
            seen[name] = line
            yield FileEntry(name, loader.construct_object(node, deep=True), line)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadInput(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
