"""The committed gRPC code is that of the committed .proto."""

from __future__ import annotations

import inspect
from pathlib import Path

from google.protobuf import descriptor_pb2

from conflux_jax.serve.proto import generate
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc


def test_generated_code_has_not_drifted(tmp_path: Path):
    """By descriptor and not by text, so that another version of the generator is no drift."""
    fresh, stub, grpc_code = (path.read_text() for path in generate.generate(tmp_path))
    marker = "AddSerializedFile("
    line = next(line for line in fresh.splitlines() if marker in line)
    serialized = eval(line[line.index(marker) + len(marker) : -1])  # a bytes literal
    expected = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    committed = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert committed == expected, "run python conflux_jax/serve/proto/generate.py"
    committed_stub = Path(inspect.getfile(pb)).with_suffix(".pyi").read_text()
    assert stub == committed_stub or _other_version(fresh)
    assert "from . import inference_pb2" in grpc_code
    for method in pb.DESCRIPTOR.services_by_name["Inference"].methods:
        assert hasattr(pb_grpc.InferenceServicer, method.name)


def _other_version(fresh: str) -> bool:
    committed = Path(inspect.getfile(pb)).read_text()
    version = [line for line in fresh.splitlines() if "Python Version" in line]
    return version[0] not in committed
