"""vLLM's contract on the same port, through the stubs of the package that defines it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import zipfile
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2 as common
from tokenizers import Tokenizer

from conflux_jax.request import SamplingParams
from conflux_jax.serve.vllm_grpc import SERVICE, params_of
from tests.fakes import EOS, Fake, make_fake, spell
from tests.scheduler.predictors import Linear
from tests.serve.harness import SERVING, Client, serving
from tests.serve.test_grpc import eventually

LONG = vllm.SamplingParams(max_tokens=300, ignore_eos=True)
PROMPT = list(b"abc")


def stub_of(client: Client) -> Any:
    channel: Any = client.channel
    return vllm_grpc.VllmEngineStub(channel)


def request_of(stream: bool = True, request_id: str = "r", **fields: Any) -> vllm.GenerateRequest:
    """`fields`: those of GenerateRequest, else of SamplingParams."""
    own = {k: v for k, v in fields.items() if k in vllm.GenerateRequest.DESCRIPTOR.fields_by_name}
    own.setdefault(
        "sampling_params",
        vllm.SamplingParams(**{k: v for k, v in fields.items() if k not in own}),
    )
    if not {"tokenized", "text"} & set(own):
        own["tokenized"] = vllm.TokenizedInput(original_text="abc", input_ids=PROMPT)
    return vllm.GenerateRequest(request_id=request_id, stream=stream, **own)


async def answers(client: Client, **fields: Any) -> list[vllm.GenerateResponse]:
    return [answer async for answer in stub_of(client).Generate(request_of(**fields))]


async def refusal(client: Client, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(client, **fields)
    return caught.value


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# Generate


async def test_chunks_and_then_a_completion():
    with make_fake() as fake:
        async with serving(fake) as client:
            got = await answers(client, max_tokens=7)
            *chunks, last = got
            assert {a.WhichOneof("response") for a in chunks} == {"chunk"}
            assert [i for a in chunks for i in a.chunk.token_ids] == list(b"abcabca")
            assert {a.chunk.prompt_tokens for a in chunks} == {3}
            assert sum(a.chunk.completion_tokens for a in chunks) == 7
            assert last.WhichOneof("response") == "complete"
            assert last.complete.finish_reason == "length"
            assert list(last.complete.output_ids) == list(chunks[-1].chunk.token_ids)


async def test_all_at_once_without_stream():
    with make_fake() as fake:
        async with serving(fake) as client:
            got = await answers(client, stream=False, max_tokens=7, n=3)
            assert [a.complete.index for a in got] == [0, 1, 2]
            for answer in got:
                complete = answer.complete
                assert list(complete.output_ids) == list(b"abcabca")
                assert (complete.prompt_tokens, complete.completion_tokens) == (3, 7)


async def test_choices_stream_by_index():
    with make_fake() as fake:
        async with serving(fake) as client:
            got = await answers(client, max_tokens=4, n=2)
            for index in range(2):
                chunks = [a.chunk for a in got if a.HasField("chunk") and a.chunk.index == index]
                assert [i for chunk in chunks for i in chunk.token_ids] == list(b"abca")
            ends = [a.complete for a in got if a.HasField("complete")]
            assert sorted(end.index for end in ends) == [0, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_lie_beside_their_tokens(stream: bool):
    with make_fake() as fake:
        async with serving(fake) as client:
            got = await answers(client, stream=stream, max_tokens=3, logprobs=2)
            parts = [a.chunk for a in got if a.HasField("chunk")] if stream else [got[0].complete]
            entries = [part.output_logprobs for part in parts]
            assert [i for e in entries for i in e.token_ids] == PROMPT
            assert [v for e in entries for v in e.token_logprobs] == [-0.5, -1.5, -2.5]
            tops = [(list(t.token_ids), list(t.values)) for e in entries for t in e.top_logprobs]
            assert tops == [([0, 1], [-1.0, -2.0])] * 3
            (plain,) = await answers(client, stream=False, max_tokens=1)
            assert not plain.complete.HasField("output_logprobs")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompts_logprobs_come_once_and_its_first_token_has_none(stream: bool):
    with make_fake() as fake:
        async with serving(fake) as client:
            got = await answers(client, stream=stream, max_tokens=3, prompt_logprobs=2)
            parts = [a.chunk for a in got if a.HasField("chunk")] if stream else [got[0].complete]
            (scores,) = [part.input_logprobs for part in parts if part.HasField("input_logprobs")]
            assert list(scores.token_ids) == PROMPT
            assert [v.HasField("value") for v in scores.token_logprobs] == [False, True, True]
            assert [v.value for v in scores.token_logprobs[1:]] == [-0.25, -0.5]
            tops = [(list(t.token_ids), list(t.values)) for t in scores.top_logprobs]
            assert tops == [([], []), ([0, 1], [-1.0, -2.0]), ([0, 1], [-1.0, -2.0])]


async def test_text_prompts_stop_strings_and_eos():
    with make_fake(spell("one two three")) as fake:
        async with serving(fake) as client:
            (answer,) = await answers(client, stream=False, text="x", max_tokens=99)
            assert list(answer.complete.output_ids) == [*b"one two three", EOS]
            assert answer.complete.finish_reason == "stop"
            assert answer.complete.prompt_tokens == 1
            (answer,) = await answers(client, stream=False, max_tokens=99, stop=["two"])
            assert list(answer.complete.output_ids) == list(b"one two")
            assert answer.complete.finish_reason == "stop"


def test_zero_is_what_it_means_in_the_contract():
    """Unset scalars are zero on the wire; only those with presence can mean it."""
    params, n = params_of(vllm.SamplingParams())
    assert (params, n) == (SamplingParams(max_tokens=None), 1)
    neutral = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=5,
        repetition_penalty=1.0,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        logprobs=0,
        seed=0,
        n=2,
    )
    expected = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0, seed=0)
    assert params_of(neutral) == (expected, 2)
    given = vllm.SamplingParams(top_p=0.5, top_k=7, min_p=0.25, stop=["a"], ignore_eos=True)
    expected = SamplingParams(
        max_tokens=None, top_p=0.5, top_k=7, min_p=0.25, stop=("a",), ignore_eos=True
    )
    assert params_of(given)[0] == expected
    given = vllm.SamplingParams(
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=[7],
        logit_bias={5: 1.0},
        prompt_logprobs=0,
    )
    expected = SamplingParams(
        max_tokens=None,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=(7,),
        logit_bias={5: 1.0},
        prompt_logprobs=0,
    )
    assert params_of(given)[0] == expected


UNKNOWN = {
    "truncate_prompt_tokens": 3,
    "json_schema": "{}",
    "regex": "a+",
    "grammar": "root ::= 'a'",
    "structural_tag": "{}",
    "json_object": True,
    "choice": vllm.ChoiceConstraint(choices=["a"]),
}
OWN = {
    "truncate_prompt_tokens": 3,
    "json_schema": "{}",
    "regex": "a+",
    "grammar": "root ::= 'a'",
    "structural_tag": "{}",
    "json_object": True,
    "choice": vllm.ChoiceConstraint(choices=["a"]),
}
KNOWN = set(SamplingParams.__dataclass_fields__) - {"prompt_logprobs"}
UNKNOWN = {name: value for name, value in UNKNOWN.items() if name not in KNOWN}
OWN = {
    "kv_transfer_params": vllm.KvTransferParams(remote_host="h"),
    "kv_transfer_params_json": "{}",
    "mm_inputs": vllm.MultimodalInputs(im_token_id=3),
    "extra_mm_inputs": [vllm.MultimodalInputs()],
    "data_parallel_rank": 1,
    "media_refs": vllm.MediaRefs(),
}


async def test_bad_requests_are_refused_by_name_and_leave_nothing():
    cases: list[tuple[dict[str, Any], StatusCode, str]] = [
        ({name: value}, StatusCode.INVALID_ARGUMENT, f"{name}: is not supported")
        for name, value in (UNKNOWN | OWN).items()
    ]
    invalid = StatusCode.INVALID_ARGUMENT
    cases += [
        ({"max_tokens": 0}, invalid, "max_tokens: must be between 1"),
        ({"temperature": float("nan")}, invalid, "temperature: must be a number"),
        ({"top_p": 1.5}, invalid, "top_p: must be above 0"),
        ({"logprobs": -1}, invalid, "logprobs: must be between 0 and 20"),
        ({"n": 200}, invalid, "n: must be between 1 and 128"),
        ({"request_id": "x" * 1000}, invalid, "request_id: must be at most 256"),
        ({"tokenized": vllm.TokenizedInput()}, invalid, "prompt: must have at least one"),
        ({"tokenized": vllm.TokenizedInput(input_ids=[2**32 - 1])}, invalid, "prompt: token id"),
        ({"text": "x" * 6_000_000}, StatusCode.OUT_OF_RANGE, "prompt: "),
    ]
    with make_fake() as fake:
        async with serving(fake) as client:
            for fields, code, words in cases:
                error = await refusal(client, **fields)
                assert error.code() is code, fields
                assert (error.details() or "").startswith(words), error.details()
            error = await failure(anext(aiter(stub_of(client).Generate(vllm.GenerateRequest()))))
            assert (error.details() or "").startswith("input: one of tokenized and text")
            assert not fake.executor.plans
            assert await answers(client, max_tokens=1, data_parallel_rank=0)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    with make_fake(predictor=Linear(base_s=20.0)) as fake:
        async with serving(fake) as client:
            call = stub_of(client).Generate(request_of(), timeout=10.0)
            error = await failure(anext(aiter(call)))
            assert error.code() is StatusCode.DEADLINE_EXCEEDED
            assert "takes at least" in (error.details() or "")


# Clients that go, and failures


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_cancels_frees_its_request(stream: bool):
    with make_fake(step_s=0.005) as fake:
        async with serving(fake) as client:
            call = stub_of(client).Generate(request_of(stream, sampling_params=LONG))
            if stream:
                await anext(aiter(call))
            else:
                await eventually(lambda: _has_plans(fake))
            call.cancel()
            await eventually(lambda: client.is_free(fake), 1.0)


async def _has_plans(fake: Fake) -> bool:
    return bool(fake.executor.plans)


async def test_abort_ends_calls_by_their_ids_and_minds_no_others():
    with make_fake(step_s=0.005) as fake:
        async with serving(fake) as client:
            stub = stub_of(client)
            requests = [
                request_of(request_id="one", sampling_params=LONG),
                request_of(request_id="two", max_tokens=300, ignore_eos=True, n=2),
                request_of(request_id="three", max_tokens=50, ignore_eos=True),
            ]
            calls = [stub.Generate(request) for request in requests]
            for call in calls[:2]:
                await anext(aiter(call))
            await stub.Abort(vllm.AbortRequest(request_ids=["one", "two", "nobody"]))
            ends = [[a async for a in call if a.HasField("complete")] for call in calls]
            reasons = [[a.complete.finish_reason for a in own] for own in ends]
            assert reasons == [["abort"], ["abort", "abort"], ["length"]]
            error = await failure(stub.Abort(vllm.AbortRequest(request_ids=["x"] * 4097)))
            assert (error.details() or "").startswith("request_ids: at most 4096")
            assert await client.is_free(fake)


async def test_a_failing_engine_is_internal_and_then_unhealthy():
    with make_fake(step_s=0.002) as fake:
        async with serving(fake) as client:
            stub = stub_of(client)
            call = stub.Generate(request_of(sampling_params=LONG))
            await anext(aiter(call))
            fake.executor.fail_with = RuntimeError("out of memory")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [answer async for answer in call]
            assert caught.value.code() is StatusCode.INTERNAL
            health = await stub.HealthCheck(vllm.HealthCheckRequest())
            assert not health.healthy and "out of memory" in health.message


async def test_before_the_model_is_there_and_while_it_drains():
    async with serving(None) as client:
        stub = stub_of(client)
        health = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert not health.healthy and "loading" in health.message
        assert (await refusal(client)).code() is StatusCode.UNAVAILABLE
        error = await failure(stub.GetModelInfo(vllm.GetModelInfoRequest()))
        assert error.code() is StatusCode.UNAVAILABLE
        with make_fake() as fake:
            await client.server.use(fake.engine)
            assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
            assert await answers(client, max_tokens=1)
            fake.engine.drain(1.0)
            health = await stub.HealthCheck(vllm.HealthCheckRequest())
            assert not health.healthy and "shutting down" in health.message
            assert (await stub.GetServerInfo(vllm.GetServerInfoRequest())).is_paused
            assert (await refusal(client)).code() is StatusCode.UNAVAILABLE
            await client.server.stop(0.0)


# What a gateway asks of a worker


async def test_model_server_and_loads_are_told():
    with make_fake(groups=2, step_s=0.005, max_num_seqs=3) as fake:
        async with serving(fake) as client:
            stub = stub_of(client)
            model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
            assert model.served_model_name == "fake" and model.is_generation
            assert (model.max_context_length, model.max_req_input_len) == (1024, 1023)
            assert (model.vocab_size, list(model.eos_token_ids)) == (300, [EOS])
            calls = [
                stub.Generate(request_of(request_id=f"r{i}", sampling_params=LONG))
                for i in range(5)
            ]
            await anext(aiter(calls[0]))
            await eventually(lambda: _live(fake, 5))
            server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
            assert (server.active_requests, server.max_num_seqs) == (5, 3)
            assert (server.block_size, server.data_parallel_size) == (16, 1)
            assert server.server_type == "vllm-grpc" and server.uptime_seconds > 0
            loads = await stub.GetLoads(vllm.GetLoadsRequest())
            (load,) = loads.loads
            assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
            assert load.num_waiting_uncached_tokens == 6
            assert load.max_total_num_tokens == 2 * 4096
            assert load.token_usage == load.num_used_tokens / load.max_total_num_tokens > 0
            assert load.utilization == 1.0
            for call in calls:
                call.cancel()
            error = await failure(stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)))
            assert (error.details() or "").startswith("dp_rank: ")


async def _live(fake: Fake, count: int) -> bool:
    return fake.engine.num_live == count


async def test_the_tokenizer_can_be_had_and_is_the_engines():
    with make_fake() as fake:
        async with serving(fake) as client:
            call = stub_of(client).GetTokenizer(common.GetTokenizerRequest())
            chunks = [chunk async for chunk in call]
            data = b"".join(chunk.data for chunk in chunks)
            assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
            assert not any(chunk.sha256 for chunk in chunks[:-1])
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert set(archive.namelist()) == {"tokenizer.json", "tokenizer_config.json"}
                tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
                settings = json.loads(archive.read("tokenizer_config.json"))
            text = "ď 龜<|im_end|>"
            assert tokenizer.encode(text).ids == fake.engine.tokenizer.encode(text)
            assert "<|im_start|>" in settings["chat_template"]


async def test_what_the_engine_has_not_is_unimplemented():
    with make_fake() as fake:
        async with serving(fake) as client:
            stub = stub_of(client)
            calls = {
                "Embed": stub.Embed(vllm.EmbedRequest(request_id="r")),
                "FlushCache": stub.FlushCache(common.FlushCacheRequest()),
                "StartProfile": stub.StartProfile(common.StartProfileRequest()),
                "StopProfile": stub.StopProfile(common.StopProfileRequest()),
                "SubscribeKvEvents": anext(
                    aiter(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
                ),
            }
            for name, call in calls.items():
                error = await failure(call)
                assert error.code() is StatusCode.UNIMPLEMENTED
                assert (error.details() or "").startswith(f"{name}: ")


# Beside the engine's own service


async def test_health_and_reflection_know_the_service():
    with make_fake() as fake:
        async with serving(fake) as client:
            channel: Any = client.channel
            health: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            assert (await health.Check(request)).status == SERVING
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)]
            (answer,) = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
            assert answer.file_descriptor_response.file_descriptor_proto


async def test_without_the_package_there_is_no_such_service(monkeypatch):
    find_spec = importlib.util.find_spec
    hidden = ("smg_grpc_proto",)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n in hidden else find_spec(n)
    )
    with make_fake() as fake:
        async with serving(fake) as client:
            assert (await refusal(client)).code() is StatusCode.UNIMPLEMENTED
            assert await client.text("ab", max_tokens=2) == "ab"
