"""Picks the attention backend for a device, once at start, and says why."""

from __future__ import annotations

import torch

from kvblend.engine.attention.base import AttentionBackend
from kvblend.engine.attention.sdpa import SdpaBackend
from kvblend.engine.attention.xformers import probe_xformers


class BackendUnavailable(ValueError):
    """A backend was asked for by name that this machine cannot run."""


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> tuple[AttentionBackend, str]:
    """`name` is auto, sdpa or xformers. Returns the backend and a line for the log.

    Raises BackendUnavailable for an unknown name, or where xformers is forced and does not run.
    """
    if name not in ("auto", "sdpa", "xformers"):
        raise BackendUnavailable(f"attention backend {name!r} is not known; choose auto, sdpa, xformers")
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaBackend(), f"torch scaled_dot_product_attention on {device.type}"
    backend, why = probe_xformers(device, dtype)
    if backend is not None:
        return backend, why
    if name == "xformers":
        raise BackendUnavailable(f"attention backend 'xformers' cannot run here: {why}; available: sdpa")
    return SdpaBackend(), f"torch scaled_dot_product_attention on {device.type} ({why})"
