"""The server's log: a line for each event, as text or JSON, on stderr.

Whoever has something to log leaves a record in a queue; lines are made and written on a thread of
the log's own. So neither the event loop nor the engine's thread waits for whoever reads the log.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from datetime import UTC, datetime
from typing import Any

from conflux_jax.config import ServerConfig
from conflux_jax.text import TextCodec

ROOT_NAME = "conflux_jax"
STDERR = 2
MAX_QUEUED = 10_000  # records; whoever does not read its log loses lines, not the service
CLOSE_GRACE_S = 2.0
MAX_PROMPT_CHARS = 10_000


class Prompt:
    """A prompt that becomes text only where a line is made of it."""

    def __init__(self, codec: TextCodec, token_ids: Any):
        self._codec, self._token_ids = codec, token_ids

    def __str__(self) -> str:
        # No token spells fewer than no characters, but few spell more than some dozens.
        text = self._codec.decode(self._token_ids[:MAX_PROMPT_CHARS], skip_special_tokens=False)
        return text if len(text) <= MAX_PROMPT_CHARS else text[:MAX_PROMPT_CHARS] + "..."


class TextFormatter(logging.Formatter):
    """`TIME LEVEL MESSAGE key=value ...`; values with spaces or quotes as JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


class ServerLog(logging.Handler):
    """A context manager: within it, what this project logs (from INFO on) and what the libraries
    do (from WARNING on) goes to the file descriptor `output`. The end waits CLOSE_GRACE_S for
    what is left."""

    def __init__(self, config: ServerConfig, output: int = STDERR):
        super().__init__()
        self.setFormatter(FORMATTERS[config.log_format]())
        self._output = output
        # Its put is reentrant: a stream that the collector drops, anywhere, may log.
        self._queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write_all, name="conflux-log", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(record)
        else:
            self._num_lost += 1

    def __enter__(self) -> ServerLog:
        self._thread.start()
        logger = logging.getLogger(ROOT_NAME)
        self._level_before = logger.level
        logger.setLevel(logging.INFO)
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger(ROOT_NAME).setLevel(self._level_before)
        self.finish()

    def finish(self) -> bool:
        """Write what is there, if somebody reads it; whether all of it is written."""
        self._queue.put(None)
        self._thread.join(CLOSE_GRACE_S)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        while (record := self._queue.get()) is not None:
            self._write(record)
            if lost := self._take_lost():
                message = f"{lost} lines were lost: the log was not read in time"
                warning = {"name": __name__, "msg": message, "levelname": "WARNING"}
                self._write(logging.makeLogRecord(warning))

    def _take_lost(self) -> int:
        self.acquire()  # as emit is called
        lost, self._num_lost = self._num_lost, 0
        self.release()
        return lost

    def _write(self, record: logging.LogRecord) -> None:
        try:
            data = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            while data:  # not through sys.stderr, whose lock the end of the process would wait for
                data = data[os.write(self._output, data) :]
        except Exception:
            self._num_lost += 1  # nobody is left to be told


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What `extra={"fields": {...}}` was logged with."""
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: Any) -> str:
    text = str(value)
    simple = text.isprintable() and text and not any(mark in text for mark in ' "=')
    return text if simple else json.dumps(text)
