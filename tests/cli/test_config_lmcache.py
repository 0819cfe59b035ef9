from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblend.cli.config.fields import known_fields
from kvblend.cli.config.lmcache import GIB, NAMES, NoMeaning, mean


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("enable_blending", True, {}),
        ("enable_blending", "True", {}),
        ("use_layerwise", True, {}),
        ("blend_special_str", '" # # "', {"separator": " # # "}),
        ("blend_special_str", " # # ", {"separator": " # # "}),
        ("blend_check_layers", [1], {"check_layers": [1]}),
        ("blend_recompute_ratios", [0.15], {"recompute_ratio": 0.15}),
        ("blend_recompute_ratios", "0.3,0.2", {"recompute_ratios": (0.3, 0.2)}),
        ("blend_recompute_ratios", None, {}),
        ("blend_thresholds", [0.1], {"thresholds": [0.1]}),
        ("blend_thresholds", None, {}),
        ("blend_min_tokens", 64, {"blend_min_tokens": 64}),
        ("enable_sparse", False, {}),
        ("local_cpu", True, {}),
        ("max_local_cpu_size", 5.0, {"host_bytes_budget": 5 * GIB}),
        ("max_local_cpu_size", "0.5", {"host_bytes_budget": GIB // 2}),
        ("local_disk", "file:///var/kv/", {"store": "/var/kv/"}),
        ("local_disk", "/var/kv", {"store": "/var/kv"}),
        ("local_disk", None, {}),
        ("local_device", "cpu", {}),
        ("local_device", "file:///var/kv", {"store": "/var/kv"}),
        ("max_local_disk_size", 2, {"disk_bytes_budget": 2 * GIB}),
        ("max_local_disk_size", 0.0, {}),
        ("remote_url", "redis://h:6379", {"remote": "redis://h:6379"}),
        ("remote_url", None, {}),
        ("remote_serde", "naive", {}),
        ("enable_p2p", False, {}),
    ],
)
def test_a_name_stands_for_settings(name: str, value: Any, ours: dict[str, Any]) -> None:
    assert (dict(mean(name, value).settings), mean(name, value).note) == (ours, "")


@pytest.mark.parametrize("name", ["chunk_size", "save_unfull_chunk", "lmcache_instance_id"])
def test_a_name_without_effect_is_noted(name: str) -> None:
    meaning = mean(name, 256)
    assert dict(meaning.settings) == {}
    assert meaning.note


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("enable_blending", False, "is false: kvblend always can blend"),
        ("use_layerwise", "no", "is false: layers are always loaded one by one"),
        ("use_layerwise", "perhaps", "must be true or false"),
        ("enable_sparse", True, "is true: rows are chosen by kvblend's selectors"),
        ("local_cpu", False, "make host_bytes_budget small"),
        ("local_device", "cuda", "kept in host memory (cpu)"),
        ("max_local_cpu_size", 0, "must be a size in GB above 0"),
        ("max_local_cpu_size", "nan", "must be a size in GB above 0"),
        ("max_local_disk_size", -1, "must be a size in GB above 0"),
        ("local_disk", True, "must be a folder"),
        ("local_disk", "/a,/b", "names several folders"),
        ("remote_url", "lm://user:secret@h:1", "must be the address of a Redis or Valkey server"),
        ("remote_serde", "cachegen", "see store_dtype for a narrower form"),
        ("enable_p2p", True, "is true: servers share chunks through a remote store only"),
        ("gds_path", "/x", "cannot be followed"),
        ("blend_recompute_ratios", "many", "must be a list"),
        ("blend_treshold", 1, "has no counterpart in kvblend; did you mean blend_thresholds?"),
        ("quux", 1, "has no counterpart in kvblend: take it out"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(name: str, value: Any, said: str) -> None:
    with pytest.raises(NoMeaning) as caught:
        mean(name, value)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_all_names_lead_to_settings_that_exist() -> None:
    values: tuple[Any, ...] = (True, False, 1, "lru", "/x", "redis://h", None)
    found: set[str] = set()
    for name in NAMES:
        for value in values:
            try:
                found |= set(mean(name, value).settings)
            except NoMeaning:
                continue
    assert found <= set(known_fields())


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.floats(), max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(NAMES)), value=VALUES)
def test_any_value_has_a_meaning_or_a_reason(name: str, value: Any) -> None:
    try:
        found = mean(name, value)
    except NoMeaning:
        return
    assert set(found.settings) <= set(known_fields())
