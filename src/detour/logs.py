"""One format for every line that a process of the server writes, whatever it says."""

import asyncio
import logging
import sys

_FORMAT = "%(asctime)s %(levelname)-7s [{where}] %(name)s: %(message)s"

# Libraries that log each request at INFO; their lines repeat what ours say.
_CHATTY = ("uvicorn.access", "httpx", "httpcore", "asyncio")


def set_up(level: str, where: str) -> None:
    """Send this process's log lines to stderr. `where` names it: "front", "engine", "rank 3".

    `level` is a name of the logging module in any case ("info", "DEBUG"); raises ValueError for
    others.
    """
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(logging.Formatter(_FORMAT.format(where=where)))
    root = logging.getLogger()
    root.handlers[:] = [stream]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("uvicorn.error").addFilter(_tells_news)


def _tells_news(record: logging.LogRecord) -> bool:
    """A request that we cut short ourselves, on stopping, is no error to print a traceback of."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return not record.getMessage().rstrip().endswith("CancelledError")  # the app's own end
