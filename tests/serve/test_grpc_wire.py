"""Messages that nobody would send, to every method that takes one: each is answered, or refused as
the client's fault, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from tests.fakes import Fake, make_fake
from tests.serve.harness import Client, serving

Code = grpc.StatusCode
ANSWERS = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.NOT_FOUND,  # of a model that is not served
    Code.FAILED_PRECONDITION,  # an estimate before there is anything to go by
}
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
METHODS = {method.name: method for method in SERVICE.methods if not method.client_streaming}
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.floats(0, 2),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 5),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 310),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 40),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Of a field that is no map."""
    if field.message_type is not None:
        one: st.SearchStrategy[Any] = messages(field.message_type)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.binary(max_size=6)
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = st.text(max_size=6) | st.sampled_from(["user", "assistant", "fake"])
    else:
        one = SCALARS[field.cpp_type]
    return st.lists(one, max_size=3) if field.is_repeated else one


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Any:
    """A message of a few of its fields."""
    plain = [field for field in descriptor.fields if not _is_map(field)]
    chosen = (
        draw(st.lists(st.sampled_from(plain), max_size=4, unique_by=lambda f: f.name))
        if (plain)
        else []
    )
    return GetMessageClass(descriptor)(**{field.name: draw(values(field)) for field in chosen})


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes]:
    """A method, and a message of its type, at times a little damaged."""
    name = draw(st.sampled_from(sorted(METHODS)) | st.just("Generate"))
    data = bytearray(draw(messages(METHODS[name].input_type)).SerializeToString())
    if data and draw(st.integers(0, 3)) == 0:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return name, bytes(data)


NO_MESSAGES = st.tuples(st.sampled_from(sorted(METHODS)), st.binary(max_size=30))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[tuple[Fake, Client]]:
    with make_fake(max_model_len=64) as fake:
        async with serving(fake) as client:
            yield fake, client


async def status_of(client: Client, name: str, data: bytes) -> grpc.StatusCode:
    """How the call ends that sends these bytes as they are."""
    path = f"/{SERVICE.full_name}/{name}"
    try:
        if METHODS[name].server_streaming:
            async for _ in client.channel.unary_stream(path)(data):
                pass
        else:
            await client.channel.unary_unary(path)(data)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


@pytest.mark.asyncio(loop_scope="module")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=calls() | NO_MESSAGES)
async def test_any_message_is_answered_or_refused(
    served: tuple[Fake, Client], sent: tuple[str, bytes]
):
    fake, client = served
    assert await status_of(client, *sent) in ANSWERS
    assert fake.engine.healthy and not fake.engine.num_live


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", sorted(METHODS))
async def test_what_is_no_message_is_an_invalid_argument(served: tuple[Fake, Client], name: str):
    assert await status_of(served[1], name, b"\xff") is Code.INVALID_ARGUMENT


async def test_a_stream_of_bytes_that_are_no_message_is_refused_as_such():
    """Of a method that takes several messages: reflection."""
    with make_fake() as fake:
        async with serving(fake) as client:
            name = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            call = client.channel.stream_stream(name)(iter([b"\xff\xff"]))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "not a message of the type" in (error.value.details() or "")
