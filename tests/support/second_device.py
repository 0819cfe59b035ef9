"""A pretended accelerator: real CPU tensors that are marked as lying elsewhere, so that mixing devices is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda:0")
HOST = torch.device("cpu")
MARK = "lies_on_second_device"

COPIES = {"copy_", "__setitem__"}
# what makes the host wait for the device
LOOKS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select"}


class MixedDevices(RuntimeError):
    """An operation got tensors of both devices."""


class SecondDevice(TorchFunctionMode):
    """While active, `DEVICE` can be used like a device. `waits` lists the operations that had the host wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        tensors = list(tensors_in((args, kwargs)))
        marked = [tensor for tensor in tensors if hasattr(tensor, MARK)]
        if name == "__get__" and func == torch.Tensor.device.__get__:
            return DEVICE if marked else func(*args, **kwargs)
        target = target_device(name, args, kwargs)
        if target is not None:
            if marked and target == HOST:
                self.waits.append(name)
            return mark(func(*on_host(args), **on_host(kwargs)), target == DEVICE)
        if marked and name in LOOKS:
            self.waits.append(name)
        if marked and name not in COPIES and any(not hasattr(t, MARK) and t.ndim for t in tensors):
            raise MixedDevices(f"{name} got tensors of both devices")
        brought_back = bool(marked) and name in COPIES and not hasattr(tensors[0], MARK)
        if brought_back:
            self.waits.append(name)
        return mark(func(*args, **kwargs), bool(marked) and not brought_back)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def target_device(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Where the result was asked to be, or None where it follows the arguments."""
    if name == "cpu":
        return HOST
    found = kwargs.get("device")
    if name == "to":
        found = next((a for a in args if isinstance(a, torch.device | str)), found)
    return torch.device(found) if found is not None else None


def on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return HOST
    if isinstance(value, dict):
        return {key: on_host(part) for key, part in value.items()}
    return tuple(on_host(part) for part in value) if isinstance(value, tuple) else value


def mark(value: Any, here: bool) -> Any:
    """`value` with every tensor in it marked or not; a tensor that has to change sides is copied."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, MARK) and not here:
            return value.clone()
        if here and not hasattr(value, MARK):
            fresh = value.view_as(value)
            setattr(fresh, MARK, True)
            return fresh
        return value
    if type(value) in (tuple, list):
        return type(value)(mark(part, here) for part in value)
    if isinstance(value, tuple) and here:  # the named tuples of max, sort, topk
        for part in tensors_in(value):
            setattr(part, MARK, True)
    return value
