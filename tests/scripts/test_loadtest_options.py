"""Options of the load test: bad ones are refused by name, before anything is sent."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from loadtest.options import read_options

BAD = {
    "--request-rate 0": "0 is not above 0",
    "--request-rate 1,x": "'x' is not a number",
    "--request-rate 1,1": "names a rate twice",
    "--burstiness nan": "nan is not a number",
    "--num-prompts 0": "0 is below 1",
    "--max-concurrency 1.5": "'1.5' is not a whole number",
    "--cancel-rate 1.1": "1.1 is not a share from 0 to 1",
    "--zipf-alpha -1": "-1 is not a finite number from 0",
    "--metric-percentiles 50,101": "101 is not a percentile",
    "--percentile-metrics ttft,speed": "'speed' is not one of ttft, tpot, itl, e2el",
    "--goodput itl:5": "'itl' is not one of ttft, tpot, e2el",
    "--header Authorization": "is not KEY=VALUE",
    "--extra-body [1]": "is no JSON object",
    "--chunks-per-request 8-4": "4 is below 8",
    "--chunks-per-request 101": "101 is more than --chunk-pool, 100",
    "--chunks-per-request 0-4": "--chunks-per-request: 0 is below 1",
    "--cancel-rate 0.6 --slow-reader-rate 0.6": "together 1.2, more than 1",
    "--base-url ftp://host": "is not like http://host:port",
    "--base-url http://host:99999": "--base-url",
    "--endpoint v1": "--endpoint: 'v1' does not begin with /",
    "--transport ws": "ws is for --backend kvblend",
    "--backend kvblend --header a=b": "are for --transport sse",
    '--backend kvblend --extra-body {"user":1}': "'user' is not one of",
    "--backend kvblend --chunks-as parts": "parts are for --transport sse",
    "--backend openai --chunks-as parts": "parts are of chat messages",
    "--dataset-name custom": "needs one",
    "--dataset-path absent": "absent is no folder",
    "--save-result --result-dir absent": "absent is no folder",
    "--result-filename a/b.json": "is no plain file name",
    "--plot picture.svg": "does not end with .png",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_option_is_refused_by_name(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        read_options(line.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert BAD[line] in error
    assert line.split()[0] in error or line.split()[2] in error


def test_the_rate_has_no_limit_by_default() -> None:
    assert read_options([]).request_rate == (math.inf,)


def test_several_rates_are_read() -> None:
    assert read_options(["--request-rate", "0.5,1,inf"]).request_rate == (0.5, 1.0, math.inf)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("openai-chat", ("sse", "parts", "http://127.0.0.1:8000/v1/chat/completions")),
        ("vllm", ("sse", "text", "http://127.0.0.1:8000/v1/completions")),
        ("kvblend", ("ws", "documents", "http://127.0.0.1:8000/v1/responses")),
    ],
)
def test_a_backend_has_its_transport_its_boundaries_and_its_route(backend: str, expected: tuple[str, str, str]) -> None:
    options = read_options(["--backend", backend])
    assert (options.transport, options.chunks_as, options.url) == expected


def test_a_base_url_may_end_with_v1() -> None:
    assert read_options(["--base-url", "http://h:1/v1/"]).url == "http://h:1/v1/chat/completions"


def test_the_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert read_options([]).headers == {"Authorization": "Bearer secret"}


def test_a_header_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert read_options(["--header", "authorization=other"]).headers == {"authorization": "other"}
