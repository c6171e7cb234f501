"""What can go wrong, and which HTTP status each one is.

An error's text is one sentence that says what to change; it is shown to the person as it is.
"""


class DetourError(Exception):
    """Base of every error that is answered with a sentence instead of a traceback."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field at fault, "" where none is
        self.code = code  # OpenAI's machine-readable code, "" where none applies


class BadRequest(DetourError):
    """The request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(DetourError):
    status = 401
    type = "authentication_error"


class NotFound(DetourError):
    status = 404
    type = "not_found_error"


class TooLarge(DetourError):
    status = 413
    type = "invalid_request_error"


class Unavailable(DetourError):
    """The server cannot take or go on with the request now: full queue, draining, no engine."""

    status = 503
    type = "service_unavailable"


class DeadlineExceeded(DetourError):
    status = 408
    type = "timeout_error"


class ConfigError(DetourError):
    """A flag or combination of flags that cannot be served; ends the program at start-up."""


class CheckpointError(DetourError):
    """A model file or configuration that cannot be read or is not supported; ends the program at start-up."""
