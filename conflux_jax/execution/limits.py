"""The static sizes of an engine's steps, from its config. No JAX: simulated ones have them too."""

from __future__ import annotations

from dataclasses import dataclass

from conflux_jax.config import Config
from conflux_jax.plan import PoolGeometry
from conflux_jax.scheduler.buckets import Ladders

CPU_BUCKET_GROWTH = 2.0
BUCKET_GROWTH = 1.125


@dataclass(frozen=True)
class BatchLimits:
    """The static sizes beside the bucket's. page_rows: pool rows of one page on one device. apart:
    prefill rows come after all decode rows of the bucket, used or not (`Ladders.apart`)."""

    geometry: PoolGeometry
    page_rows: int
    max_slots: int
    max_model_len: int
    max_segments: int
    handoff_pages: int
    apart: bool = False

    @property
    def decode_table(self) -> int:
        """Pages of the longest context in decode layout."""
        tokens = min(self.max_model_len, self.geometry.num_pages * self.geometry.page_tokens)
        return self.geometry.decode_pages(tokens)

    @property
    def prefill_table(self) -> int:
        tokens = min(
            self.max_model_len, self.geometry.num_pages * self.geometry.prefill_page_tokens
        )
        return self.geometry.prefill_pages(tokens)


def ladders_for(config: Config, geometry: PoolGeometry, on_cpu: bool) -> Ladders:
    """The buckets that an engine of that config and pool compiles."""
    scheduler = config.scheduler
    return Ladders.make(
        max_decodes=scheduler.max_num_seqs,
        level=-(-scheduler.max_num_batched_tokens // geometry.groups),
        growth=scheduler.bucket_growth or (CPU_BUCKET_GROWTH if on_cpu else BUCKET_GROWTH),
        handoff=geometry.needs_handoff,
        rows=scheduler.rows_ladder,
        decode_rows=scheduler.decode_rows_ladder,
        apart=config.execution.linear == "apart",
    )
