"""What a pool's actors say of themselves: one line an event, in logfmt, in the log file that Ray keeps of a worker.

Never one a request, and never a secret. Only processes of raykv's own call `begin`: no other's logging is changed.
"""

import json
import logging
import re
import time

log = logging.getLogger("raykv")
PLAIN = re.compile(r'[^\s"=]+')  # a value that needs no quotes


class Logfmt(logging.Formatter):
    """A line of `name=value`, of an event and of any other record: its message is the value of `msg` then."""

    def __init__(self, **who: object) -> None:
        """who: what every line names."""
        super().__init__()
        self._who = who

    def formatMessage(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{stamp}.{int(record.msecs):03}Z", "level": record.levelname.lower(), **self._who}
        message = record.getMessage()
        return f"{pairs(head)} {message if hasattr(record, 'event') else pairs({'msg': message})}"


def begin(restarted: bool, **who: object) -> None:
    """Write what is logged in this process, an actor's, to its standard error, and tell that it started.

    restarted: by Ray, after the process before it had died. who: what every line names, as role and pool.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(**who))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    tell("restart" if restarted else "start")


def tell(what: str, **fields: object) -> None:
    """Log an event at INFO. fields: bytes are numbers; nothing secret."""
    log.info("%s", pairs({"event": what, **fields}), extra={"event": what})


def short(name: str) -> str:
    """How lines name a memory: the beginning of its Ray node id, and perhaps a GPU's UUID."""
    host, slash, gpu = name.partition("/")
    return f"{host[:8]}{slash}{gpu}"


def pairs(fields: dict[str, object]) -> str:
    """As logfmt: `name=value`, a value in double quotes where it is empty or has blanks, quotes or `=`."""
    return " ".join(f"{name}={_value(str(value))}" for name, value in fields.items())


def _value(text: str) -> str:
    return text if PLAIN.fullmatch(text) else json.dumps(text)
