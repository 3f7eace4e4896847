"""`LLM` over a scripted engine; with a real model it is tested in test_llm_model.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from conflux_jax import LLM, SamplingParams
from conflux_jax.config import ConfigError
from conflux_jax.engine import EngineFailed
from conflux_jax.inbox import Unavailable
from conflux_jax.platform import ensure_devices
from conflux_jax.request import FinishReason, InvalidRequest, OutOfRange
from tests.fakes import EOS, Fake, make_fake, spell


@pytest.fixture
def fake() -> Iterator[Fake]:
    with make_fake(max_waiting=3, max_num_seqs=2) as fake:
        yield fake


def test_outputs_come_in_the_order_of_the_prompts_whatever_the_queue_holds(fake: Fake):
    llm = LLM.over(fake.engine)
    prompts = [f"{index}-" for index in range(20)]  # many more than the queue takes
    params = [SamplingParams(max_tokens=3 + 7 * (index % 3)) for index in range(20)]
    outputs = llm.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.text == (prompt * 20)[: own.max_tokens]
        assert output.prompt_token_ids == tuple(prompt.encode())
        assert output.token_ids == tuple(output.text.encode())
        assert output.finish_reason is FinishReason.LENGTH
        assert output.finish_reason == "length"
        assert len(output.token_times_s) == own.max_tokens
        assert 0 < output.ttft_s == output.token_times_s[0] <= output.token_times_s[-1]
        assert output.logprobs is None
    assert fake.is_free


def test_prompts_may_be_text_or_ids_one_or_many(fake: Fake):
    llm = LLM.over(fake.engine)
    params = SamplingParams(max_tokens=4)
    for prompts in ("ab", [97, 98], ["ab"], [[97, 98]], ((97, 98),)):
        assert [output.text for output in llm.generate(prompts, params)] == ["abab"]
    assert [o.text for o in llm.generate(["ab", [99]], params)] == ["abab", "cccc"]
    assert llm.generate([]) == []
    assert len(llm.generate("ab")[0].token_ids) == 16  # the default


def test_chat_takes_one_conversation_or_many():
    with make_fake(spell("hi!")) as fake:
        llm = LLM.over(fake.engine)
        conversation = [{"role": "user", "content": "hello"}]
        (output,) = llm.chat(conversation, SamplingParams(max_tokens=9))
        assert (output.text, output.finish_reason) == ("hi!", FinishReason.STOP)
        assert output.token_ids == (*b"hi!", EOS)
        assert len(llm.chat([conversation, conversation])) == 2
        with pytest.raises(InvalidRequest, match="messages"):
            llm.chat([])


def test_logprobs_are_there_when_asked_for(fake: Fake):
    params = SamplingParams(max_tokens=3, logprobs=1)
    (output,) = LLM.over(fake.engine).generate("ab", params)
    assert output.logprobs is not None
    assert len(output.logprobs) == 3


@pytest.mark.parametrize(
    ("bad", "error"), [("", InvalidRequest), ([5000], InvalidRequest), ("x" * 2000, OutOfRange)]
)
def test_a_bad_prompt_in_a_batch_is_raised_before_any_runs(fake: Fake, bad, error):
    llm = LLM.over(fake.engine)
    with pytest.raises(error, match="prompt"):
        llm.generate(["fine", bad, "fine too"])
    assert fake.is_free
    assert not fake.executor.plans
    assert llm.generate("fine")[0].text


def test_params_of_another_length_than_the_prompts_are_refused(fake: Fake):
    with pytest.raises(ValueError, match="3 prompts but 2 sampling params"):
        LLM.over(fake.engine).generate(["a", "b", "c"], [SamplingParams()] * 2)


def test_a_failed_engine_raises_and_a_closed_one_refuses(fake: Fake):
    llm = LLM.over(fake.engine)
    fake.executor.fail_with = RuntimeError("lost the device")
    with pytest.raises(EngineFailed, match="lost the device"):
        llm.generate(["a", "b"])
    with pytest.raises(Unavailable, match="lost the device"):
        llm.generate("a")
    with llm:
        pass
    assert fake.executor.closed


def test_settings_that_cannot_work_are_named():
    with pytest.raises(ConfigError, match="no_such_setting"):
        LLM(no_such_setting=1)
    with pytest.raises(ConfigError, match="sp: must be at least 1"):
        LLM(sp=0)


def test_too_few_devices_are_an_error_that_names_the_rule():
    ensure_devices(len(jax.devices()))
    with pytest.raises(ConfigError, match=r"sp \* tp = 99 .* JAX_NUM_CPU_DEVICES=99"):
        ensure_devices(99)


def test_jax_is_imported_late_and_asked_for_devices():
    code = (
        "import sys, conflux_jax, conflux_jax.client, conflux_jax.serve.__main__\n"
        "assert conflux_jax.SamplingParams(temperature=0.0) and 'jax' not in sys.modules\n"
        "from conflux_jax.platform import ensure_devices\n"
        "ensure_devices(11)\n"
        "import jax; print(len(jax.devices()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")},
    )
    assert done.stdout == "11\n"
