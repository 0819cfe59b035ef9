"""Stored layers on the device: the same numbers as in host memory, copied there once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from second_device import DEVICE, SecondDevice

from kvblend.engine.capture import tensor_bytes
from kvblend.engine.payloads import ALIGN_BYTES, DeviceBlock, Payload, block_bytes, free_memory_bytes, payload_numbers
from kvblend.engine.precision import Precision

CPU = torch.device("cpu")
HEADS, TOKENS, DIM = 2, 5, 6
FORMS = ("float32", "bfloat16", "int8")


def on_device(payload: memoryview) -> torch.Tensor:
    found = DeviceBlock(1, len(payload), CPU).fill(0, payload)
    assert isinstance(found, torch.Tensor)
    return found


def stored_layer(form: Precision, seed: int) -> memoryview:
    """A layer with sensitivity and echo."""
    generator = torch.Generator().manual_seed(seed)
    kv, echo = (torch.randn((2, HEADS, TOKENS, DIM), generator=generator) for _ in range(2))
    parts = [kv, torch.rand(TOKENS, generator=generator), echo]
    return form.encode(tensor_bytes(torch.cat([part.flatten().view(torch.uint8) for part in parts])), TOKENS)


def test_numbers_are_found_at_their_place_in_both_kinds() -> None:
    payload = memoryview(bytearray(range(32)))
    for found in (payload, on_device(payload)):
        assert payload_numbers(found, torch.uint8).tolist() == list(range(32))
        assert payload_numbers(found, torch.uint8, 3, 4).tolist() == [4, 5, 6]
        assert payload_numbers(found, torch.int16, 1, 8).tolist() == [8 + 256 * 9]


def test_a_layer_is_copied_once() -> None:
    block, payload = DeviceBlock(2, 4, CPU), memoryview(bytearray(b"once"))
    first = block.fill(1, payload)
    payload[:] = b"then"
    again = block.fill(1, payload)
    assert isinstance(first, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert bytes(again.tolist()) == b"once"
    assert first.data_ptr() == again.data_ptr() == block.layer(1).data_ptr()


def test_a_block_is_full_when_every_layer_is_there() -> None:
    block = DeviceBlock(2, 1, CPU)
    assert not block.has(0)
    block.fill(0, memoryview(bytearray(b"a")))
    assert (block.has(0), block.has(1), block.is_full) == (True, False, False)
    block.fill(1, memoryview(bytearray(b"b")))
    assert block.is_full


def test_every_layer_begins_aligned_and_that_is_counted() -> None:
    block = DeviceBlock(3, ALIGN_BYTES + 1, CPU)
    for layer in range(3):
        block.fill(layer, memoryview(bytearray(ALIGN_BYTES + 1)))
    starts = [block.layer(layer).data_ptr() - block.layer(0).data_ptr() for layer in range(3)]
    assert starts == [0, 2 * ALIGN_BYTES, 4 * ALIGN_BYTES]
    assert block.num_bytes == block_bytes(3, ALIGN_BYTES + 1) == 6 * ALIGN_BYTES


def test_a_layer_that_is_not_there_or_of_another_length_is_an_error() -> None:
    block = DeviceBlock(1, 4, CPU)
    with pytest.raises(ValueError, match="layer 0 is not on the device"):
        block.layer(0)
    with pytest.raises(ValueError, match="layer 0 has 3 bytes; those of this chunk have 4"):
        block.fill(0, memoryview(bytearray(3)))


def test_a_device_without_room_leaves_the_layer_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "empty", refuse)
    block, payload = DeviceBlock(2, 4, CPU), memoryview(bytearray(4))
    assert block.fill(0, payload) is payload
    assert block.fill(1, payload) is payload
    assert (block.failed, block.is_full, len(tries)) == (True, False, 1)


def test_a_closed_block_takes_nothing_in_and_keeps_what_it_has() -> None:
    block, payload = DeviceBlock(2, 4, CPU), memoryview(bytearray(b"kept"))
    block.fill(0, payload)
    block.close()
    assert block.fill(1, payload) is payload
    assert bytes(block.layer(0).tolist()) == b"kept"


def test_a_cpu_has_no_device_memory() -> None:
    assert free_memory_bytes(CPU) is None


@pytest.mark.parametrize("stored", FORMS)
def test_a_layer_on_the_device_decodes_to_the_very_same_bits(stored: str) -> None:
    form = Precision.of(torch.float32, stored, HEADS, DIM)
    raws = [stored_layer(form, seed) for seed in range(2)]
    # one on the device, one in host memory, as in a blend of a hot and a new chunk
    mixed: list[Payload] = [on_device(raws[0]), raws[1]]
    length, starts = 2 * TOKENS + 1, (0, TOKENS + 1)
    angles = torch.rand((length, DIM), generator=torch.Generator().manual_seed(9))
    rows = torch.tensor([1, 3])
    slots = []
    for payloads in (raws, mixed):
        k, v = torch.zeros(HEADS, length, DIM), torch.zeros(HEADS, length, DIM)
        turn = (angles.cos(), angles.sin())
        form.decode_into([(s, s + TOKENS, p) for s, p in zip(starts, payloads, strict=True)], (k, v), turn)
        slots += [k.clone(), v.clone()]
        echoes = [form.echo(payload, TOKENS) for payload in payloads]
        parts = [(s, s + TOKENS, e, rows) for s, e in zip(starts, echoes, strict=True) if e is not None]
        assert len(parts) == 2
        form.decode_rows_into(parts, (k, v), turn)
        slots += [k, v]
    for want, got in zip(slots[:4], slots[4:], strict=True):
        assert torch.equal(want, got)
    for want, got in zip(form.decode(raws[0], TOKENS), form.decode(mixed[0], TOKENS), strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("stored", FORMS)
def test_layers_of_both_places_are_decoded_into_slots_on_a_device(stored: str) -> None:
    form = Precision.of(torch.float32, stored, HEADS, DIM)
    raws = [stored_layer(form, seed) for seed in range(2)]
    rows, length = torch.tensor([0, 4]), 2 * TOKENS

    def decoded(payloads: list[Payload], device: torch.device) -> list[torch.Tensor]:
        k, v = (torch.zeros((HEADS, length, DIM), device=device) for _ in range(2))
        turn = torch.full((length, DIM), 0.6).to(device), torch.full((length, DIM), 0.8).to(device)
        form.decode_into([(s, s + TOKENS, p) for s, p in zip((0, TOKENS), payloads, strict=True)], (k, v), turn)
        echoes = [form.echo(payload, TOKENS) for payload in payloads]
        parts = [(s, s + TOKENS, e, rows) for s, e in zip((0, TOKENS), echoes, strict=True) if e is not None]
        form.decode_rows_into(parts, (k, v), turn)
        return [k.to(CPU), v.to(CPU)]

    want = decoded([*raws], CPU)
    with SecondDevice():
        resident = DeviceBlock(1, len(raws[0]), DEVICE).fill(0, raws[0])
        assert isinstance(resident, torch.Tensor)
        assert resident.device == DEVICE
        got = decoded([resident, raws[1]], DEVICE)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stored", FORMS)
def test_sensitivity_of_a_layer_on_the_device_comes_to_host_memory(stored: str) -> None:
    form = Precision.of(torch.float32, stored, HEADS, DIM)
    raw = stored_layer(form, 3)
    want, got = form.sensitivity(raw, TOKENS), form.sensitivity(on_device(raw), TOKENS)
    assert want is not None
    assert got is not None
    assert torch.equal(want, got)
    assert got.device == CPU
