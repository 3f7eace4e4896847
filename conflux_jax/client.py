"""`python -m conflux_jax.client --target HOST:PORT --prompt "..."`: text as it is produced.

With --estimate or --tokenize the prompt is only looked at; --load, --info, --abort and --detokenize
need none. Their answers are JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from conflux_jax import channel as connection
from conflux_jax.config import ConfigError
from conflux_jax.serve.proto.conflux.v1 import inference_pb2 as pb
from conflux_jax.serve.proto.conflux.v1 import inference_pb2_grpc as pb_grpc

# Flags that are sampling parameters of the same name; what is not given is the server's choice.
SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("top_k", int, "sample among the K likeliest tokens"),
    ("top_p", float, "sample among the likeliest tokens that make up this probability"),
    ("min_p", float, "leave out tokens below this share of the likeliest one's probability"),
    ("seed", int, "same seed, same text"),
)
FLAG_ACTIONS = {
    "estimate": "when the prompt would have its first token if it was sent now",
    "tokenize": "the prompt's token ids",
    "load": "what the engine has to do",
    "info": "what is served",
}
ACTIONS = (*FLAG_ACTIONS, "abort", "detokenize")
PROMPT_ACTIONS = ("generate", "estimate", "tokenize")


def main(arguments: Sequence[str] | None = None) -> int:
    """Stream one answer to stdout, or print another call's; returns the exit code. An error is one
    line on stderr."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.prompt is None and _action(parsed) in PROMPT_ACTIONS:
        parser.error("--prompt is required")
    try:
        with connection.open_channel(parsed) as channel:
            _call(pb_grpc.InferenceStub(channel), parsed)
    except grpc.RpcError as error:
        print(f"error: {_describe(error, parsed.target)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has enough; keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _action(parsed: argparse.Namespace) -> str:
    """The call that is asked for: the one of ACTIONS that is given, or "generate"."""
    given = [name for name in ACTIONS if getattr(parsed, name) not in (None, False)]
    return given[0] if given else "generate"


def _call(stub: Any, parsed: argparse.Namespace) -> None:
    timeout_s = parsed.timeout
    match _action(parsed):
        case "estimate":
            request = pb.EstimateRequest(model=parsed.model)
            _set_prompt(request, parsed)
            answer = stub.Estimate(request, timeout=timeout_s)
        case "tokenize":
            request = pb.TokenizeRequest(model=parsed.model)
            _set_prompt(request, parsed)
            answer = stub.Tokenize(request, timeout=timeout_s)
        case "detokenize":
            request = pb.DetokenizeRequest(model=parsed.model, token_ids=parsed.detokenize)
            answer = stub.Detokenize(request, timeout=timeout_s)
        case "abort":
            answer = stub.Abort(pb.AbortRequest(request_id=parsed.abort), timeout=timeout_s)
        case "load":
            answer = stub.GetLoad(pb.GetLoadRequest(), timeout=timeout_s)
        case "info":
            answer = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s)
        case _ if parsed.n is not None:
            _print_choices(stub.Complete(request_of(parsed), timeout=timeout_s), parsed.stats)
            return
        case _:
            _stream(stub, request_of(parsed), timeout_s, parsed.stats)
            return
    print(json.dumps(as_values(answer), indent=1, ensure_ascii=False))


def as_values(message: Any) -> Any:
    """A message as JSON has it: its fields by name, without those that are absent."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            value = [as_values(item) if field.message_type else item for item in value]
        elif field.message_type is not None:
            value = as_values(value)
        elif field.enum_type is not None:
            value = field.enum_type.values_by_number[value].name
        values[field.name] = value
    return values


def request_of(parsed: argparse.Namespace) -> pb.GenerateRequest:
    names = ("max_tokens", "temperature", *(name for name, _, _ in SAMPLING_FLAGS))
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    sampling = pb.SamplingParams(stop=parsed.stop, **given)
    request = pb.GenerateRequest(sampling=sampling, model=parsed.model, n=parsed.n)
    _set_prompt(request, parsed)
    return request


def _set_prompt(request: Any, parsed: argparse.Namespace) -> None:
    if parsed.chat:
        request.chat.messages.add(role="user", content=parsed.prompt)
    else:
        request.text = parsed.prompt


def _print_choices(answer: pb.CompleteResponse, stats: bool) -> None:
    """Each under its number."""
    for choice in answer.choices:
        sys.stdout.write(f"[{choice.index}] {choice.text}\n")
    if stats:
        usage = answer.usage
        print(
            f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens",
            file=sys.stderr,
        )


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
    delay_s = _retry_delay_s(error)
    again = "" if delay_s is None else f"; try again in {delay_s:.3g} s"
    return f"{code.name}: {details}{again}"


def _retry_delay_s(error: Any) -> float | None:
    """What the server advises, if it does."""
    status = rpc_status.from_call(error)
    for detail in () if status is None else status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToNanoseconds() / 1e9
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.client", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    connection.add_arguments(parser)
    parser.add_argument("--prompt", metavar="TEXT")
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
    parser.add_argument(
        "--n", type=int, metavar="N", help="this many answers, each printed once all are complete"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds for the whole answer; refused at once if there can be no token by then",
    )
    parser.add_argument("--stats", action="store_true", help="print counts and times at the end")
    other = parser.add_argument_group("other calls").add_mutually_exclusive_group()
    for name, help in FLAG_ACTIONS.items():
        other.add_argument("--" + name, action="store_true", help=help)
    other.add_argument("--abort", metavar="ID", help="end a request, by the id it was given")
    other.add_argument(
        "--detokenize", type=int, nargs="+", metavar="TOKEN", help="token ids to text"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
