"""Generates the Python code of `conflux/v1/*.proto`, which is committed beside it.

`python conflux_jax/serve/proto/generate.py [OUTPUT_FOLDER]`
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTO = "conflux/v1/inference.proto"


def generate(output: Path = ROOT) -> list[Path]:
    """Run protoc; returns the files written. Raises RuntimeError when it fails.

    protoc imports modules by their place under ROOT; the package is elsewhere, so that import is
    made relative.
    """
    import grpc_tools
    from grpc_tools import protoc

    include = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, PROTO]) != 0:
        raise RuntimeError(f"protoc failed on {PROTO}")
    stem = output / PROTO.removesuffix(".proto")
    stubs = stem.with_name("inference_pb2_grpc.py")
    source = stubs.read_text()
    relative = source.replace("from conflux.v1 import inference_pb2", "from . import inference_pb2")
    stubs.write_text(relative)
    return [stem.with_name(f"inference_pb2{end}") for end in (".py", ".pyi", "_grpc.py")]


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        print(path)
