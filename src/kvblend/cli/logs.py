"""The log of a server, on stderr: lines for people, or one JSON object each."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from structlog.typing import Processor

    from kvblend.cli.config.server_options import LogFormat, LogLevel


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        self.stream = sys.stderr
        super().emit(record)


def _drop_copies(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Leaves out the forms of the message that other handlers keep in a record."""
    for name in ("message", "color_message", "asctime"):
        event.pop(name, None)
    return event


def set_up_logs(form: LogFormat, level: LogLevel) -> None:
    """Make every logger of this process write here. Of other libraries only warnings and worse are shown."""
    import structlog

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _drop_copies,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # tracebacks as plain text: the values of locals would show prompts
    last: list[Processor]
    if form == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    else:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, sort_keys=False, exception_formatter=plain)]
    handler = StderrHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, StderrHandler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("kvblend").setLevel(level.upper())
