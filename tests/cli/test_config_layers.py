from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.actors.settings import Settings
from kvblend.api.server.limits import ApiLimits
from kvblend.cli.config.given import Given
from kvblend.cli.config.layers import API_KEY, check_file, resolve
from kvblend.cli.config.server_options import ServerOptions
from kvblend.cli.failures import BadInput


def flag(name: str, value: object) -> dict[str, Given]:
    return {name: Given(value, "flag", f"--{name.replace('_', '-')}")}


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_without_any_source_there_are_the_defaults(cache: Path) -> None:
    found = resolve({}, environ={})
    assert found.settings == Settings(store=cache / "store")
    assert (found.server, found.limits, dict(found.given)) == (ServerOptions(), ApiLimits(), {})


def test_flags_come_before_the_environment_before_files_before_defaults(tmp_path: Path) -> None:
    config = write(tmp_path, "kv.toml", "threads = 1\nspan = 1\nsinks = 1\nblend_min_tokens = 1\n")
    lmcache = write(tmp_path, "lm.yaml", "blend_min_tokens: 0\nblend_special_str: '|'\n")
    environ = {"KVBLEND_THREADS": "2", "KVBLEND_SPAN": "2", "LMCACHE_BLEND_MIN_TOKENS": "2"}
    found = resolve(flag("threads", 3), config, lmcache, environ)
    settings = found.settings
    assert (settings.threads, settings.span, settings.sinks, settings.separator) == (3, 2, 1, "|")
    assert settings.blend_min_tokens == 2
    assert {name: given.origin() for name, given in found.given.items()} == {
        "threads": "flag --threads",
        "span": "environment KVBLEND_SPAN",
        "blend_min_tokens": "environment LMCACHE_BLEND_MIN_TOKENS",
        "sinks": f"file {config}, line 3",
        "separator": f"file {lmcache}, line 2",
    }


def test_our_names_come_before_those_of_lmcache(tmp_path: Path) -> None:
    environ = {"KVBLEND_SEPARATOR": "a", "LMCACHE_BLEND_SPECIAL_STR": "b"}
    assert resolve({}, environ=environ).settings.separator == "a"


def test_the_environment_may_name_the_files(tmp_path: Path) -> None:
    environ = {
        "KVBLEND_CONFIG": str(write(tmp_path, "kv.yaml", "threads: 5\n")),
        "LMCACHE_CONFIG_FILE": str(write(tmp_path, "lm.yaml", "max_local_cpu_size: 1.0\nchunk_size: 256\n")),
    }
    found = resolve({}, environ=environ)
    assert (found.settings.threads, found.settings.host_bytes_budget) == (5, 1 << 30)
    assert found.notes == (
        f"{tmp_path / 'lm.yaml'}, line 2: chunk_size is set aside: a chunk is a document, of any length",
    )


def test_a_file_sets_the_server_and_its_limits_too(tmp_path: Path) -> None:
    found = resolve(
        {}, write(tmp_path, "a.toml", "port = 1\nallow_origin = ['https://a']\nlanes_max = 2\n"), environ={}
    )
    assert (found.server.port, found.server.allow_origin, found.limits.lanes_max) == (1, ("https://a",), 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "threads = 1\nrecompute_ration = 1",
            "line 2: recompute_ration is not a known setting; did you mean recompute_ratio?",
        ),
        ("threads = 'many'", "line 1: threads must be a whole number; it is 'many'"),
        ("\nthreads = 5000", "line 2: threads is 5000; it must lie in 0..1024"),
        ("span = 0", "line 1: span is 0; it must be a whole number in 1..4096"),
        ("[server]\nport = 1", "line 1: server is not a known setting"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, "kv.toml", text)
    with pytest.raises(BadInput) as caught:
        resolve({}, file, environ={})
    assert caught.value.message == f"{file}, {said}" or caught.value.message.startswith(f"{file}, {said}")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KVBLEND_PROT": "1"}, "KVBLEND_PROT is not a known setting; did you mean KVBLEND_PORT?"),
        ({"KVBLEND_THREADS": "x"}, "KVBLEND_THREADS must be a whole number; it is 'x'"),
        ({"KVBLEND_RECOMPUTE_RATIO": "2"}, "KVBLEND_RECOMPUTE_RATIO is 2.0; it must lie in 0..1"),
        ({"KVBLEND_DEVICE_POOL_BYTES": "9"}, "KVBLEND_DEVICE_POOL_BYTES is 9; on device 'cpu' it must be 0"),
        ({"LMCACHE_ENABLE_P2P": "true"}, "LMCACHE_ENABLE_P2P is true: servers share chunks"),
        ({"LMCACHE_BLEND_MIN_TOKENS": "-1"}, "LMCACHE_BLEND_MIN_TOKENS is -1; it must lie in 0.."),
    ],
)
def test_what_is_wrong_in_the_environment_is_named_by_its_variable(environ: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        resolve({}, environ=environ)
    assert caught.value.message.startswith(said)


def test_a_flag_out_of_range_is_named_as_it_was_typed() -> None:
    with pytest.raises(BadInput, match=r"^--recompute-ratio is 2\.0; it must lie in 0\.\.1"):
        resolve(flag("recompute_ratio", "2"), environ={})


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(BadInput) as caught:
        resolve(flag("threads", "x"), environ={"KVBLEND_A": "", "KVBLEND_B": ""})
    assert [line.split()[0] for line in caught.value.message.splitlines()] == ["--threads", "KVBLEND_A", "KVBLEND_B"]


def test_variables_of_lmcaches_own_process_do_not_matter() -> None:
    environ = {"LMCACHE_LOG_LEVEL": "DEBUG", "LMCACHE_USE_EXPERIMENTAL": "True", "LMCACHE_TRACK_USAGE": "false"}
    assert dict(resolve({}, environ=environ).given) == {}


def test_warm_may_name_a_file_of_the_corpus(tmp_path: Path) -> None:
    corpus = write(tmp_path, "c.txt", "one mill.\n\ntwo mills.")
    settings = resolve({}, environ={"KVBLEND_CONDITIONING": f"warm:{corpus}"}).settings
    assert (settings.conditioning, settings.warm_text) == ("warm", "one mill.\n\ntwo mills.")


def test_a_stronger_conditioning_sets_a_weaker_warm_text_aside(tmp_path: Path) -> None:
    corpus = write(tmp_path, "c.txt", "one mill.")
    settings = resolve(flag("conditioning", "warm"), environ={"KVBLEND_CONDITIONING": f"warm:{corpus}"}).settings
    assert (settings.conditioning, settings.warm_text) == ("warm", "")


def test_a_warm_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        resolve(flag("conditioning", f"warm:{tmp_path / 'none'}"), environ={})


def test_a_file_is_checked_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_NONSENSE", "1")
    assert list(check_file(write(tmp_path, "a.toml", "threads = 1")).given) == ["threads"]
    typical = "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 5.0\nenable_blending: true\nuse_layerwise: true\n"
    assert check_file(write(tmp_path, "l.yaml", typical), lmcache=True).settings.host_bytes_budget == 5 << 30


def test_the_key_of_a_client_is_no_setting() -> None:
    assert resolve({}, environ={API_KEY: "kvb_x"}).given == {}
