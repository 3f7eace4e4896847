"""`LLM`: the engine for notebooks and scripts, without a server."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conflux_jax.build import Progress, build_engine
from conflux_jax.config import Config
from conflux_jax.engine import Engine, EngineFailed
from conflux_jax.intake import Chat, Prompt
from conflux_jax.progress import ProgressBar
from conflux_jax.request import (
    FinishReason,
    Logprobs,
    PromptLogprobs,
    QueueFull,
    Request,
    SamplingParams,
)
from conflux_jax.streams import OutputDelta, OutputStream
from conflux_jax.timeline import TimelineFile, check_path

Message = Mapping[str, Any]
SUBMIT_AT_ONCE = 256


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. Times are in seconds after `generate` was called, at which the token
    reached the host; `ttft_s` is the first of them. `logprobs` and `prompt_logprobs` are None where
    not asked for. `token_ids` ends with the EOS or stop token where one ended it; `text` has no
    text of it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    ttft_s: float
    token_times_s: tuple[float, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class LLM:
    """A model, loaded and compiled, that generates.

    `model` is a known name, a Hugging Face directory, a `.gguf` file or what
    `python -m conflux_jax.convert` made of one; `config` any field of the config tree
    (`page_tokens=32`, `max_num_batched_tokens=1024`). On a CPU, JAX is asked for `sp * tp` virtual
    devices. `progress(stage, done, total)` is told of loading and compiling, which takes minutes
    the first time; by default a bar on stderr. With `timeline="file.json"`, `close` leaves a Chrome
    trace of the last iterations. Raises ConfigError or ModelError.
    """

    _timeline: TimelineFile | None = None

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        sp: int = 1,
        tp: int = 1,
        dtype: str = "bfloat16",
        max_model_len: int | None = None,
        *,
        progress: Progress | None = None,
        **config: Any,
    ):
        settings = Config.from_flat(
            model=str(model), sp=sp, tp=tp, dtype=dtype, max_model_len=max_model_len, **config
        )
        timeline = settings.server.timeline
        if timeline is not None:
            check_path(timeline)
        self._engine = build_engine(settings, progress or ProgressBar())
        if timeline is not None:
            most = settings.server.timeline_iterations
            self._timeline = TimelineFile(timeline, most, self._engine)

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """Around an engine that exists already; it is closed with this object."""
        llm = cls.__new__(cls)
        llm._engine = engine
        return llm

    @property
    def engine(self) -> Engine:
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run one or many prompts (text or token ids) to their end, batched; outputs in order.

        `params`: for all, or one each. Raises InvalidRequest or OutOfRange for a bad prompt before
        any of them runs, ValueError for lists of different lengths, EngineFailed.
        """
        return self._run(_prompt_list(prompts), params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (messages with `role` and `content`) or many; as `generate`."""
        single = len(messages) == 0 or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        return self._run([Chat(conversation) for conversation in conversations], params)

    def close(self) -> None:
        """Stop the engine and free its devices' memory. Raises OSError for a timeline that cannot
        be written."""
        self._engine.close()
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.write()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        each = _params_list(params, len(prompts))
        arrival_s = self._engine.now_s
        requests = [
            self._engine.prepare(prompt, own, arrival_s=arrival_s)
            for prompt, own in zip(prompts, each, strict=True)
        ]
        waiting, streams = deque(requests), deque[OutputStream]()
        outputs: list[RequestOutput] = []
        try:
            while waiting or streams:
                self._submit(waiting, streams)
                outputs.append(_output(streams[0].request, streams[0].read_all()))
                streams.popleft()
        finally:
            for stream in streams:
                stream.close()
        return outputs

    def _submit(self, waiting: deque[Request], streams: deque[OutputStream]) -> None:
        """Move requests into the engine, as many as its queue takes: all but a few at once, the
        others as earlier ones finish."""
        while waiting:
            offered = list(itertools.islice(waiting, SUBMIT_AT_ONCE))
            try:
                taken = self._engine.submit_many(offered)
            except QueueFull:
                if not streams:
                    raise
                return
            streams.extend(taken)
            for _ in taken:
                waiting.popleft()
            if len(taken) < len(offered):
                return


def _output(request: Request, delta: OutputDelta) -> RequestOutput:
    if delta.finish_reason in (FinishReason.ERROR, None):
        raise EngineFailed(delta.message)
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids),
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        ttft_s=delta.times_s[0] if delta.times_s else float("nan"),
        token_times_s=delta.times_s,
        logprobs=None if request.params.logprobs is None else delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
    )


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and hasattr(prompts[0], "__index__"):
        return [prompts]
    return [p if isinstance(p, str | Sequence) else list(p) for p in prompts]


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts but {len(params)} sampling params; one each")
    return list(params)
