"""`python -m conflux_jax.client --target HOST:PORT --prompt "..."`: text as it is produced."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import grpc

from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc

# Flags that are sampling parameters of the same name; what is not given is the server's choice.
SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("top_k", int, "sample among the K likeliest tokens"),
    ("top_p", float, "sample among the likeliest tokens that make up this probability"),
    ("min_p", float, "leave out tokens below this share of the likeliest one's probability"),
    ("seed", int, "same seed, same text"),
)
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Stream one answer to stdout; returns the exit code. An error is one line on stderr."""
    parsed = _parser().parse_args(arguments)
    request = request_of(parsed)
    try:
        with grpc.insecure_channel(parsed.target, options=OPTIONS) as channel:
            _stream(pb_grpc.InferenceStub(channel), request, parsed.timeout, parsed.stats)
    except grpc.RpcError as error:
        print(f"error: {_describe(error, parsed.target)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has enough; keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def request_of(parsed: argparse.Namespace) -> pb.GenerateRequest:
    names = ("max_tokens", "temperature", *(name for name, _, _ in SAMPLING_FLAGS))
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    sampling = pb.SamplingParams(stop=parsed.stop, **given)
    request = pb.GenerateRequest(sampling=sampling, model=parsed.model)
    if parsed.chat:
        request.chat.messages.add(role="user", content=parsed.prompt)
    else:
        request.text = parsed.prompt
    return request


def _stream(
    stub: pb_grpc.InferenceStub, request: pb.GenerateRequest, timeout_s: float | None, stats: bool
) -> None:
    started_s, first_s, last = time.monotonic(), None, None
    call = stub.Generate(request, timeout=timeout_s)
    try:
        for last in call:
            if first_s is None and last.token_ids:
                first_s = time.monotonic()
            sys.stdout.write(last.text)
            sys.stdout.flush()
    finally:
        call.cancel()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stats and last is not None:
        count, elapsed_s = last.usage.completion_tokens, time.monotonic() - started_s
        reason = pb.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
        print(
            f"{last.usage.prompt_tokens} prompt tokens, {count} tokens, {reason}; first after "
            f"{(first_s or started_s) - started_s:.3f} s, {count / elapsed_s:.1f} tokens/s in all",
            file=sys.stderr,
        )


def _describe(error: grpc.RpcError, target: str) -> str:
    if not isinstance(error, grpc.Call):
        return str(error)
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
        return f"no server at {target} ({details})"
    return f"{code.name}: {details}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conflux_jax.client", description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message")
    parser.add_argument("--model", metavar="NAME", help="default: the one that is served")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    for name, kind, help in SAMPLING_FLAGS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=help)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for the whole answer")
    parser.add_argument("--stats", action="store_true", help="print counts and times at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
