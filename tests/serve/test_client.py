"""The command-line client over a scripted engine: every call that it can make."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from conflux_jax import client
from tests.fakes import Fake, make_fake
from tests.scheduler.predictors import Linear
from tests.serve.harness import Client, serving
from tests.serve.test_grpc import LONG, eventually, start


@dataclass(frozen=True)
class Shell:
    """Runs the client's command against a server."""

    server: Client
    capsys: pytest.CaptureFixture[str]

    async def run(self, *flags: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        target = f"127.0.0.1:{self.server.port}"
        code = await asyncio.to_thread(client.main, ["--target", target, *flags])
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    async def values(self, *flags: str) -> Any:
        code, out, error = await self.run(*flags)
        assert (code, error) == (0, "")
        return json.loads(out)


@contextlib.asynccontextmanager
async def shell(fake: Fake, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Shell]:
    async with serving(fake) as server:
        yield Shell(server, capsys)


async def test_calls_besides_generating_print_their_answers(capsys):
    with make_fake(predictor=Linear(base_s=0.01), groups=2) as fake:
        async with shell(fake, capsys) as run:
            info = await run.values("--info")
            assert (info["model"], info["max_model_len"]) == ("fake", 1024)
            load = await run.values("--load")
            assert (load["num_waiting"], load["queued_s"]) == (0, 0.0)
            assert [group["kv_usage"] for group in load["groups"]] == [0.0, 0.0]
            estimate = await run.values("--estimate", "--prompt", "abc")
            assert (estimate["prompt_tokens"], estimate["ttft_s"]) == (3, pytest.approx(0.01))
            assert estimate["basis"] == "ESTIMATE_BASIS_PROFILE"
            ids = (await run.values("--tokenize", "--prompt", "ab"))["token_ids"]
            assert ids == [97, 98]
            chat = (await run.values("--tokenize", "--chat", "--prompt", "ab"))["token_ids"]
            assert len(chat) > len(ids)
            assert (await run.values("--detokenize", "97", "98"))["text"] == "ab"
            assert not (await run.values("--abort", "nobody"))["found"]
            assert not fake.executor.plans


async def test_a_request_can_be_aborted_from_elsewhere(capsys):
    with make_fake(step_s=0.005) as fake:
        async with shell(fake, capsys) as run:
            await start(run.server, 1, request_id="mine", **LONG)
            assert (await run.values("--abort", "mine"))["found"]
            await eventually(lambda: run.server.is_free(fake))


async def test_several_answers_are_printed_under_their_numbers(capsys):
    with make_fake() as fake:
        async with shell(fake, capsys) as run:
            flags = ("--prompt", "ab", "--n", "2", "--max-tokens", "4", "--stats")
            code, out, error = await run.run(*flags)
            assert (code, out) == (0, "[0] abab\n[1] abab\n")
            assert error == "2 prompt tokens, 8 tokens\n"


async def test_refusals_are_one_line_and_say_when_to_come_again(capsys):
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_waiting": 1, "step_s": 0.01}
    with make_fake(predictor=Linear(base_s=0.02), **settings) as fake:
        async with shell(fake, capsys) as run:
            await start(run.server, 2, max_tokens=900)
            code, out, error = await run.run("--prompt", "ab")
            assert (code, out) == (1, "")
            assert error.startswith("error: RESOURCE_EXHAUSTED: max_waiting: 1 requests are queued")
            assert error.rstrip().endswith(" s") and "; try again in " in error
    with make_fake(predictor=Linear(base_s=20.0)) as fake:
        async with shell(fake, capsys) as run:
            code, _, error = await run.run("--prompt", "ab", "--timeout", "10")
            assert code == 1 and error.startswith("error: DEADLINE_EXCEEDED: deadline: ")


@pytest.mark.parametrize("flags", [[], ["--estimate"], ["--tokenize"], ["--load", "--info"]])
def test_flags_that_do_not_go_together_are_refused(flags: list[str], capsys):
    with pytest.raises(SystemExit) as caught:
        client.main(flags)
    assert caught.value.code == 2
    words = "not allowed with" if len(flags) == 2 else "--prompt is required"
    assert words in capsys.readouterr().err
