"""Wheel, sdist and editable install, each tried in a fresh environment without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "store", "actors", "api")
PARTS = (*ROOMS, "src", "pyproject.toml", "README.md", "LICENSE")
# builds and installs share two cores with whatever else runs
pytestmark = pytest.mark.timeout(300)


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode:
        pytest.fail(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def copy_project(to: Path) -> Path:
    to.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, to / part, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(ROOT / part, to / part)
    return to


def fresh_environment(folder: Path, *install: str) -> Path:
    """A new environment with kvblend installed; every other package is lent by the one that runs the tests."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    # a .pth in a lent folder is not read, so the editable install of the tests' own environment stays out
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation", *install, cwd=folder)
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("built")
    project = copy_project(folder / "project")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", project, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_environment(tmp_path_factory.mktemp("installed"), str(wheel))


def sources() -> set[str]:
    """Every source file of the project, as it is named inside the wheel."""
    rooms = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    own = ROOT / "src" / "kvblend"
    inside = {path.relative_to(own) for path in own.rglob("*.py") if not path.resolve().is_relative_to(ROOT / "engine")}
    return {f"kvblend/{path.as_posix()}" for path in rooms | inside}


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert sources() - set(archive.namelist()) == set()


def test_the_wheel_s_rooms_are_real_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        links = [entry.filename for entry in archive.infolist() if (entry.external_attr >> 16) & 0o170000 == 0o120000]
        assert links == []
        assert {f"kvblend/{room}/__init__.py" for room in ROOMS} <= set(archive.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if top != "kvblend" and not top.endswith(".dist-info")} == set()


def test_types_and_samples_are_in_the_wheel(wheel: Path) -> None:
    wanted = {"kvblend/py.typed"}
    wanted |= {f"kvblend/samples/{path.name}" for path in (ROOT / "src/kvblend/samples").glob("*.md")}
    assert len(wanted) > 6
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - set(archive.namelist()) == set()


def test_the_licence_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]


def test_the_sdist_holds_every_source_file(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/src/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert sources() - inside == set()


def test_the_installed_package_is_the_wheel_s(installed: Path) -> None:
    where = run(installed, "-c", "import kvblend; print(kvblend.__file__)", cwd=installed.parent)
    assert Path(where.strip()).is_relative_to(installed.parent.parent)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_imports_from_the_wheel(installed: Path, room: str) -> None:
    run(installed, "-c", f"import kvblend.{room}", cwd=installed.parent)


def test_importing_the_package_loads_no_torch(installed: Path) -> None:
    code = "import sys, kvblend; print(sorted({'torch', 'numpy', 'websockets', 'typer'} & set(sys.modules)))"
    assert run(installed, "-c", code, cwd=installed.parent).strip() == "[]"


def test_the_client_needs_no_server_library(installed: Path) -> None:
    server = "{'torch', 'numpy', 'starlette', 'uvicorn', 'uvloop', 'aiofiles', 'blake3', 'tokenizers'}"
    code = f"import sys; from kvblend import AsyncClient; print(sorted({server} & set(sys.modules)))"
    assert run(installed, "-c", code, cwd=installed.parent).strip() == "[]"


def test_the_command_is_installed(installed: Path) -> None:
    assert "serve" in run(installed.parent / "kvblend", "--help", cwd=installed.parent)


def test_samples_load_from_the_wheel(installed: Path) -> None:
    count = run(installed, "-c", "from kvblend.samples import load; print(len(load()))", cwd=installed.parent)
    assert int(count) >= 6


def test_an_editable_install_sees_new_files(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    python = fresh_environment(tmp_path / "env", "--editable", str(project))
    (project / "engine" / "brand_new.py").write_text("VALUE = 7\n")
    code = "from kvblend.engine.brand_new import VALUE; print(VALUE)"
    assert run(python, "-c", code, cwd=tmp_path).strip() == "7"
