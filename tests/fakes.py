"""An executor and a tokenizer without a model: the engine under test, its tokens from a script."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from conflux_jax.config import SchedulerConfig
from conflux_jax.engine import Engine
from conflux_jax.model_info import ModelInfo
from conflux_jax.plan import IterationPlan, PoolGeometry, PrefillChunk, StepOutput
from conflux_jax.request import Logprobs, PromptLogprobs, Request, SamplingParams
from conflux_jax.scheduler.buckets import Ladders
from conflux_jax.scheduler.latency_model import LatencyPredictor
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.streams import OutputDelta, OutputStream
from conflux_jax.text import TextCodec
from conflux_jax.tokenizer_files import Spelling, TokenizerParts
from tests.tiny import CHAT_TEMPLATE, TOKENIZER_SIZE, write_byte_tokenizer
from tests.tiny import EOS_TOKEN_ID as EOS

VOCAB_SIZE = 300

LONG = SamplingParams(max_tokens=300, ignore_eos=True)

Script = Callable[[Request, int], int]


def echo(request: Request, index: int) -> int:
    """Says the prompt again and again."""
    return request.prompt_token_ids[index % len(request.prompt_token_ids)]


def spell(text: str) -> Script:
    """Says `text`, one byte a token, and then EOS for ever."""
    data = text.encode()
    return lambda request, index: data[index] if index < len(data) else EOS


@functools.cache
def byte_codec() -> TextCodec:
    """Token ids 0 to 255 are bytes, then come special tokens, EOS among them; ChatML."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder)
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return TextCodec(
        TokenizerParts(
            tokenizer=tokenizer,
            spelling=Spelling(byte_level=True),
            vocab_size=TOKENIZER_SIZE,
            eos_token_ids=(EOS,),
            chat_template=CHAT_TEMPLATE,
        )
    )


class FakeExecutor:
    """Runs plans by a script. Tests can make it slow, stop it at a plan, or break it.

    plans: all that were launched. `pause_at(condition)`: `launch` blocks in the next plan that
    satisfies it, until `resume()`; `wait_paused` waits for that. `fail_with`: all that `collect`
    does from now on. `fail_at(condition)`: the next plan that satisfies it fails. reset: what an
    engine calls after that, for an executor that can go on.
    """

    def __init__(self, script: Script = echo, step_s: float = 0.0):
        self.script = script
        self.step_s = step_s
        self.plans: list[IterationPlan] = []
        self.fail_with: Exception | None = None
        self.reset: Callable[[], None] | None = None
        self.is_compiling = False
        self.closed = False
        self._failing: tuple[Callable[[IterationPlan], bool], bool] | None = None
        self._slots: dict[int, Request] = {}
        self._condition: Callable[[IterationPlan], bool] | None = None
        self._paused = threading.Event()
        self._resumed = threading.Event()

    def launch(self, plan: IterationPlan) -> tuple[IterationPlan, StepOutput]:
        self.plans.append(plan)
        self._fail_here(plan, in_launch=True)
        for admission in plan.admissions:
            self._slots[admission.slot] = admission.request
        if self._condition is not None and self._condition(plan):
            self._condition = None
            self._paused.set()
            assert self._resumed.wait(30)
        return plan, self._run(plan)

    def collect(self, ticket: tuple[IterationPlan, StepOutput]) -> StepOutput:
        if self.step_s:
            time.sleep(self.step_s)
        self._fail_here(ticket[0], in_launch=False)
        if self.fail_with is not None:
            raise self.fail_with
        return ticket[1]

    def close(self) -> None:
        self.closed = True

    def fail_at(self, condition: Callable[[IterationPlan], bool], in_launch: bool = False) -> None:
        self._failing = condition, in_launch

    def _fail_here(self, plan: IterationPlan, in_launch: bool) -> None:
        if self._failing is None or in_launch != self._failing[1] or not self._failing[0](plan):
            return
        self._failing = None
        raise MemoryError(f"no room for plan {plan.iteration}")

    def pause_at(self, condition: Callable[[IterationPlan], bool]) -> None:
        self._paused.clear()
        self._resumed.clear()
        self._condition = condition

    def wait_paused(self, timeout_s: float = 10.0) -> None:
        assert self._paused.wait(timeout_s), "no plan satisfied the condition"

    def resume(self) -> None:
        self._resumed.set()

    def num_plans_with(self, request_id: str) -> int:
        return sum(
            request_id in plan.samples or any(c.request_id == request_id for c in plan.chunks)
            for plan in self.plans
        )

    def _run(self, plan: IterationPlan) -> StepOutput:
        ends = [(row.slot, row.position + 1) for group in plan.decodes for row in group]
        ends += [(c.slot, c.start + c.length) for c in plan.chunks if c.is_last]
        token_ids, logprobs, prompts = [], {}, {}
        for chunk in plan.chunks:
            if self._slots[chunk.slot].params.prompt_logprobs is not None:
                prompts[chunk.request_id] = self._scores(chunk)
        for slot, length in ends:
            request = self._slots[slot]
            index = length - len(request.prompt_token_ids)
            token_ids.append(self.script(request, index))
            if request.params.logprobs is not None:
                top = tuple((i, -1.0 - i) for i in range(request.params.logprobs))
                logprobs[request.request_id] = Logprobs(-0.5 - index, top)
        return StepOutput(np.array(token_ids, np.int32), self.step_s, logprobs, prompts)

    def _scores(self, chunk: PrefillChunk) -> PromptLogprobs:
        """A token at place i has log-probability -i/4 and rank i; the likeliest are 0, 1, ..."""
        request = self._slots[chunk.slot]
        first, top = chunk.start + 1, request.params.prompt_logprobs or 0
        end = min(first + chunk.length, len(request.prompt_token_ids))
        places, ids = np.arange(first, end), np.arange(top)
        values = np.tile(-1.0 - ids, (len(places), 1))
        return PromptLogprobs(first, -places / 4, places, np.tile(ids, (len(places), 1)), values)


@dataclass(frozen=True)
class Fake:
    """An engine and what is under it. A context manager that closes the engine."""

    engine: Engine
    scheduler: Scheduler
    executor: FakeExecutor

    @property
    def is_free(self) -> bool:
        """Whether no request holds anything, as of the next turn."""
        load = self.engine.load().result(10)
        idle = (load.num_waiting, load.num_prefilling, sum(load.num_decodes)) == (0, 0, 0)
        return idle and set(load.free_pages) == {self.engine.info.num_pages}

    def wait_free(self, timeout_s: float = 5.0) -> None:
        wait_until(lambda: self.is_free, timeout_s)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.resume()
        self.engine.close()


def make_fake(
    script: Script = echo,
    *,
    step_s: float = 0.0,
    groups: int = 1,
    pool_tokens: int = 4096,
    max_model_len: int = 1024,
    engine: Mapping[str, Any] | None = None,
    predictor: LatencyPredictor | None = None,
    **config: Any,
) -> Fake:
    """`config`: fields of SchedulerConfig; `engine`: keywords of Engine."""
    page_tokens = 16
    settings = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, **config})
    geometry = PoolGeometry(groups, pool_tokens // page_tokens, page_tokens, page_tokens * groups)
    ladders = Ladders.make(
        max_decodes=settings.max_num_seqs,
        level=-(-settings.max_num_batched_tokens // groups),
        growth=2.0,
        handoff=geometry.needs_handoff,
    )
    scheduler = Scheduler(settings, geometry, ladders, max_model_len, predictor)
    executor = FakeExecutor(script, step_s)
    info = ModelInfo(
        name="fake",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        sp=groups,
        page_tokens=page_tokens,
        num_pages=geometry.num_pages,
        max_num_seqs=settings.max_num_seqs,
    )
    built = Engine(scheduler, executor, byte_codec(), info, **(engine or {}))
    return Fake(built, scheduler, executor)


class HeldCodec:
    """A tokenizer that encodes nothing until it may."""

    def __init__(self, codec: Any):
        self._codec, self.may = codec, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, *arguments: Any) -> list[int]:
        assert self.may.wait(30)
        return self._codec.encode(*arguments)


def open_stream(
    fake: Fake, prompt="abc", params: SamplingParams = LONG, request_id: str | None = None
) -> OutputStream:
    return fake.engine.submit_many([fake.engine.prepare(prompt, params, request_id)])[0]


def run(fake: Fake, prompt="abc", **params) -> OutputDelta:
    return open_stream(fake, prompt, SamplingParams(**params)).read_all()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
