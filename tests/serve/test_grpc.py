"""The gRPC service over a scripted engine: answers, errors, cancels, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from conflux_jax.config import ServerConfig
from conflux_jax.request import FinishReason, SamplingParams
from conflux_jax.serve.grpc_server import SERVICE, GrpcServer
from conflux_jax.serve.messages import FINISH_REASONS, params_of
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from tests.fakes import EOS, make_fake, spell
from tests.serve.harness import (
    NOT_SERVING,
    SERVING,
    Client,
    connect,
    generate_request,
    serving,
)

LONG = {"max_tokens": 300, "ignore_eos": True}


async def eventually(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def start(client: Client, count: int, **fields: Any) -> list[Any]:
    """Calls that are accepted; the first one has had its first token."""
    fields = {**LONG, **fields}
    calls: list[Any] = []
    for _ in range(count):
        calls.append(client.stub.Generate(generate_request(**fields)))
        if len(calls) == 1:
            await anext(aiter(calls[0]))
        assert "x-request-id" in dict(await calls[-1].initial_metadata())
    return calls


async def ended(call: Any, code: StatusCode) -> tuple[list[pb.GenerateResponse], str]:
    """The messages of a call that must end with this status, and the details of that."""
    messages: list[pb.GenerateResponse] = []

    async def read() -> None:
        async for message in call:
            messages.append(message)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() is code
    return messages, caught.value.details() or ""


async def refusal(client: Client, *prompt: Any, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(*prompt, **fields)
    return caught.value


# Answers


async def test_text_streams_with_ids_reason_and_usage():
    with make_fake() as fake:
        async with serving(fake) as client:
            messages = await client.generate("hello ", max_tokens=14, request_id="mine")
            assert "".join(m.text for m in messages) == "hello hello he"
            assert [i for m in messages for i in m.token_ids] == list(b"hello hello he")
            assert {m.request_id for m in messages} == {"mine"}
            assert not any(m.HasField("finish_reason") for m in messages[:-1])
            assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
            usage = messages[-1].usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (6, 14)


async def test_prompts_may_be_text_ids_or_chat():
    with make_fake() as fake:
        async with serving(fake) as client:
            assert await client.text("ab", max_tokens=4) == "abab"
            assert await client.text([97, 98], max_tokens=4) == "abab"
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
            last = (await client.generate(None, chat=chat, max_tokens=1))[-1]
            assert last.usage.prompt_tokens == len("?user\nhi?\n?assistant\n")
            chat.add_generation_prompt = False
            last = (await client.generate(None, chat=chat, max_tokens=1))[-1]
            assert last.usage.prompt_tokens == len("?user\nhi?\n")


async def test_stop_strings_and_split_characters_end_to_end():
    with make_fake(spell("ď 🫠 龜 end.")) as fake:
        async with serving(fake) as client:
            messages = await client.generate("x", max_tokens=99)
            assert "".join(m.text for m in messages) == "ď 🫠 龜 end."
            assert messages[-1].token_ids[-1] == EOS
            messages = await client.generate("x", max_tokens=99, stop=["龜"])
            assert "".join(m.text for m in messages) == "ď 🫠 "
            assert messages[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_logprobs_are_sent_when_asked_for():
    with make_fake() as fake:
        async with serving(fake) as client:
            messages = await client.generate(max_tokens=2, logprobs=1)
            entries = [entry for m in messages for entry in m.logprobs]
            assert [e.logprob for e in entries] == [-0.5, -1.5]
            assert [(t.token_id, t.logprob) for t in entries[0].top] == [(0, -1.0)]


async def test_log_probabilities_of_a_prompt_come_once():
    with make_fake() as fake:
        async with serving(fake) as client:
            messages = await client.generate("abcd", max_tokens=9, prompt_logprobs=2)
            assert [bool(m.prompt_logprobs) for m in messages].index(True) == 0
            entries = [entry for m in messages for entry in m.prompt_logprobs]
            assert [(e.logprob, e.rank) for e in entries] == [(-0.25, 1), (-0.5, 2), (-0.75, 3)]
            assert [(t.token_id, t.logprob) for t in entries[0].top] == [(0, -1.0), (1, -2.0)]
            assert not any(m.prompt_logprobs for m in await client.generate("abcd", max_tokens=2))


async def test_the_request_id_comes_at_once_as_metadata():
    with make_fake(max_num_seqs=1, step_s=0.002) as fake:
        async with serving(fake) as client:
            first = client.stub.Generate(generate_request(**LONG))
            await anext(aiter(first))
            queued = client.stub.Generate(generate_request(**LONG))
            metadata = dict(await queued.initial_metadata())
            abort = pb.AbortRequest(request_id=metadata["x-request-id"])
            assert (await client.stub.Abort(abort)).found
            messages = [message async for message in queued]
            assert [m.finish_reason for m in messages] == [pb.FINISH_REASON_ABORT]
            assert messages[0].usage.completion_tokens == 0
            assert not (await client.stub.Abort(abort)).found
            first.cancel()


async def test_model_and_load_are_told():
    with make_fake(groups=3, step_s=0.002) as fake:
        async with serving(fake) as client:
            info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.model, info.max_model_len, info.sp) == ("fake", 1024, 3)
            assert list(info.eos_token_ids) == [EOS]
            call = client.stub.Generate(generate_request(**LONG))
            await anext(aiter(call))
            load = await client.stub.GetLoad(pb.GetLoadRequest())
            assert len(load.groups) == 3
            assert load.accepting
            assert sum(g.num_decodes for g in load.groups) == 1
            assert sum(g.free_pages for g in load.groups) < 3 * info.num_pages
            call.cancel()


# The wire's values and the engine's


def test_sampling_fields_are_those_of_sampling_params():
    fields = pb.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(fields) == set(SamplingParams.__dataclass_fields__)
    assert all(f.has_presence for f in fields.values() if not f.is_repeated)


def test_absent_means_default_and_zero_means_zero():
    assert params_of(pb.SamplingParams()) == SamplingParams()
    given = pb.SamplingParams(temperature=0, logprobs=0, seed=0, stop=["a"], ignore_eos=False)
    assert params_of(given) == SamplingParams(temperature=0.0, logprobs=0, seed=0, stop=("a",))


def test_lists_and_maps_reach_the_engine():
    lists: Any = {
        "stop": ["a"],
        "stop_token_ids": [1, 2],
        "bad_token_ids": [3],
        "bad_words": ["b"],
        "allowed_token_ids": [3, 4],
    }
    given = pb.SamplingParams(logit_bias={5: -1.5, 4: 2}, prompt_logprobs=0, **lists)
    assert params_of(given) == SamplingParams(
        logit_bias={4: 2.0, 5: -1.5}, prompt_logprobs=0, **lists
    )


def test_every_finish_reason_has_a_name_on_the_wire():
    assert set(FINISH_REASONS) == set(FinishReason)


# Errors

INVALID, RANGE = StatusCode.INVALID_ARGUMENT, StatusCode.OUT_OF_RANGE
BAD_REQUESTS: list[tuple[dict[str, Any], StatusCode, list[str]]] = [
    ({"prompt": None}, INVALID, ["prompt:", "text, token_ids and chat"]),
    ({"prompt": ""}, INVALID, ["prompt:", "at least one token"]),
    ({"prompt": []}, INVALID, ["prompt:", "at least one token"]),
    ({"prompt": [300]}, INVALID, ["prompt:", "token id 300", "0 to 299"]),
    ({"prompt": [-5]}, INVALID, ["prompt:", "token id -5"]),
    ({"prompt": "x" * 1024}, RANGE, ["prompt:", "1024"]),
    ({"prompt": "x" * 6_000_000}, RANGE, ["prompt:", "1024"]),
    ({"model": "gpt-5"}, StatusCode.NOT_FOUND, ["model:", "'gpt-5'", "'fake'"]),
    ({"temperature": -1.0}, INVALID, ["temperature:", "-1.0"]),
    ({"temperature": float("nan")}, INVALID, ["temperature:", "nan"]),
    ({"max_tokens": 0}, INVALID, ["max_tokens:", "between 1"]),
    ({"max_tokens": -(2**40)}, INVALID, ["max_tokens:"]),
    ({"top_p": 0.0}, INVALID, ["top_p:", "above 0"]),
    ({"top_k": -1}, INVALID, ["top_k:"]),
    ({"min_p": 1.5}, INVALID, ["min_p:", "at most 1"]),
    ({"logprobs": 1000}, INVALID, ["logprobs:", "20"]),
    ({"stop": ["a"] * 50}, INVALID, ["stop:", "at most 16"]),
    ({"stop": [""]}, INVALID, ["stop:"]),
    ({"logit_bias": {300: 1.0}}, INVALID, ["logit_bias:", "0 to 299"]),
    ({"logit_bias": {5: float("nan")}}, INVALID, ["logit_bias:", "-100 to 100"]),
    ({"presence_penalty": 3.0}, INVALID, ["presence_penalty:", "at most 2"]),
    ({"min_tokens": 2**40}, INVALID, ["min_tokens:", "2147483647"]),
    ({"stop_token_ids": [2**40]}, INVALID, ["stop_token_ids:", "below 2^31"]),
    ({"prompt_logprobs": 21}, INVALID, ["prompt_logprobs:", "20"]),
    ({"request_id": "x" * 1000}, INVALID, ["request_id:", "256"]),
    ({"prompt": None, "chat": pb.ChatPrompt()}, INVALID, ["messages:"]),
    ({"n": 0}, INVALID, ["n:", "between 1 and 128"]),
    ({"n": 129}, INVALID, ["n:", "between 1 and 128"]),
    ({"model": "x" * 100_000}, StatusCode.NOT_FOUND, ["model:", "xxx..."]),
]


async def test_bad_requests_are_refused_by_field_and_limit_and_leave_nothing():
    with make_fake() as fake:
        async with serving(fake) as client:
            for fields, code, words in BAD_REQUESTS:
                error = await refusal(client, **fields)
                details = error.details() or ""
                assert error.code() is code, (fields, details)
                assert details.startswith(words[0]), details
                assert all(word in details for word in words), details
            assert await client.is_free(fake)
            assert not fake.executor.plans
            assert await client.text("ab", max_tokens=4) == "abab"


async def test_a_prompt_that_can_never_fit_is_refused_at_once():
    with make_fake(pool_tokens=1024, max_model_len=4096) as fake:
        async with serving(fake) as client:
            error = await refusal(client, "a" * 1500)
            assert error.code() is RANGE
            assert "KV pool" in (error.details() or "")
            assert len(await client.text("b" * 32, max_tokens=8)) == 8


async def test_a_full_queue_is_resource_exhausted():
    with make_fake(max_num_seqs=1, max_waiting=2, step_s=0.01) as fake:
        async with serving(fake) as client:
            calls = await start(client, 3)
            error = await refusal(client)
            assert error.code() is StatusCode.RESOURCE_EXHAUSTED
            assert "max_waiting: 2" in (error.details() or "")
            for call in calls:
                call.cancel()
            await eventually(lambda: client.is_free(fake))


async def test_the_message_limit_is_an_option_with_a_clear_error():
    with make_fake() as fake:
        async with serving(fake, max_message_mib=1) as client:
            error = await refusal(client, "x" * 6_000_000)
            assert error.code() is StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in (error.details() or "")
            assert await client.text("ab", max_tokens=2) == "ab"


async def test_a_failing_engine_is_internal_then_unavailable_and_unhealthy():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            calls = await start(client, 3)
            fake.executor.fail_with = RuntimeError("out of memory")
            for call in calls:
                _, details = await ended(call, StatusCode.INTERNAL)
                assert "out of memory" in details
            assert (await refusal(client)).code() is StatusCode.UNAVAILABLE
            await eventually(lambda: _health_is(client, NOT_SERVING))


async def _health_is(client: Client, status: int) -> bool:
    return await client.health() == {status}


async def test_a_port_in_use_is_an_error_of_its_own():
    with make_fake() as fake:
        async with serving(fake) as client:
            second = GrpcServer(ServerConfig(port=client.port))
            with pytest.raises(OSError, match="in use"):
                await second.start()
            await second.stop(0.0)


# Clients that go


async def test_a_client_that_cancels_frees_its_request():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            call = client.stub.Generate(generate_request(**LONG, request_id="a"))
            await anext(aiter(call))
            call.cancel()
            await eventually(lambda: client.is_free(fake), 1.0)
            count = fake.executor.num_plans_with("a")
            assert count < 100
            assert await client.text("ab", max_tokens=20) == "ab" * 10
            assert fake.executor.num_plans_with("a") == count


async def test_a_broken_connection_frees_its_requests():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            async with connect(client.port) as channel:
                generate = channel.unary_stream(
                    f"/{SERVICE}/Generate",
                    request_serializer=pb.GenerateRequest.SerializeToString,
                    response_deserializer=pb.GenerateResponse.FromString,
                )
                calls = [generate(generate_request(**LONG)) for _ in range(6)]
                await anext(aiter(calls[0]))
            await eventually(lambda: client.is_free(fake), 1.0)


async def test_clients_that_give_up_leave_the_slots_free_every_time():
    with make_fake(step_s=0.005, max_num_seqs=4) as fake:
        async with serving(fake) as client:
            for _ in range(2):
                requests = [generate_request(**LONG) for _ in range(12)]
                calls = [client.stub.Generate(request, timeout=0.3) for request in requests]
                for call in calls:
                    await ended(call, StatusCode.DEADLINE_EXCEEDED)
                await eventually(lambda: client.is_free(fake), 1.0)
                assert await client.health() == {SERVING}


async def test_a_cancel_during_tokenisation_ends_the_handler(monkeypatch):
    with make_fake() as fake:
        prepare = fake.engine.prepare

        def slowly(*arguments: Any) -> Any:
            time.sleep(1.0)
            return prepare(*arguments)

        monkeypatch.setattr(fake.engine, "prepare", slowly)
        async with serving(fake) as client:
            call = client.stub.Generate(generate_request(**LONG))
            await asyncio.sleep(0.05)
            call.cancel()
            # The loop is free while a prompt is tokenised.
            started = time.monotonic()
            await client.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert time.monotonic() - started < 0.7
            await asyncio.sleep(1.2)
            assert await client.is_free(fake)
            assert not fake.executor.plans


async def test_a_client_that_stops_reading_disturbs_nobody():
    with make_fake() as fake:
        async with serving(fake) as client:
            sleeper = client.stub.Generate(generate_request(**LONG))
            messages = [await anext(aiter(sleeper))]
            assert len(await client.text("ab", max_tokens=100)) == 100
            messages += [message async for message in sleeper]
            assert messages[-1].usage.completion_tokens == 300


# Life of the server


async def test_before_the_model_is_there_nothing_is_served():
    async with serving(None) as client:
        assert await client.health() == {NOT_SERVING}
        error = await refusal(client)
        assert error.code() is StatusCode.UNAVAILABLE
        assert "loading" in (error.details() or "")
        with pytest.raises(grpc.aio.AioRpcError, match="loading"):
            await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        with make_fake() as fake:
            await client.server.use(fake.engine)
            assert await client.health() == {SERVING}
            assert await client.text("ab", max_tokens=2) == "ab"
            await client.server.stop(0.0)


async def test_draining_finishes_streams_and_refuses_new_ones():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake, drain_s=20.0) as client:
            calls = await start(client, 6, max_tokens=80)
            draining = asyncio.create_task(client.server.drain())
            await eventually(lambda: _health_is(client, NOT_SERVING))
            error = await refusal(client)
            assert error.code() is StatusCode.UNAVAILABLE
            assert "shutting down" in (error.details() or "")
            assert not (await client.stub.GetLoad(pb.GetLoadRequest())).accepting
            for call in calls:
                messages = [message async for message in call]
                assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
            assert await draining is True


async def test_at_the_end_of_a_drain_every_client_gets_a_final_status():
    with make_fake(step_s=0.01, max_num_seqs=2) as fake:
        async with serving(fake, drain_s=0.1) as client:
            calls = await start(client, 4)
            assert await client.server.drain() is False
            for call in calls:
                messages, details = await ended(call, StatusCode.UNAVAILABLE)
                assert "shutdown after 0.1 s" in details
                assert messages[-1].finish_reason == pb.FINISH_REASON_ABORT


async def test_reflection_lists_and_describes_the_service():
    with make_fake() as fake:
        async with serving(fake) as client:
            channel: Any = client.channel
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            ]
            listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
            names = {service.name for service in listed.list_services_response.service}
            assert {SERVICE, "grpc.health.v1.Health"} <= names
            assert described.file_descriptor_response.file_descriptor_proto
