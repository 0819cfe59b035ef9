"""What README and docs name must exist, and no text may name the machine it was written on."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvblend

ROOT = Path(__file__).resolve().parent.parent
IGNORED = ("build", "dist", "__pycache__", "node_modules")
TEXT = ("", ".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".txt", ".cfg", ".ini", ".json", ".typed")
RULES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def pages(root: Path) -> list[Path]:
    found = [root / name for name in RULES if (root / name).is_file()]
    return found + sorted((root / "docs").rglob("*.md"))


def text_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        hidden = path.is_dir() and path.name.startswith(".") and path.name != ".ci"
        if hidden or path.is_symlink() or path.name in IGNORED or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from text_files(path)
        elif path.suffix in TEXT and path.name != "LICENSE":
            yield path


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)


def commands() -> set[str]:
    import typer.main

    from kvblend.cli.app import app

    group = typer.main.get_command(app)
    return set(getattr(group, "commands", {}))


def code_of(page: Path) -> Iterator[tuple[int, str]]:
    """Code spans, and whole lines inside fences."""
    fenced = False
    for number, line in numbered(page):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            yield number, line
        else:
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line))


def named_commands_exist(root: Path) -> Iterator[str]:
    known = commands()
    for page in pages(root):
        for number, code in code_of(page):
            for name in re.findall(r"(?:^|\$ |bin/)kvblend (?:--\S+ )*([a-z]+)", code):
                if name not in known:
                    yield f"{page.relative_to(root)}:{number}: no command `kvblend {name}`"


def named_files_exist(root: Path) -> Iterator[str]:
    named = re.compile(r"(?<![\w/.])(?:\./)?((?:scripts|bench|docs|tests|engine|store|actors|api|src)/[\w./-]*[\w/])")
    for page in pages(root):
        for number, line in numbered(page):
            for name in named.findall(line):
                if not any((base / name).exists() for base in (root, root / "src" / "kvblend")):
                    yield f"{page.relative_to(root)}:{number}: {name} does not exist"


def links_resolve(root: Path) -> Iterator[str]:
    for page in pages(root):
        for number, line in numbered(page):
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                where = target.partition("#")[0]
                if where and "://" not in where and not (page.parent / where).exists():
                    yield f"{page.relative_to(root)}:{number}: {target} leads nowhere"


def no_path_of_a_machine(root: Path) -> Iterator[str]:
    places = "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"))
    for path in text_files(root):
        for number, line in numbered(path):
            if found := re.search(rf"(?<![\w.~}})\]*/-])/(?:{places})/\w", line):
                yield f"{path.relative_to(root)}:{number}: {found[0]}"


def no_registry_is_named(root: Path) -> Iterator[str]:
    hosts = re.compile(r"\w*py" + r"pi\.org|pythonho" + r"sted|download\.py" + r"torch", re.IGNORECASE)
    for path in text_files(root):
        for number, line in numbered(path):
            if found := hosts.search(line):
                yield f"{path.relative_to(root)}:{number}: {found[0]}"


PLANTED: dict[Callable[[Path], Iterator[str]], tuple[str, str]] = {
    named_commands_exist: ("README.md", "Type `kvblend fly` to start.\n"),
    named_files_exist: ("docs/a.md", "See scripts/absent for more.\n"),
    links_resolve: ("docs/a.md", "[here](absent.md)\n"),
    no_path_of_a_machine: ("docs/a.md", "cd /ho" + "me/someone\n"),
    no_registry_is_named: ("scripts/a", "pip install -i https://py" + "pi.org/simple x\n"),
}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    if broken := list(rule(ROOT)):
        pytest.fail("\n".join(broken), pytrace=False)


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found(rule: Callable[[Path], Iterator[str]], tmp_path: Path) -> None:
    path, text = PLANTED[rule]
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert [found for found in rule(tmp_path) if path in found]


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(commands()) if f"kvblend {name}" not in text] == []


def test_the_readme_names_every_setting() -> None:
    from kvblend.actors.settings import Settings

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in Settings.names() if f"`{name}`" not in text] == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == kvblend.__version__
    assert f"## {kvblend.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
