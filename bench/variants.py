"""The scheme, its ablations and the baseline: what `bench.long_prefill` sets side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """key: its names in the JSON. settings: of the config. uniform: one group with all devices as
    its TP ranks."""

    key: str
    label: str
    settings: dict[str, Any]
    uniform: bool = False

    def on(self, sp: int, tp: int) -> dict[str, Any]:
        """All of its settings on a mesh that the scheme divides into `sp` groups of `tp`."""
        mesh = {"sp": 1, "tp": sp * tp} if self.uniform else {"sp": sp, "tp": tp}
        return {"overlap": "stream", **mesh, **self.settings}


SCHEME = Variant("scheme", "the scheme", {})
VARIANTS = (
    SCHEME,
    Variant("no_overlap", "no attention overlap", {"overlap": "none"}),
    Variant("spread_decode", "decode spread over sp", {"decode_attention": "spread"}),
    Variant("no_batching", "linear layers by phase", {"linear": "apart"}),
    Variant("uniform_tp", "uniform TP, chunked", {}, uniform=True),
)
