"""The file of API keys: read for a server, and changed line by line, so that comments in it stay."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from kvblend.api.server.keys import BadKeys, Tenant, issue, parse_keys
from kvblend.cli.failures import BadInput

HEAD = "# API keys of kvblend, as hashes. A key itself is shown once, by `kvblend keys add` or `rotate`.\n"


def read_key_file(path: Path) -> list[Tenant]:
    """The tenants in a file. BadInput names the file and what is wrong with it."""
    return _parse(path, _read(path))


def add_key(path: Path, name: str, *, operator: bool = False) -> tuple[Tenant, str]:
    """A new tenant, and its key; the file is made if it is missing. BadInput where there is one of this name."""
    text = _read(path) if path.exists() else HEAD
    if any(tenant.name == name for tenant in _parse(path, text)):
        raise BadInput(f"{path} has a key called {name}; a new key for the same tenant: kvblend keys rotate {name}")
    tenant, key = _issue(name, None, operator=operator)
    _write(path, f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{tenant.entry}\n")
    return tenant, key


def rotate_key(path: Path, name: str) -> tuple[Tenant, str]:
    """A new key for a tenant, whose chunks and role stay its own. BadInput where there is none of this name."""
    text = _read(path)
    old = _find(path, text, name)
    tenant, key = _issue(name, old.id, operator=old.operator)
    _write(path, _edit(path, text, name, lambda _line: f"{tenant.entry}\n"))
    return tenant, key


def remove_key(path: Path, name: str) -> Tenant:
    """Take a tenant's key out; its chunks stay where they are. BadInput where there is none of this name."""
    text = _read(path)
    tenant = _find(path, text, name)
    _write(path, _edit(path, text, name, lambda _line: ""))
    return tenant


def _issue(name: str, tenant_id: str | None, *, operator: bool) -> tuple[Tenant, str]:
    try:
        return issue(name, tenant_id, operator=operator)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _find(path: Path, text: str, name: str) -> Tenant:
    found = next((tenant for tenant in _parse(path, text) if tenant.name == name), None)
    if found is None:
        raise BadInput(f"{path} has no key called {name[:80]!r}")
    return found


def _edit(path: Path, text: str, name: str, change: Callable[[str], str]) -> str:
    """The text with the line of one entry changed; the other entries are as they were."""
    lines = text.splitlines(keepends=True)
    out = "".join(change(line) if line.partition("=")[0].strip().strip("\"'") == name else line for line in lines)
    kept = [tenant for tenant in _parse(path, text) if tenant.name != name]
    if [tenant for tenant in _parse(path, out) if tenant.name != name] != kept:
        raise BadInput(f"{path} is not written as `kvblend keys` writes it; change it by hand")
    return out


def _parse(path: Path, text: str) -> list[Tenant]:
    try:
        return parse_keys(text)
    except BadKeys as error:
        raise BadInput(f"{path}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole, readable by its owner only."""
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise BadInput(f"{path} cannot be written: {error}") from None
