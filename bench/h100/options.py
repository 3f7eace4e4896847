"""Which iteration is counted on H100s: the flags, and what follows from them for a variant.

Imports no JAX, so that `bench.long_prefill` can pass the flags on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conflux_jax.scheduler.waterfill import waterfill

if TYPE_CHECKING:
    from bench.h100.accounting import Iteration
    from conflux_jax.plan import Bucket, PoolGeometry
    from conflux_jax.scheduler.buckets import Ladders

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = ("llama-3.1-8b", "qwen3-14b", "qwen3-32b")  # each a file of CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one iteration on H100s, compiled and not run")
    group.add_argument("--h100-model", choices=MODELS, default=MODELS[0])
    for name, default, low, text in (
        ("chunk-tokens", 8064, 1, "prefill tokens of the iteration"),
        ("context-tokens", 24_576, 0, "tokens of the same prompt that are done"),
        ("decodes", 128, 1, "decodes beside them"),
        ("decode-context", 2048, 1, "KV tokens of each decode"),
    ):
        group.add_argument(
            f"--h100-{name}",
            type=_at_least(low),
            default=default,
            metavar="N",
            help=f"{text}; default: {default}",
        )


def _at_least(low: int):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    return parse


@dataclass(frozen=True)
class Workload:
    """A chunk of one prompt beside decodes of equal context; sizes as in `Iteration`."""

    model: str
    chunk_tokens: int
    context_tokens: int
    num_decodes: int
    decode_context: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Workload:
        return cls(
            options.h100_model,
            options.h100_chunk_tokens,
            options.h100_context_tokens,
            options.h100_decodes,
            options.h100_decode_context,
        )

    def arguments(self) -> list[str]:
        """The flags that `of` reads it from."""
        return [
            *("--h100-model", self.model),
            *("--h100-chunk-tokens", str(self.chunk_tokens)),
            *("--h100-context-tokens", str(self.context_tokens)),
            *("--h100-decodes", str(self.num_decodes)),
            *("--h100-decode-context", str(self.decode_context)),
        ]

    def iteration(self, groups: int) -> Iteration:
        from bench.h100.accounting import Iteration, dealt  # imports JAX

        decodes = dealt(self.num_decodes, self.decode_context, groups)
        return Iteration(self.chunk_tokens, self.context_tokens, decodes)

    def settings(self, groups: int, apart: bool) -> dict[str, Any]:
        """Of the config: room for the iteration, in a bucket that fits it."""
        total = self.chunk_tokens + self.num_decodes
        return {
            "max_model_len": self.context_tokens + self.chunk_tokens + 1,
            "max_num_seqs": self.num_decodes + 1,
            "max_num_batched_tokens": total,
            "rows_ladder": (-(-(self.chunk_tokens if apart else total) // groups),),
        }

    def bucket(self, ladders: Ladders, iteration: Iteration) -> Bucket:
        """As the scheduler picks it."""
        loads = [len(group) for group in iteration.decodes]
        shares = waterfill(loads, sum(loads) + self.chunk_tokens, self.chunk_tokens)
        return ladders.fit(loads, shares, handoff=False)

    def check(self, longest: int, geometry: PoolGeometry, iteration: Iteration) -> None:
        """Raises ValueError where the model or its pool is too small for the iteration."""
        prompt = self.context_tokens + self.chunk_tokens
        context = max(prompt, self.decode_context + 1)
        if context > longest:
            raise ValueError(f"a context of {context} is past the model's {longest}")
        loads = [len(group) for group in iteration.decodes]
        most = sum(loads) if geometry.shared else max(loads)
        pages = most * geometry.decode_pages(self.decode_context + 1)
        pages += geometry.prefill_pages(prompt)
        if pages > geometry.num_pages:
            raise ValueError(
                f"the iteration's KV takes {pages} pages of a group; its pool has "
                f"{geometry.num_pages}"
            )
