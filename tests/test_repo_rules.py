"""The rules of docs/architecture.md, read out of the syntax trees; each is also tried on a planted violation."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "store", "actors", "api", "src/kvblend")
LINES_MAX, FUNCTION_LINES_MAX = 300, 70
PACKAGE = "kvblend"


@dataclass(frozen=True)
class Room:
    """What the files under a folder may import; the longest matching folder counts."""

    ours: tuple[str, ...]
    third: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


PICKLES = ("pickle", "marshal", "shelve")
LEAF = Room(
    ("actors.errors", "engine.selectors.spec", "engine.logprobs"),
    forbidden=("asyncio", "threading", "os", "socket", *PICKLES),
)
WAITING = ("asyncio", "threading", "multiprocessing", "concurrent", "socket", "subprocess")
CORE_FORBIDDEN = (*WAITING, *PICKLES, "time", "datetime", "random", "secrets", "uuid", "os", "io", "pathlib", "logging")
API_OURS = tuple(f"actors.{name}" for name in ("messages", "streams", "system", "errors", "settings"))

IMPORTS: dict[str, Room] = {
    "engine": Room(
        ("engine",),
        ("torch", "xformers", "safetensors", "tokenizers", "gguf", "numpy", "jinja2", "blake3", "rouge_score"),
        (*WAITING, *PICKLES, "os", "time", "random"),
    ),
    "engine/loaders": Room(
        ("engine",),
        ("torch", "safetensors", "tokenizers", "gguf", "numpy", "jinja2", "blake3"),
        (*WAITING, *PICKLES, "time", "random"),
    ),
    "engine/selectors/spec.py": Room((), (), (*WAITING, *PICKLES, "os", "time", "random")),
    "engine/logprobs.py": Room((), (), (*WAITING, *PICKLES, "os", "time", "random")),
    "store": Room(("store",), ("aiofiles", "msgpack", "blake3", "redis"), ("socket", "subprocess", "random", *PICKLES)),
    "actors": Room(("actors", "engine", "store"), (), ("socket", "json", "subprocess", *PICKLES)),
    "actors/core": Room(
        ("actors.core", "actors.messages", "actors.errors", "actors.settings", "engine.layout", "store.keys"),
        forbidden=CORE_FORBIDDEN,
    ),
    "actors/errors.py": LEAF,
    "actors/messages.py": LEAF,
    "actors/settings.py": LEAF,
    "api": Room(("api", *API_OURS), ("starlette", "uvicorn", "websockets", "msgpack", "prometheus_client"), PICKLES),
    "api/client": Room(("api.client", "actors.messages", "actors.errors"), ("websockets", "msgpack"), PICKLES),
    "src/kvblend": Room(
        ("",), ("typer", "click", "rich", "uvloop", "matplotlib", "bm25s", "yaml", "structlog"), PICKLES
    ),
}


def python_files(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            # the symlinked rooms are read at their own place
            inside = path.relative_to(root / folder).parts
            if folder != "src/kvblend" or inside[0] not in ROOMS:
                yield path


def scripts(root: Path) -> Iterator[Path]:
    yield from (p for p in sorted((root / "scripts").rglob("*")) if p.is_file() and p.suffix in ("", ".py", ".sh"))


def name_of(root: Path, path: Path) -> str:
    """The dotted name below `kvblend` (`engine.layout`), the package's own for `__init__`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    parts = parts[2:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(root: Path, dotted: str) -> bool:
    relative = Path(*dotted.split("."))
    return any((base / relative).is_dir() or (base / relative).with_suffix(".py").is_file() for base in bases(root))


def bases(root: Path) -> tuple[Path, Path]:
    return root, root / "src" / PACKAGE


def imports_of(root: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every imported module, wherever in the file the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                is_ours = module == PACKAGE or module.startswith(f"{PACKAGE}.")
                yield node.lineno, f"{PACKAGE}.{inner}" if is_ours and is_module(root, inner) else module


def trees(root: Path, *folders: str) -> Iterator[tuple[Path, str, ast.Module]]:
    for path in python_files(root, *folders):
        yield path, path.relative_to(root).as_posix(), parse(path.read_text(encoding="utf-8"))


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def room_of(relative: str) -> Room:
    return IMPORTS[max((room for room in IMPORTS if f"{relative}/".startswith(f"{room}/")), key=len)]


def complaint_about(module: str, room: Room) -> str | None:
    top = module.partition(".")[0]
    if top == PACKAGE:
        inner = module.removeprefix(PACKAGE).removeprefix(".")
        fine = any(not ours or inner == ours or inner.startswith(f"{ours}.") for ours in room.ours)
        return None if fine else "is of a room that this one may not import"
    if top in room.forbidden:
        return "is forbidden in this room"
    if top not in sys.stdlib_module_names and top not in room.third:
        return "is a library that this room may not use"
    return None


def rooms_import_only_what_they_may(root: Path) -> Iterator[str]:
    for _, relative, tree in trees(root, *ROOMS):
        for line, module in imports_of(root, tree):
            if module.startswith("."):
                yield f"{relative}:{line}: relative import"
            elif complaint := complaint_about(module, room_of(relative)):
                yield f"{relative}:{line}: {module} {complaint}"


def no_bare_room_import(root: Path) -> Iterator[str]:
    for _, relative, tree in trees(root, *ROOMS, "tests", "bench", "scripts"):
        for line, module in imports_of(root, tree):
            if module.partition(".")[0] in ROOMS:
                yield f"{relative}:{line}: `{module}` makes a second module object; import {PACKAGE}.{module}"


def only_loaders_open_files_in_engine(root: Path) -> Iterator[str]:
    calls = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "unlink", "getenv"}
    for _, relative, tree in trees(root, "engine", "actors/core"):
        if relative.startswith("engine/loaders/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called_name(node) in calls:
                yield f"{relative}:{node.lineno}: {called_name(node)}() outside the loaders"


def called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def files_are_short(root: Path) -> Iterator[str]:
    for path in [*python_files(root, *ROOMS, "tests", "bench"), *scripts(root)]:
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LINES_MAX:
            yield f"{path.relative_to(root)}: {count} lines; at most {LINES_MAX}"


def functions_are_short(root: Path) -> Iterator[str]:
    for _, relative, tree in trees(root, *ROOMS, "bench", "scripts"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > FUNCTION_LINES_MAX:
                    yield f"{relative}:{node.lineno}: {node.name} has {count} lines; at most {FUNCTION_LINES_MAX}"


def modules_have_tests(root: Path) -> Iterator[str]:
    """`engine/loaders/names.py` wants tests/engine/test_names.py, or test_loaders_names.py (a must if ambiguous)."""
    modules = [p for p in python_files(root, *ROOMS) if not p.stem.startswith("__")]
    names = [name_of(root, path).split(".") for path in modules]
    for path, (room, *rest) in zip(modules, names, strict=True):
        folder = root / "tests" / room if rest else root / "tests"
        inner = rest or [room]
        wanted = {f"test_{'_'.join(inner)}.py"}
        if sum(other[0] == room and other[-1] == inner[-1] for other in names) == 1:
            wanted.add(f"test_{inner[-1]}.py")
        if not any((folder / name).is_file() for name in wanted):
            yield f"{path.relative_to(root)}: no test file {' or '.join(sorted(wanted))} in {folder.relative_to(root)}"


def no_dead_module(root: Path) -> Iterator[str]:
    used: set[str] = set()
    for path, _, tree in trees(root, *ROOMS, "bench", "scripts"):
        own = f"{PACKAGE}.{name_of(root, path)}"
        used.update(module for _, module in imports_of(root, tree) if module != own)
    for path in python_files(root, *ROOMS):
        if not path.stem.startswith("__") and f"{PACKAGE}.{name_of(root, path)}" not in used:
            yield f"{path.relative_to(root)}: nothing but its test imports it"


def no_leftover_marks(root: Path) -> Iterator[str]:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error")
    for path in [*python_files(root, *ROOMS, "tests", "bench"), *scripts(root)]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := [mark for mark in marks if mark in line]:
                yield f"{path.relative_to(root)}:{number}: {found[0]}"


def public_names_have_docstrings(root: Path) -> Iterator[str]:
    def undocumented(node: ast.AST, prefix: str) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("_"):
                    continue
                if not ast.get_docstring(child):
                    yield child.lineno, prefix + child.name
                if isinstance(child, ast.ClassDef):
                    yield from undocumented(child, f"{prefix}{child.name}.")

    for _, relative, tree in trees(root, *ROOMS):
        if tree.body and not ast.get_docstring(tree):
            yield f"{relative}: no module docstring"
        yield from (f"{relative}:{line}: {name} has no docstring" for line, name in undocumented(tree, ""))


def only_the_command_line_prints(root: Path) -> Iterator[str]:
    for _, relative, tree in trees(root, *ROOMS):
        if relative.startswith("src/kvblend/cli/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{relative}:{node.lineno}: print()"


LONG = "x = 1\n"
PLANTED: dict[Callable[[Path], Iterator[str]], tuple[tuple[str, str], ...]] = {
    rooms_import_only_what_they_may: (
        ("engine/a.py", "import asyncio\n"),
        ("engine/a.py", "from kvblend.store.keys import ChunkKey\n"),
        ("store/a.py", "def f():\n    import torch\n"),
        ("store/a.py", "from kvblend.engine import layout\n"),
        ("actors/core/a.py", "import time\n"),
        ("actors/core/a.py", "from kvblend.engine.model import Llama\n"),
        ("actors/a.py", "import torch\n"),
        ("actors/a.py", "from kvblend.api import server\n"),
        ("actors/messages.py", "from kvblend.actors.core import a\n"),
        ("engine/selectors/spec.py", "import torch\n"),
        ("api/server/a.py", "from kvblend.actors.scheduler import Scheduler\n"),
        ("api/server/a.py", "import torch\n"),
        ("api/client/a.py", "import starlette\n"),
        ("store/a.py", "from . import keys\n"),
        ("store/a.py", "import pickle\n"),
        ("src/kvblend/cli/a.py", "import requests\n"),
        ("engine/a.py", "from kvblend.cli import app\n"),
    ),
    no_bare_room_import: (("tests/a.py", "import engine\n"), ("tests/a.py", "from store.keys import ChunkKey\n")),
    only_loaders_open_files_in_engine: (("engine/a.py", "open('x')\n"), ("engine/a.py", "path.read_bytes()\n")),
    files_are_short: (("tests/a.py", LONG * 301), ("scripts/a", LONG * 301)),
    functions_are_short: (("api/a.py", "def f():\n" + f"    {LONG}" * 70),),
    modules_have_tests: (("engine/loaders/a.py", LONG), ("src/kvblend/cli/a.py", LONG)),
    no_dead_module: (("store/a.py", LONG),),
    no_leftover_marks: (("api/a.py", "# TO" + "DO: later\n"), ("scripts/a", "# FIX" + "ME\n")),
    public_names_have_docstrings: (
        ("api/a.py", LONG),
        ("api/a.py", '"""Doc."""\ndef f():\n    pass\n'),
        ("api/a.py", '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): ...\n'),
    ),
    only_the_command_line_prints: (("engine/a.py", "print('x')\n"),),
}
CASES = [(rule, path, text) for rule, planted in PLANTED.items() for path, text in planted]
CASE_IDS = [f"{rule.__name__}-{number}" for number, (rule, *_) in enumerate(CASES)]


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    if broken := list(rule(ROOT)):
        pytest.fail("\n".join(broken), pytrace=False)


@pytest.mark.parametrize(("rule", "path", "text"), CASES, ids=CASE_IDS)
def test_a_planted_violation_is_found(
    rule: Callable[[Path], Iterator[str]], path: str, text: str, tmp_path: Path
) -> None:
    for other in ("engine/model.py", "engine/layout.py", "store/keys.py", "api/server/b.py", "src/kvblend/cli/app.py"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).touch()
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert any(path in found for found in rule(tmp_path))
