"""The server's log: its lines, what they say of requests, and that nobody waits for its reader."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from conflux_jax.config import ServerConfig
from conflux_jax.serve import logs
from conflux_jax.serve.logs import ServerLog
from conflux_jax.serve.request_log import RequestLog
from conflux_jax.serve.trace_context import Trace, parse_traceparent
from tests.fakes import make_fake, wait_until
from tests.serve.harness import generate_request, serving
from tests.serve.http_harness import COMPLETIONS, eventually, http_serving

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
LONG = {"max_tokens": 300, "ignore_eos": True}


class Written:
    """What a log wrote; `lines` may be asked for once it is over."""

    def __init__(self) -> None:
        self._reader, self.output = os.pipe()
        self.lines: list[str] = []

    def close(self) -> None:
        os.close(self.output)

    def read(self) -> None:
        """To the end."""
        with open(self._reader, encoding="utf-8") as file:
            self.lines = file.read().splitlines()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The lines of requests, of a log in JSON."""
        lines = map(json.loads, self.lines)
        return [line for line in lines if line["message"] == "request finished"]


@contextlib.contextmanager
def written(**config: Any) -> Iterator[Written]:
    log = Written()
    try:
        with ServerLog(ServerConfig(**{"log_format": "json", **config}), log.output):
            yield log
    finally:
        log.close()
        log.read()


# Requests


async def test_a_request_over_grpc_is_a_line_with_its_trace_and_numbers():
    with make_fake(step_s=0.005) as fake, written() as log:
        RequestLog(ServerConfig(), fake.engine)
        async with serving(fake) as client:
            request = generate_request("secret", max_tokens=4, request_id="mine")
            call = client.stub.Generate(request, metadata=[("traceparent", TRACEPARENT)])
            assert len([message async for message in call]) > 0
    (line,) = log.requests
    assert line["level"] == "info"
    assert (line["request_id"], line["finish_reason"]) == ("mine", "length")
    assert (line["prompt_tokens"], line["output_tokens"]) == (6, 4)
    assert (line["trace_id"], line["parent_span_id"]) == (TRACE_ID, SPAN_ID)
    assert 0.005 <= line["ttft_s"] < line["e2e_s"] < 10.0
    assert "secret" not in str(log.lines) and "error" not in line


async def test_each_choice_over_http_is_a_line_with_the_trace_of_its_call():
    with make_fake() as fake, written() as log:
        RequestLog(ServerConfig(), fake.engine)
        async with http_serving(fake) as client:
            headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
            body = {"prompt": "secret", "max_tokens": 4, "n": 2}
            assert (await client.plain.post(COMPLETIONS, json=body, headers=headers)).is_success
            await client.complete(prompt="ab", max_tokens=1)
    first, second, other = sorted(log.requests, key=lambda line: line["output_tokens"])[::-1]
    assert {first["request_id"], second["request_id"]} == {"cmpl-mine-0", "cmpl-mine-1"}
    assert first["trace_id"] == second["trace_id"] == TRACE_ID
    assert "trace_id" not in other and other["output_tokens"] == 1
    assert "secret" not in str(log.lines)


async def test_what_ends_early_is_a_line_with_its_reason():
    with make_fake(step_s=0.01) as fake, written() as log:
        RequestLog(ServerConfig(), fake.engine)
        async with serving(fake) as client:
            left = client.stub.Generate(generate_request("ab", request_id="left", **LONG))
            await anext(aiter(left))
            left.cancel()
            await eventually(lambda: fake.is_free)
            failed = client.stub.Generate(generate_request("ab", request_id="failed", **LONG))
            messages = aiter(failed)
            await anext(messages)
            fake.executor.fail_with = RuntimeError("out of memory")
            with pytest.raises(grpc.aio.AioRpcError):
                [message async for message in messages]
    lines = {line["request_id"]: line for line in log.requests}
    assert lines["left"]["finish_reason"] == "abort" and "error" not in lines["left"]
    assert lines["left"]["output_tokens"] >= 1
    assert lines["failed"]["finish_reason"] == "error"
    assert lines["failed"]["level"] == "error" and "out of memory" in lines["failed"]["error"]
    assert len(log.requests) == 2


async def test_prompts_are_written_only_when_asked_for():
    with make_fake() as fake, written() as log:
        RequestLog(ServerConfig(log_prompts=True), fake.engine)
        async with serving(fake) as client:
            await client.text("my secret", max_tokens=1)
            await client.text([98] * 900, max_tokens=1)
    assert [line["prompt"] for line in log.requests] == ["my secret", "b" * 900]


async def test_lines_are_not_made_on_the_engines_thread(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="conflux_jax")
    formats: list[str] = []

    class Spy(logs.JsonFormatter):
        def format(self, record: logging.LogRecord) -> str:
            formats.append(threading.current_thread().name)
            return super().format(record)

    log = Written()
    with make_fake() as fake, ServerLog(ServerConfig(), log.output) as server_log:
        server_log.setFormatter(Spy())
        RequestLog(ServerConfig(), fake.engine)
        async with serving(fake) as client:
            await client.text("ab", max_tokens=4, stop=["b"])
            await client.text("ab", max_tokens=4)
    log.close()
    log.read()
    records = [r for r in caplog.records if r.getMessage() == "request finished"]
    assert {record.threadName for record in records} == {threading.current_thread().name}
    assert len(formats) >= 2 and set(formats) == {"conflux-log"}


# Lines


def test_text_lines_have_a_time_a_level_and_fields():
    with written(log_format="text") as log:
        fields = {"request_id": 'a "b"\nc', "output_tokens": 3, "empty": ""}
        logging.getLogger("conflux_jax.x").info("done", extra={"fields": fields})
    (line,) = log.lines
    moment, rest = line.split(" ", 1)
    assert rest == r'info done request_id="a \"b\"\nc" output_tokens=3 empty=""'
    assert moment.endswith("Z") and moment.startswith("20")


def test_errors_of_libraries_come_with_their_traceback_and_their_chatter_does_not():
    with written() as log:
        logging.getLogger("uvicorn.error").info("chatter")
        logging.getLogger("conflux_jax").debug("chatter")
        try:
            raise RuntimeError("it broke")
        except RuntimeError:
            logging.getLogger("asyncio").exception("in a task")
    (line,) = map(json.loads, log.lines)
    assert (line["logger"], line["level"], line["message"]) == ("asyncio", "error", "in a task")
    assert line["exception"].splitlines()[-1] == "RuntimeError: it broke"


def test_a_log_that_nobody_reads_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "CLOSE_GRACE_S", 0.1)
    monkeypatch.setattr(logs, "MAX_QUEUED", 100)
    log = Written()
    started_s = time.monotonic()
    with ServerLog(ServerConfig(log_format="json"), log.output) as server_log:
        for _ in range(2000):  # more than a pipe holds
            logging.getLogger("conflux_jax").info("x" * 100)
    assert time.monotonic() - started_s < 5.0
    # Whoever reads again hears of the gap.
    reading = threading.Thread(target=log.read)
    reading.start()
    wait_until(server_log.finish)
    log.close()
    reading.join()
    messages = [json.loads(line)["message"] for line in log.lines]
    lost = [int(message.split()[0]) for message in messages if "lines were lost" in message]
    assert sum(lost) > 1000
    assert len(messages) - len(lost) + sum(lost) == 2000


# Traces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRACEPARENT, Trace(TRACE_ID, SPAN_ID)),
        (f" {TRACEPARENT} ", Trace(TRACE_ID, SPAN_ID)),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-later", Trace(TRACE_ID, SPAN_ID)),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{SPAN_ID}-01-more", None),
        (f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", None),
        (f"00-{'0' * 32}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"00-{TRACE_ID[1:]}-{SPAN_ID}-01", None),
        (f"00-{TRACE_ID}-{SPAN_ID}", None),
        ("", None),
        (None, None),
    ],
)
def test_a_traceparent_is_as_w3c_says_or_none(text: str | None, expected: Trace | None):
    assert parse_traceparent(text) == expected


async def test_a_call_without_a_trace_has_none_of_the_call_before():
    with make_fake() as fake, written() as log:
        RequestLog(ServerConfig(), fake.engine)
        async with serving(fake) as client, http_serving(fake) as http:
            for number, trace in enumerate([TRACEPARENT, None, "00-bad"]):
                metadata = [("traceparent", trace)] if trace else []
                request = generate_request("ab", max_tokens=1, request_id=f"grpc-{number}")
                call = client.stub.Generate(request, metadata=metadata)
                assert [message async for message in call]
                headers = {"x-request-id": f"http-{number}", **dict(metadata)}
                body = {"prompt": "ab", "max_tokens": 1}
                await http.plain.post(COMPLETIONS, json=body, headers=headers)
    traced = {line["request_id"] for line in log.requests if "trace_id" in line}
    assert traced == {"grpc-0", "cmpl-http-0"}
    assert len(log.requests) == 6
