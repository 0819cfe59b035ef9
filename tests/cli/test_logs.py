from __future__ import annotations

import json
import logging

import pytest

from kvblend.actors.messages import Finished, Usage
from kvblend.actors.request_log import log_end
from kvblend.cli.logs import set_up_logs


def test_json_is_one_object_a_line_with_the_figures_of_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info")
    log_end(Finished("resp_1", "stop", Usage(prompt_tokens=9, tokens_reused=5, ttft_ms=1.25)))
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert (fields["event"], fields["level"], fields["logger"]) == ("request finished", "info", "kvblend.requests")
    assert (fields["request_id"], fields["tokens_reused"], fields["outcome"]) == ("resp_1", 5, "stop")
    assert fields["timestamp"].endswith("Z")


def test_text_has_the_figures_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("text", "info")
    log_end(Finished("resp_1", "stop", Usage(tokens_reused=5)))
    (line,) = capsys.readouterr().err.splitlines()
    assert "request finished" in line
    assert "request_id=resp_1" in line
    assert "tokens_reused=5" in line


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_does_not_show_the_values_of_locals(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json" if form == "json" else "text", "info")
    try:
        prompt = "secret text"
        len(prompt) / 0
    except ZeroDivisionError:
        logging.getLogger("kvblend.x").exception("broke")
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "secret text'" not in err.replace('prompt = "secret text"', "")


def test_the_level_is_of_our_own_loggers_and_others_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("text", "warning")
    logging.getLogger("kvblend.x").info("ours")
    set_up_logs("text", "debug")
    logging.getLogger("kvblend.x").debug("mine")
    logging.getLogger("websockets.server").info("theirs")
    logging.getLogger("websockets.server").warning("trouble")
    err = capsys.readouterr().err
    assert [word in err for word in ("ours", "mine", "theirs", "trouble")] == [False, True, False, True]


def test_setting_up_again_does_not_write_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        set_up_logs("text", "info")
    logging.getLogger("kvblend.x").info("once")
    assert capsys.readouterr().err.count("once") == 1
