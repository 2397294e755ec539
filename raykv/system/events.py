"""Events of a pool's actors: one logfmt line each, in the log file that Ray keeps for a worker.

No event is about a single request or contains a secret. Only raykv's own processes call `begin`. So the logging of
other processes does not change.
"""

import json
import logging
import re
import time

log = logging.getLogger("raykv")
PLAIN = re.compile(r'[^\s"=]+')  # a value that needs no quotes


class Logfmt(logging.Formatter):
    """Formats events and other log records as lines of `name=value`. The message of other records becomes `msg`."""

    def __init__(self, **who: object) -> None:
        """who: names and values to include in every line."""
        super().__init__()
        self._who = who

    def formatMessage(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{stamp}.{int(record.msecs):03}Z", "level": record.levelname.lower(), **self._who}
        message = record.getMessage()
        return f"{pairs(head)} {message if hasattr(record, 'event') else pairs({'msg': message})}"


def begin(restarted: bool, **who: object) -> None:
    """Write this process's log to its standard error, and log the actor's start.

    restarted: whether Ray restarted the actor. who: names and values to include in every line, such as role and pool.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(**who))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    tell("restart" if restarted else "start")


def tell(what: str, **fields: object) -> None:
    """Log an event at INFO. fields: must not be secret; sizes are in bytes."""
    log.info("%s", pairs({"event": what, **fields}), extra={"event": what})


def short(name: str) -> str:
    """Shorten a memory's name for log lines: the beginning of its Ray node id, and for a GPU also its UUID."""
    host, slash, gpu = name.partition("/")
    return f"{host[:8]}{slash}{gpu}"


def pairs(fields: dict[str, object]) -> str:
    """Format fields as logfmt: `name=value`. A value is quoted if it is empty or has blanks, quotes or `=`."""
    return " ".join(f"{name}={_value(str(value))}" for name, value in fields.items())


def _value(text: str) -> str:
    return text if PLAIN.fullmatch(text) else json.dumps(text)
