"""The GGUF container: equal to the gguf package's reading, and every damage is an error that names the file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvblend.engine.config import BadModelFile, UnsupportedModel
from kvblend.engine.loaders.gguf_file import GGUFFile

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def small_file(path: Path, kind: Kind = Kind.F32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_array("a.list", ["one", "zwei", "три"])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_bool("a.flag", True)
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    writer.add_tensor("t.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_file(tmp_path_factory.mktemp("gguf") / "a.gguf").read_bytes()


def test_metadata_equals_the_packages_reading(tmp_path: Path) -> None:
    path = small_file(tmp_path / "a.gguf")
    theirs = {n: f.contents() for n, f in gguf.GGUFReader(path).fields.items() if not n.startswith("GGUF.")}
    with GGUFFile(path) as file:
        assert file.metadata == theirs


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: str(k.name))
def test_tensors_are_dequantised(tmp_path: Path, kind: Kind) -> None:
    with GGUFFile(small_file(tmp_path / "a.gguf", kind)) as file:
        values = file.read("t.weight")
    assert np.abs(values - np.linspace(-1, 1, 128).reshape(2, 64)).max() < 0.15


def test_every_type_the_package_dequantises_is_read(tmp_path: Path) -> None:
    # the types it cannot quantise are made of raw blocks: only shape and route are of interest
    for kind in gguf.quants._type_traits:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tensor("t.weight", np.zeros((2, size), dtype=np.uint8), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(tmp_path / "a.gguf") as file:
            assert file.read("t.weight").shape == (2, block), kind


def test_a_type_without_dequantiser_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("t.weight", np.zeros((2, 4), dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "a.gguf") as file, pytest.raises(UnsupportedModel, match=r"t\.weight has type I32"):
        file.read("t.weight")


def test_values_outlive_the_file(tmp_path: Path) -> None:
    with GGUFFile(small_file(tmp_path / "a.gguf")) as file:
        values = file.read("t.weight")
    assert values[0, 0] == -1.0


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" * 10])
def test_other_files_are_named_as_such(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(BadModelFile, match=r"a\.gguf: not a GGUF file"):
        GGUFFile(tmp_path / "a.gguf")


@pytest.mark.parametrize(("version", "named"), [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")])
def test_other_versions_are_named(tmp_path: Path, whole: bytes, version: int, named: str) -> None:
    (tmp_path / "a.gguf").write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
    with pytest.raises(UnsupportedModel, match=named):
        GGUFFile(tmp_path / "a.gguf")


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[: data.draw(st.integers(4, len(whole) - 1))])
    with pytest.raises(BadModelFile, match=r"a\.gguf: cut short"):
        GGUFFile(path)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_is_read_or_refused_and_never_worse(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytes([whole[at] ^ data.draw(st.integers(1, 255))])
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[:at] + flipped + whole[at + 1 :])
    problem = ""
    try:
        with GGUFFile(path) as file:
            for name in file.tensors:
                file.read(name)
    except (BadModelFile, UnsupportedModel) as error:
        problem = str(error)
    assert not problem or "a.gguf" in problem
