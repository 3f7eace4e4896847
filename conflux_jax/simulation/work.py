"""What one iteration of any system makes the GPUs do, and what prices it.

`Work` is the border between who decides (a scheduler, a rival's rules) and the hardware model: it
says how many tokens of which kind run where, and nothing of how long that takes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Work(NamedTuple):
    """One iteration on groups of GPUs that stand side by side.

    rows: packed rows through the linear layers in the group with most, padding included. decodes:
    decode tokens of each group. contexts: KV tokens that those read, of each group. longest: KV
    tokens of the longest decode. chunks: (start, length) of each prefill chunk. shares: tokens of
    all chunks that each group takes. samples: rows through the head in the group with most.
    handoff_tokens: tokens whose KV moves between groups, of the group that receives most.
    """

    rows: int
    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    longest: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    shares: tuple[int, ...] = ()
    samples: int = 0
    handoff_tokens: int = 0


class Stages(NamedTuple):
    """Seconds of an iteration, summed over the layers. linear: norms, projections, FFN, and the
    all-reduces of tensor parallelism. head: embedding, head and sampling. prefill_attention and
    decode_attention: each path alone. communication: what the prefill path sends over the groups.
    attention: both paths and the communication as they run, overlapped or not. overhead: launches
    and the host's share that nothing hides."""

    linear: float = 0.0
    head: float = 0.0
    prefill_attention: float = 0.0
    decode_attention: float = 0.0
    communication: float = 0.0
    attention: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.head + self.attention + self.overhead


class CostModel(Protocol):
    """The ground truth of a simulation: what an iteration takes."""

    def stages(self, work: Work) -> Stages: ...
