"""What the client raises. Nothing is retried behind the caller's back."""

from __future__ import annotations


class KvblendError(Exception):
    """Anything that went wrong between this client and its server."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestRefused(KvblendError):
    """The server did not take the request: nothing ran. `param` is the path of the field at fault, if any."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class ServerBusy(RequestRefused):
    """Refused for now (429 or 503): the same request may be taken later, after `retry_after_s` where it is given."""


class GenerationFailed(KvblendError):
    """The server took the request and could not complete it. `text` is what had come of the answer."""

    def __init__(self, code: str, message: str, param: str | None, text: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.text = text


class ConnectionLost(KvblendError):
    """There is no connection, or it ended under a request, which may or may not have run; it is never repeated.

    `close_code` is the WebSocket close code, if one came.
    """

    def __init__(self, message: str, close_code: int | None = None) -> None:
        super().__init__(message)
        self.close_code = close_code


class ResponseTimeout(KvblendError, TimeoutError):
    """The server said nothing for `timeout_s` seconds; the request was cancelled."""


def refused(
    status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> RequestRefused:
    """The exception for an error of this status."""
    kind = ServerBusy if status in (429, 503) else RequestRefused
    return kind(status, code, message, param, retry_after_s)
