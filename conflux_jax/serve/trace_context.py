"""The trace that a call belongs to, as its client says in W3C's `traceparent`.

https://www.w3.org/TR/trace-context/ A header that is not as it says counts as none.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import NamedTuple

HEADER = "traceparent"
# Later versions may add fields after these; version 00 has none.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """trace_id: of the whole; span_id: of the client's part of it, both in hex."""

    trace_id: str
    span_id: str


# Set at the door of each server, where a call has a context of its own, and read where the call
# opens its streams: what lies between need not pass it on.
CURRENT_TRACE: ContextVar[Trace | None] = ContextVar("CURRENT_TRACE", default=None)


def parse_traceparent(text: str | None) -> Trace | None:
    match = _FORM.fullmatch(text.strip()) if text else None
    if match is None:
        return None
    version, trace_id, span_id, _, more = match.groups()
    wrong = version == "ff" or (version == "00" and more)
    missing = not int(trace_id, 16) or not int(span_id, 16)
    return None if wrong or missing else Trace(trace_id, span_id)
