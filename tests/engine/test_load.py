"""Loading by path: both formats, everything that belongs to a model, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_files import edit_json

from kvblend.engine.config import BadModelFile, ModelConfig, UnsupportedModel
from kvblend.engine.loaders.load import digest_file, load_model

CPU = torch.device("cpu")


@pytest.fixture
def copied(llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_dir, tmp_path / "model"))


@pytest.mark.parametrize("kind", ["llama_dir", "llama_gguf"])
def test_both_formats_give_a_whole_model(kind: str, request: pytest.FixtureRequest) -> None:
    loaded = load_model(request.getfixturevalue(kind), torch.float32, CPU)
    assert loaded.model.num_layers == 3
    assert loaded.tokenizer.eos_ids == (2,)
    assert loaded.template.split("s", [("user", "q")])[0] == "<|im_start|>system\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_dtype_asked_for(llama_gguf: Path, dtype: torch.dtype) -> None:
    model = load_model(llama_gguf, dtype, CPU).model
    assert {model.dtype, model.weights.head.dtype, model.weights.layers[2].qkv.dtype} == {dtype}


def test_tied_embeddings_are_held_once(llama_dir: Path) -> None:
    weights = load_model(llama_dir, torch.float32, CPU).model.weights
    assert weights.head is weights.embedding


def test_a_dtype_that_cannot_compute_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        load_model(llama_dir, torch.int8, CPU)


def test_a_missing_path_is_named_with_what_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"nothing does not exist; a model is a Hugging Face directory.*\.gguf file"):
        load_model(tmp_path / "nothing", torch.float32, CPU)


def test_another_file_is_named_with_what_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(BadModelFile, match=r"model\.onnx is not a model; a model is"):
        load_model(tmp_path / "model.onnx", torch.float32, CPU)


def test_a_truncated_gguf_is_named(llama_gguf: Path, tmp_path: Path) -> None:
    data = llama_gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadModelFile, match=r"cut\.gguf: cut short"):
        load_model(tmp_path / "cut.gguf", torch.float32, CPU)


def test_a_vocabulary_larger_than_the_embedding_is_refused(copied: Path) -> None:
    edit_json(copied / "tokenizer_config.json", chat_template=None)
    text = (copied / "tokenizer.json").read_text()
    token = (
        '{"id":%d,"content":"w%d","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":false}'
    )
    extra = ",".join(token % (i, i) for i in range(400, 420))
    (copied / "tokenizer.json").write_text(text.replace('"added_tokens":[', f'"added_tokens":[{extra},', 1))
    with pytest.raises(BadModelFile, match="the embedding has 320 rows"):
        load_model(copied, torch.float32, CPU)


def test_an_end_token_outside_the_vocabulary_is_refused(copied: Path) -> None:
    edit_json(copied / "config.json", eos_token_id=320)
    with pytest.raises(BadModelFile, match=r"the eos token is 320; ids lie in 0\.\.319"):
        load_model(copied, torch.float32, CPU)


def test_a_template_that_cannot_be_used_is_found_at_once(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("nothing of it")
    with pytest.raises(UnsupportedModel, match="chat template"):
        load_model(copied, torch.float32, CPU)


def test_a_files_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    from blake3 import blake3

    (tmp_path / "a").write_bytes(b"abc")
    assert digest_file(tmp_path / "a") == blake3(b"abc").digest()


def test_the_room_itself_imports_no_torch() -> None:
    code = "import sys, kvblend.engine.loaders; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_check_sees_the_shape_before_any_weight_is_read(llama_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_nothing(*_: object) -> None:
        pytest.fail("weights were read")

    def refuse(config: ModelConfig) -> None:
        raise LookupError(f"{config.num_layers} layers")

    monkeypatch.setattr("kvblend.engine.loaders.load.build_weights", read_nothing)
    with pytest.raises(LookupError, match="3 layers"):
        load_model(llama_gguf, torch.float32, CPU, refuse)
