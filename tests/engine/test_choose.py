"""Which backend is chosen where, and what is said about it."""

from __future__ import annotations

import pytest
import torch

from kvblend.engine.attention import choose
from kvblend.engine.attention.choose import BackendUnavailable, choose_backend
from kvblend.engine.attention.xformers import XformersBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pretend_xformers(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    found = XformersBackend(torch.Tensor.add) if works else None
    monkeypatch.setattr(choose, "probe_xformers", lambda device, dtype: (found, "because I say so"))


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_a_cpu_gets_torch(name: str) -> None:
    backend, why = choose_backend(name, CPU, torch.float32)
    assert backend.name == "sdpa"
    assert why == "torch scaled_dot_product_attention on cpu"


def test_forcing_xformers_on_a_cpu_names_what_is_available() -> None:
    with pytest.raises(BackendUnavailable, match=r"'xformers' cannot run here: .*device 'cpu'; available: sdpa"):
        choose_backend("xformers", CPU, torch.float32)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match="'flash' is not known; choose auto, sdpa, xformers"):
        choose_backend("flash", CPU, torch.float32)


def test_cuda_gets_xformers_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_xformers(monkeypatch, works=True)
    backend, why = choose_backend("auto", CUDA, torch.float16)
    assert (backend.name, why) == ("xformers", "because I say so")


def test_cuda_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_xformers(monkeypatch, works=False)
    backend, why = choose_backend("auto", CUDA, torch.float16)
    assert backend.name == "sdpa"
    assert why == "torch scaled_dot_product_attention on cuda (because I say so)"


def test_sdpa_by_name_never_looks_for_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device, dtype: torch.dtype) -> None:
        raise AssertionError

    monkeypatch.setattr(choose, "probe_xformers", fail)
    assert choose_backend("sdpa", CUDA, torch.float16)[0].name == "sdpa"
