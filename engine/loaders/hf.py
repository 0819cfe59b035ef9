"""Models in Hugging Face directories: config.json, safetensors, tokenizer.json, chat template.

Only JSON, Jinja text and safetensors are read: nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.config import BadModelFile, ModelConfig, UnsupportedModel
from kvblend.engine.loaders.families import Family, find_family
from kvblend.engine.loaders.hf_config import parse_config
from kvblend.engine.loaders.hf_tensors import TensorNames
from kvblend.engine.loaders.source import ModelSource
from kvblend.engine.tokenizer import Tokenizer
from kvblend.engine.weights import check_names

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
# tables that older checkpoints carry; they repeat what config.json says
_LEFTOVER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@contextmanager
def open_directory(path: Path) -> Iterator[ModelSource]:
    """Open a model directory; its `read` works inside the `with` block only.

    A tied model (`tie_word_embeddings`) may carry `lm_head.weight` all the same if it equals the embedding bit by bit;
    a different one is refused, as either choice would be a guess. Raises BadModelFile or UnsupportedModel, naming the
    directory or file and what is wrong.
    """
    try:
        data = _read_json(path / "config.json")
        config = parse_config(data, _read_json(path / "generation_config.json", {}))
    except (BadModelFile, UnsupportedModel) as error:
        raise type(error)(f"{path}: {error}") from None
    settings = _read_json(path / "tokenizer_config.json", {})
    tokenizer = _read_tokenizer(path, settings, config)
    config = replace(config, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids)
    template = ChatTemplate(
        _read_template(path, settings),
        bos=tokenizer.text_of(tokenizer.bos_id),
        eos=_token_text(settings, "eos_token") or tokenizer.text_of(next(iter(tokenizer.eos_ids), None)),
    )
    files = _weight_files(path)
    with ExitStack() as stack:
        read = _open_tensors(path, files, config, find_family(data), stack)
        yield ModelSource(config, tokenizer, template, files, read)


def _open_tensors(
    path: Path, files: tuple[Path, ...], config: ModelConfig, family: Family, stack: ExitStack
) -> Callable[[str], torch.Tensor]:
    handles: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise BadModelFile(f"{file}: not a whole safetensors file: {error}") from None
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            if _LEFTOVER.fullmatch(name):
                continue
            if name in handles:
                raise BadModelFile(f"{file}: tensor {name} is in another file too")
            part = handle.get_slice(name)
            if part.get_dtype() not in _FLOATS:
                raise UnsupportedModel(
                    f"{file}: tensor {name} has dtype {part.get_dtype()}; supported: {', '.join(_FLOATS)}"
                )
            handles[name], shapes[name] = handle, tuple(part.get_shape())

    try:
        names = TensorNames(config, shapes, fused=family.fused, folded_norms=family.gemma)
    except BadModelFile as error:
        raise BadModelFile(f"{path}: {error}") from None
    shapes = names.shapes

    def read(name: str) -> torch.Tensor:
        return names.read(handles, name)

    if config.tie_embeddings and shapes.get(_HEAD) == shapes.get(_EMBEDDING) and _HEAD in shapes:
        if not torch.equal(read(_HEAD), read(_EMBEDDING)):
            raise BadModelFile(f"{path}: {_HEAD} differs from {_EMBEDDING} although tie_word_embeddings is true")
        del shapes[_HEAD]
    try:
        check_names(config, shapes)
    except BadModelFile as error:
        raise BadModelFile(f"{path}: {error}") from None
    return read


def _weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files in name order: those of the index, or the only one there is."""
    if (path / INDEX).is_file():
        places = _read_json(path / INDEX).get("weight_map")
        if not isinstance(places, Mapping) or not all(isinstance(n, str) for n in places.values()):
            raise BadModelFile(f"{path / INDEX}: weight_map is missing or is not an object of file names")
        names = sorted(set(places.values()))
        if inside := [n for n in names if Path(n).name != n]:
            raise BadModelFile(f"{path / INDEX}: {inside[0]!r} is not the name of a file in this directory")
        if missing := [n for n in names if not (path / n).is_file()]:
            raise BadModelFile(f"{path}: missing files: {', '.join(missing)}")
        return tuple(path / n for n in names)
    if (path / SINGLE).is_file():
        return (path / SINGLE,)
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise BadModelFile(f"{path}: {len(found)} safetensors files without {INDEX}")
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    hint = f" ({pickled[0]} is pickled and is not read)" if pickled else ""
    raise BadModelFile(f"{path}: no safetensors file{hint}")


def _read_tokenizer(path: Path, settings: Mapping[str, Any], config: ModelConfig) -> Tokenizer:
    file = path / "tokenizer.json"
    try:
        source = file.read_text("utf-8")
    except FileNotFoundError:
        raise BadModelFile(f"{path}: tokenizer.json is missing") from None
    except UnicodeDecodeError:
        raise BadModelFile(f"{file}: not valid UTF-8") from None
    try:
        library = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises nothing narrower
        raise BadModelFile(f"{file}: {error}") from None
    bos = library.token_to_id(_token_text(settings, "bos_token"))
    bos = config.bos_id if bos is None else bos
    eos = library.token_to_id(_token_text(settings, "eos_token"))
    eos_ids = tuple(dict.fromkeys((*config.eos_ids, *([] if eos is None else [eos]))))
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        # where the settings are silent, the file's own post-processor says it
        add_bos = bos is not None and library.encode("", add_special_tokens=True).ids[:1] == [bos]
    try:
        return Tokenizer(source, bos_id=bos, eos_ids=eos_ids, add_bos=bool(add_bos))
    except BadModelFile as error:
        raise BadModelFile(f"{file}: {error}") from None


def _read_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the `chat_template` of the settings: a text, or a list of named ones."""
    try:
        return (path / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        pass
    except UnicodeDecodeError:
        raise BadModelFile(f"{path / 'chat_template.jinja'}: not valid UTF-8") from None
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise BadModelFile(
            f"{path / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named ones"
        )
    return found


def _token_text(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_json(file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if default is None:
            raise BadModelFile(f"{file.name} is missing in {file.parent}") from None
        return default
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{file}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadModelFile(f"{file}: not a JSON object")
    return data
