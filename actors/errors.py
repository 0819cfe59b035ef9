"""The one error table: what a caller can be told, and the HTTP-like status that goes with it.

A leaf module: `actors.messages`, `actors.system` and `api` share it; it imports nothing of ours.
"""

from __future__ import annotations

STATUS_BY_CODE: dict[str, int] = {
    "invalid_request": 400,
    "previous_response_not_found": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "resume_window_exceeded": 410,
    "too_large": 413,
    "unsupported_media_type": 415,
    "rate_limited": 429,
    "internal": 500,
    "overloaded": 503,
    "deadline_exceeded": 504,
}


class RequestError(Exception):
    """A request refused before work starts, or failed afterwards, with what a client may be shown.

    `code` is a key of `STATUS_BY_CODE`; `param` is the path of the offending field (`documents[2].text`), if any.
    """

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        if code not in STATUS_BY_CODE:
            raise ValueError(f"unknown error code {code!r}; known: {', '.join(STATUS_BY_CODE)}")
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status of this error."""
        return STATUS_BY_CODE[self.code]
