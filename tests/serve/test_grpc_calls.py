"""The gRPC service over a scripted engine: choices, whole answers, what is predicted, deadlines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from tests.fakes import Fake, HeldCodec, make_fake
from tests.scheduler.predictors import Linear
from tests.serve.harness import Client, generate_request, serving
from tests.serve.test_grpc import LONG, ended, eventually, refusal, start

# 10 ms an iteration and 1 ms a token: a prompt of 50 takes 64 ms, in a bucket of 64 rows.
MODEL = Linear(base_s=0.01, per_row_s=1e-3)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def accepted(fake: Fake, count: int) -> None:
    """A client hears of a unary call only with its answer."""

    async def are_there() -> bool:
        return fake.engine.num_live == count

    await eventually(are_there)


# Choices


async def test_choices_stream_side_by_side_by_index():
    with make_fake() as fake:
        async with serving(fake) as client:
            messages = await client.generate("abc", n=3, max_tokens=5, request_id="mine")
            for index in range(3):
                own = [m for m in messages if m.index == index]
                assert "".join(m.text for m in own) == "abcab"
                assert [m.HasField("finish_reason") for m in own[:-1]] == [False] * (len(own) - 1)
                assert own[-1].finish_reason == pb.FINISH_REASON_LENGTH
                usage = own[-1].usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (3, 5)
            assert {m.request_id for m in messages} == {"mine"}
            assert await client.is_free(fake)


async def test_choices_have_seeds_of_their_own_and_the_first_is_the_prompts():
    with make_fake() as fake:
        async with serving(fake) as client:
            await client.complete("abc", n=3, max_tokens=1, seed=2**63 - 2)
            await client.complete("abc", max_tokens=1, seed=2**63 - 2)
            admissions = [a for plan in fake.executor.plans for a in plan.admissions]
            seeds = [admission.request.seed for admission in admissions]
            assert seeds == [2**63 - 2, 2**63 - 1, -(2**63), 2**63 - 2]


async def test_a_call_that_does_not_fit_whole_is_refused_whole():
    with make_fake(max_num_seqs=1, max_waiting=2, step_s=0.005) as fake:
        async with serving(fake) as client:
            error = await refusal(client, n=5, **LONG)
            assert error.code() is StatusCode.RESOURCE_EXHAUSTED
            await eventually(lambda: client.is_free(fake))
            assert len(await client.text(n=1, max_tokens=5)) == 5


@pytest.mark.parametrize("whole", [False, True])
async def test_abort_ends_all_choices_of_a_call(whole: bool):
    with make_fake(step_s=0.005) as fake:
        async with serving(fake) as client:
            request = generate_request(n=3, request_id="mine", **LONG)
            call = client.stub.Complete(request) if whole else client.stub.Generate(request)
            await accepted(fake, 3)
            assert (await client.stub.Abort(pb.AbortRequest(request_id="mine"))).found
            ends = (await call).choices if whole else [m async for m in call]
            reasons = [end.finish_reason for end in ends if end.finish_reason]
            assert reasons == [pb.FINISH_REASON_ABORT] * 3
            assert await client.is_free(fake)
            assert not (await client.stub.Abort(pb.AbortRequest(request_id="mine"))).found


async def test_abort_needs_an_id():
    with make_fake() as fake:
        async with serving(fake) as client:
            error = await failure(client.stub.Abort(pb.AbortRequest()))
            assert error.code() is StatusCode.INVALID_ARGUMENT
            assert (error.details() or "").startswith("request_id: ")


async def test_an_id_in_use_is_refused_and_its_call_goes_on():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            for n in (1, 2):
                fields: dict[str, Any] = {"request_id": f"same{n}", "n": n, "max_tokens": 40}
                (call,) = await start(client, 1, **fields)
                error = await refusal(client, **fields)
                assert error.code() is StatusCode.ALREADY_EXISTS
                assert (error.details() or "").startswith("request_id: ")
                messages = [message async for message in call]
                assert len([m for m in messages if m.HasField("usage")]) == n
            await eventually(lambda: client.is_free(fake))


# Whole answers


async def test_a_whole_answer_is_what_the_stream_adds_up_to():
    with make_fake() as fake:
        async with serving(fake) as client:
            answer = await client.complete("hello ", n=2, max_tokens=14, logprobs=1)
            streamed = await client.generate("hello ", max_tokens=14, logprobs=1)
            assert [choice.index for choice in answer.choices] == [0, 1]
            for choice in answer.choices:
                assert choice.text == "hello hello he"
                assert list(choice.token_ids) == [i for m in streamed for i in m.token_ids]
                assert list(choice.logprobs) == [e for m in streamed for e in m.logprobs]
                assert choice.finish_reason == pb.FINISH_REASON_LENGTH
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 28)
            assert answer.request_id.startswith("req-")


async def test_a_client_that_leaves_a_whole_answer_frees_it():
    with make_fake(step_s=0.005) as fake:
        async with serving(fake) as client:
            call = client.stub.Complete(generate_request(n=2, **LONG))
            await accepted(fake, 2)
            call.cancel()
            await eventually(lambda: client.is_free(fake), 1.0)


async def test_a_failing_engine_fails_a_whole_answer():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            call = client.stub.Complete(generate_request(**LONG))
            await accepted(fake, 1)
            fake.executor.fail_with = RuntimeError("out of memory")
            error = await failure(call)
            assert error.code() is StatusCode.INTERNAL
            assert "out of memory" in (error.details() or "")


# Tokens


async def test_tokens_of_text_and_chat_and_back():
    with make_fake() as fake:
        async with serving(fake) as client:
            answer = await client.stub.Tokenize(pb.TokenizeRequest(text="ď!"))
            assert list(answer.token_ids) == list("ď!".encode())
            assert answer.max_model_len == 1024
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
            ids = (await client.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
            last = (await client.generate(None, chat=chat, max_tokens=1))[-1]
            assert len(ids) == last.usage.prompt_tokens

            async def text_of(**fields: Any) -> str:
                request = pb.DetokenizeRequest(token_ids=ids, **fields)
                return (await client.stub.Detokenize(request)).text

            assert await text_of() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            assert await text_of(skip_special_tokens=True) == "user\nhi\nassistant\n"


async def test_tokens_past_any_context_can_be_counted():
    with make_fake(max_model_len=64) as fake:
        async with serving(fake) as client:
            answer = await client.stub.Tokenize(pb.TokenizeRequest(text="x" * 10_000))
            assert len(answer.token_ids) == 10_000


async def test_texts_that_take_long_hold_up_no_prompt():
    with make_fake() as fake:
        held: Any = HeldCodec(fake.engine.tokenizer)
        fake.engine.tokenizer = held  # of Tokenize; prompts have the other
        async with serving(fake) as client, asyncio.timeout(20):
            texts = [client.stub.Tokenize(pb.TokenizeRequest(text="abc")) for _ in range(50)]
            await asyncio.sleep(0.1)
            assert await client.text("ab", max_tokens=2) == "ab"
            assert not any(text.done() for text in texts)
            held.may.set()
            assert {len((await text).token_ids) for text in texts} == {3}


async def test_bad_tokens_and_prompts_are_refused_by_field():
    with make_fake() as fake:
        async with serving(fake) as client:
            stub = client.stub
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
            cases = [
                (stub.Tokenize(pb.TokenizeRequest()), "prompt: one of text and chat"),
                (
                    stub.Tokenize(pb.TokenizeRequest(chat=chat, add_special_tokens=False)),
                    "add_special_tokens: ",
                ),
                (stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, -1])), "token_ids: -1"),
                (stub.Detokenize(pb.DetokenizeRequest(token_ids=[300])), "token_ids: 300"),
                (
                    stub.Estimate(pb.EstimateRequest()),
                    "prompt: one of text, token_ids, chat and num_tokens",
                ),
                (stub.Estimate(pb.EstimateRequest(num_tokens=-1)), "prompt: must have"),
            ]
            for call, words in cases:
                error = await failure(call)
                assert error.code() is StatusCode.INVALID_ARGUMENT, words
                assert (error.details() or "").startswith(words)
            error = await failure(stub.Estimate(pb.EstimateRequest(num_tokens=1024)))
            assert error.code() is StatusCode.OUT_OF_RANGE


# What is predicted


async def estimate(client: Client, **fields: Any) -> pb.EstimateResponse:
    return await client.stub.Estimate(pb.EstimateRequest(**fields))


async def test_estimates_grow_with_prompt_and_queue_and_queue_nothing():
    with make_fake(predictor=MODEL, max_num_seqs=2, step_s=0.02) as fake:
        async with serving(fake) as client:
            short = await estimate(client, text="a" * 10)
            assert short.basis == pb.ESTIMATE_BASIS_PROFILE
            assert (short.prompt_tokens, short.queued_s) == (10, 0.0)
            assert short.ttft_s == pytest.approx(0.01 + 16 * 1e-3)  # the smallest bucket's rows
            assert short.alone_s == pytest.approx(short.ttft_s)
            longer = await estimate(client, token_ids=pb.TokenIds(ids=[7] * 60))
            assert longer.ttft_s == pytest.approx(0.01 + 64 * 1e-3)
            assert not fake.executor.plans
            calls = await start(client, 6, prompt="b" * 200)
            behind = await estimate(client, num_tokens=60)
            assert behind.queued_s > 4 * longer.ttft_s
            assert behind.ttft_s > behind.queued_s
            load = await client.stub.GetLoad(pb.GetLoadRequest())
            assert load.queued_s > 0
            for call in calls:
                call.cancel()


async def test_without_a_profile_the_pace_of_late_is_the_basis():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            assert not (await client.stub.GetLoad(pb.GetLoadRequest())).HasField("queued_s")
            await client.text("a" * 640, max_tokens=1)  # ten iterations of 64 tokens
            answer = await estimate(client, num_tokens=640)
            assert answer.basis == pb.ESTIMATE_BASIS_PACE
            assert not answer.HasField("alone_s")
            assert answer.ttft_s == pytest.approx(10 * 0.002)
            assert (await client.stub.GetLoad(pb.GetLoadRequest())).HasField("queued_s")


async def test_load_says_what_each_group_holds():
    with make_fake(groups=2, step_s=0.005) as fake:
        async with serving(fake) as client:
            calls = await start(client, 2, prompt="b" * 100)

            async def decoding() -> bool:
                load = await client.stub.GetLoad(pb.GetLoadRequest())
                return [group.num_decodes for group in load.groups] == [1, 1]

            await eventually(decoding)
            load = await client.stub.GetLoad(pb.GetLoadRequest())
            for group in load.groups:
                assert group.context_tokens >= 100
                used = group.num_pages - group.free_pages
                assert group.kv_usage == pytest.approx(used / group.num_pages)
                assert used >= 7  # of 16 tokens
            for call in calls:
                call.cancel()


# Deadlines


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    with make_fake(predictor=Linear(base_s=20.0)) as fake:
        async with serving(fake) as client:
            started_s = time.monotonic()
            for method in (client.stub.Generate, client.stub.Complete):
                call = method(generate_request(**LONG), timeout=10.0)
                error = await failure(anext(aiter(call)) if hasattr(call, "read") else call)
                assert error.code() is StatusCode.DEADLINE_EXCEEDED
                assert "takes at least 20 s" in (error.details() or "")
            assert time.monotonic() - started_s < 5.0
            assert not fake.executor.plans
            assert len(await client.text(max_tokens=3)) == 3  # without a deadline it is served


async def test_a_deadline_that_passes_ends_the_request_wherever_it_is():
    with make_fake(max_num_seqs=1, step_s=0.01) as fake:
        async with serving(fake) as client:
            running = client.stub.Generate(generate_request(**LONG), timeout=1.0)
            await anext(aiter(running))
            request = generate_request(request_id="waiting", **LONG)
            waiting = client.stub.Generate(request, timeout=0.3)
            messages, _ = await ended(waiting, StatusCode.DEADLINE_EXCEEDED)
            assert messages == []
            messages, _ = await ended(running, StatusCode.DEADLINE_EXCEEDED)
            assert 0 < len(messages) < 300
            await eventually(lambda: client.is_free(fake), 1.0)
            assert not fake.executor.num_plans_with("waiting")


async def test_a_client_that_waits_less_is_served_before():
    with make_fake(max_num_seqs=1, step_s=0.005) as fake:
        async with serving(fake) as client:
            (first,) = await start(client, 1, max_tokens=30)

            async def queue(name: str, timeout: float | None = None) -> Any:
                request = generate_request(request_id=name, max_tokens=2)
                call = client.stub.Generate(request, timeout=timeout)
                await call.initial_metadata()
                return call

            calls = [await queue("patient"), await queue("long", 60.0), await queue("short", 30.0)]
            for call in (first, *calls):
                assert [message async for message in call]
            admitted = [a.request.request_id for p in fake.executor.plans for a in p.admissions]
            assert admitted[1:] == ["short", "long", "patient"]


# Refusals


async def retry_delay_s(call: Any) -> float:
    error = await failure(call)
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    (detail,) = status.details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    assert status.message == error.details()
    return info.retry_delay.ToNanoseconds() / 1e9


async def test_a_full_queue_says_when_to_come_again():
    async def delay_s(fake: Fake, prompt: str) -> float:
        async with serving(fake) as client:
            calls = await start(client, 4, prompt=prompt, max_tokens=1000 - len(prompt))
            delay_s = await retry_delay_s(client.stub.Complete(generate_request()))
            for call in calls:
                call.cancel()
            return delay_s

    settings: dict[str, Any] = {"max_num_seqs": 1, "max_waiting": 3, "step_s": 0.01}
    with make_fake(predictor=Linear(base_s=0.05), **settings) as slow:
        longer = await delay_s(slow, "a" * 20)
    with make_fake(predictor=Linear(base_s=0.001), **settings) as fast:
        shorter = await delay_s(fast, "a" * 20)
    assert 0.1 <= shorter < longer <= 60.0


async def test_an_error_that_nobody_expected_says_nothing_of_itself(monkeypatch, caplog):
    with make_fake() as fake:
        async with serving(fake) as client:

            def fail(*arguments: Any) -> None:
                raise RuntimeError("a secret")

            monkeypatch.setattr(fake.engine, "prepare", fail)
            error = await refusal(client)
            assert (error.code(), error.details()) == (StatusCode.INTERNAL, "internal error")
            assert "a secret" in caplog.text
            monkeypatch.undo()
            assert await client.text("ab", max_tokens=2) == "ab"


async def test_the_loop_is_free_while_a_prompt_is_estimated(monkeypatch):
    with make_fake(predictor=MODEL) as fake:
        prepare = fake.engine.prepare

        def slowly(*arguments: Any) -> Any:
            time.sleep(1.0)
            return prepare(*arguments)

        monkeypatch.setattr(fake.engine, "prepare", slowly)
        async with serving(fake) as client:
            task = asyncio.create_task(estimate(client, text="abc"))
            await asyncio.sleep(0.05)
            started_s = time.monotonic()
            await client.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert time.monotonic() - started_s < 0.7
            assert (await task).prompt_tokens == 3


# The life of engine and server


async def test_what_asks_a_hanging_engine_ends_when_it_is_given_up():
    with make_fake(engine={"stall_limit_s": 0.3}) as fake:
        fake.executor.pause_at(lambda plan: True)
        async with serving(fake) as client:
            call = client.stub.Complete(generate_request(**LONG))
            await asyncio.to_thread(fake.executor.wait_paused)
            async with asyncio.timeout(3.0):
                for asked in (
                    client.stub.Estimate(pb.EstimateRequest(num_tokens=5)),
                    client.stub.GetLoad(pb.GetLoadRequest()),
                    client.stub.Abort(pb.AbortRequest(request_id="x")),
                ):
                    assert (await failure(asked)).code() is StatusCode.UNAVAILABLE
                assert (await failure(call)).code() is StatusCode.INTERNAL


async def test_draining_finishes_whole_answers_and_choices():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake, drain_s=20.0) as client:
            call = client.stub.Complete(generate_request(n=3, max_tokens=80, ignore_eos=True))
            await accepted(fake, 3)
            draining = asyncio.create_task(client.server.drain())
            answer = await call
            assert [len(choice.token_ids) for choice in answer.choices] == [80] * 3
            assert await draining is True


async def test_at_the_end_of_a_drain_a_whole_answer_gets_a_final_status():
    with make_fake(step_s=0.01) as fake:
        async with serving(fake, drain_s=0.1) as client:
            call = client.stub.Complete(generate_request(n=2, **LONG))
            await accepted(fake, 2)
            assert await client.server.drain() is False
            error = await failure(call)
            assert error.code() is StatusCode.UNAVAILABLE
            assert "shutdown after 0.1 s" in (error.details() or "")
