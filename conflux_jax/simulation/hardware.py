"""One type of GPU as the simulation's ground truth: seconds of every operator that serving runs.

The operators' figures were fitted to measurements (`hardware_fit`); what no table says is stated
here with its reason. Nothing was fitted to what a whole system does.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from conflux_jax.config import ConfigError
from conflux_jax.simulation.operators import (
    BYTES,
    Collective,
    DecodeAttention,
    Gemm,
    PrefillAttention,
    Tiles,
    memory_share,
    prefill_tiles,
)

FORMAT = 1  # of the JSON file
OPERATORS = {"gemm": Gemm, "prefill": PrefillAttention, "decode": DecodeAttention}
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


@dataclass(frozen=True)
class Hardware:
    """sms: streaming multiprocessors. memory_bytes: of one GPU. collectives: by name, then by the
    number of GPUs; times of other numbers lie between, in proportion to the logarithm, and beyond
    the largest only start-up grows, as it did between the last two.

    Stated, for no table has them:
    sm_bytes_s: that one SM can draw, 64 bytes a clock over its port at 1.755 GHz. Together they
    could draw four times what memory gives, so a quarter of them nearly do.
    sm_grain: SMs are partitioned in eights on Hopper (GreenContext).
    contention: what each attention path loses while the other runs beside it, of the power budget
    and of the memory's row buffers.
    small_start_s: of a memory-bound kernel inside a CUDA graph.
    fork_s: to put decode attention on a stream of its own and wait for it: two events.
    iteration_s: of the host's part that the device waits for: launch of the graphs, copies of the
    plan and of the tokens.
    """

    name: str
    source: str
    sms: int
    memory_bytes: float
    gemm: Gemm
    prefill: PrefillAttention
    decode: DecodeAttention
    collectives: dict[str, dict[int, Collective]]
    sm_bytes_s: float = 64 * 1.755e9
    sm_grain: int = 8
    contention: float = 0.05
    small_start_s: float = 2e-6
    fork_s: float = 5e-6
    iteration_s: float = 2e-4
    _shares: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    _gemms: dict[tuple[int, int, int, int], float] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def gemm_s(self, m: int, n: int, k: int, sms: int | None = None) -> float:
        """[m, k] x [k, n] in bfloat16."""
        sms = sms or self.sms
        key = (m, n, k, sms)
        if (seconds := self._gemms.get(key)) is None:
            share = self.memory_share(sms)
            seconds = self.gemm.seconds(m, n, k, sms, self.sms, share) if m else 0.0
            self._gemms[key] = seconds
        return seconds

    def elementwise_s(self, num_bytes: float, sms: int | None = None) -> float:
        """Norms, rotation, SwiGLU: one kernel that reads and writes so many bytes in all."""
        rate = self.gemm.memory_bytes_s * self.memory_share(sms or self.sms)
        return self.small_start_s + num_bytes / rate if num_bytes else 0.0

    def prefill_attention_s(
        self,
        chunks: Iterable[tuple[int, int]],
        heads: int,
        sms: int | None = None,
        head_dim: int = 128,
    ) -> float:
        """Causal attention of chunks (start, length), each to all that comes before it, in one
        launch. heads: query heads on this GPU."""
        return self.tiles_s(prefill_tiles(chunks, heads), sms, head_dim)

    def tiles_s(self, tiles: Tiles, sms: int | None = None, head_dim: int = 128) -> float:
        """The same, of tiles that were counted before."""
        if not tiles.blocks:
            return 0.0
        return self.prefill.seconds(*tiles, sms or self.sms, head_dim)

    def decode_attention_s(
        self,
        rows: int,
        context_tokens: int,
        kv_heads: int,
        sms: int | None = None,
        head_dim: int = 128,
    ) -> float:
        """rows: decodes. context_tokens: KV tokens that they read in all, each of `kv_heads` heads
        on this GPU. The queries' number hardly matters: they share what is read."""
        if not rows:
            return 0.0
        sms = sms or self.sms
        kv_bytes = context_tokens * kv_heads * 2 * head_dim * BYTES
        return self.decode.seconds(rows, kv_bytes, kv_heads, sms, self.memory_share(sms))

    def all_to_all_s(self, num_bytes: float, gpus: int) -> float:
        """num_bytes: of one GPU's whole buffer, its own part included."""
        return self.collective_s("all_to_all", num_bytes, gpus)

    def all_reduce_s(self, num_bytes: float, gpus: int) -> float:
        """num_bytes: of the array that every GPU has."""
        return self.collective_s("all_reduce", num_bytes, gpus)

    def all_gather_s(self, num_bytes: float, gpus: int) -> float:
        """num_bytes: of the result."""
        return self.collective_s("all_gather", num_bytes, gpus)

    def reduce_scatter_s(self, num_bytes: float, gpus: int) -> float:
        """num_bytes: of the array that every GPU starts with."""
        return self.collective_s("reduce_scatter", num_bytes, gpus)

    def send_s(self, num_bytes: float) -> float:
        """From one GPU to another: half of an all-to-all between two stays where it is."""
        return self.collective_s("all_to_all", 2 * num_bytes, 2)

    def collective_s(self, name: str, num_bytes: float, gpus: int) -> float:
        if gpus == 1 or not num_bytes:
            return 0.0
        by_gpus = self.collectives[name]
        if (collective := by_gpus.get(gpus)) is None:
            return _between(by_gpus, num_bytes, gpus)
        return collective.seconds(num_bytes)

    def memory_share(self, sms: int) -> float:
        """Of the bandwidth that all SMs have together."""
        if (share := self._shares.get(sms)) is None:
            rate = self.decode.memory_bytes_s
            whole = memory_share(self.sms, self.sm_bytes_s, rate)
            share = self._shares[sms] = memory_share(sms, self.sm_bytes_s, rate) / whole
        return share

    @functools.cached_property
    def decode_sms(self) -> int:
        """Just enough for 90% of the bandwidth, leaving some: what decode attention has while
        prefill attention runs beside it."""
        options = range(self.sm_grain, self.sms, self.sm_grain)
        return next((sms for sms in options if self.memory_share(sms) >= 0.9), options[-1])

    def scaled(
        self,
        name: str,
        *,
        source: str,
        sms: int | None = None,
        flops: float = 1.0,
        memory: float = 1.0,
        link: float = 1.0,
        memory_bytes: float | None = None,
        sm_bytes_s: float | None = None,
    ) -> Hardware:
        """Another GPU with the same kernels: rates in proportion to its peaks. flops, memory, link:
        its peaks over this one's. Start-ups stay as they are."""
        sms = sms or self.sms
        per_sm = flops * self.sms / sms
        return replace(
            self,
            name=name,
            source=source,
            sms=sms,
            memory_bytes=memory_bytes or self.memory_bytes,
            sm_bytes_s=sm_bytes_s or self.sm_bytes_s,
            gemm=replace(
                self.gemm,
                flops_s=self.gemm.flops_s * flops,
                memory_bytes_s=self.gemm.memory_bytes_s * memory,
                few_rows_bytes_s=self.gemm.few_rows_bytes_s * memory,
            ),
            prefill=replace(self.prefill, tile_s=self.prefill.tile_s / per_sm),
            decode=replace(self.decode, memory_bytes_s=self.decode.memory_bytes_s * memory),
            collectives={
                kind: {n: replace(c, bytes_s=c.bytes_s * link) for n, c in by_gpus.items()}
                for kind, by_gpus in self.collectives.items()
            },
        )

    def to_json(self) -> str:
        document = {"format": FORMAT, **{name: getattr(self, name) for name in _stored()}}
        for name in OPERATORS:
            document[name] = asdict(document[name])
        document["collectives"] = {
            kind: {str(gpus): asdict(figures) for gpus, figures in by_gpus.items()}
            for kind, by_gpus in self.collectives.items()
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Raises ConfigError that names what is missing or wrong."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ConfigError(f"format: must be {FORMAT}, as bench.hardware writes it")
        _same_names("", document, {"format", *_stored()})
        values = {name: document[name] for name in _stored()}
        for name in ("name", "source"):
            if not isinstance(values[name], str):
                raise ConfigError(f"{name}: must be a string, got {values[name]!r}")
        for name in values.keys() - {"name", "source", "collectives", *OPERATORS}:
            _positive(name, values[name], zero=name == "contention")
        for name in ("sms", "sm_grain"):
            if type(values[name]) is not int:
                raise ConfigError(f"{name}: must be an integer, got {values[name]!r}")
        for name, kind in OPERATORS.items():
            values[name] = _figures(name, values[name], kind)
        values["collectives"] = _read_collectives(values["collectives"])
        return cls(**values)


@functools.cache
def preset(name: str) -> Hardware:
    """h100: fitted. h200: the same chip with faster memory, which is all that its data sheet
    changes. a100: scaled from the H100's figures by the ratios of the data sheets' peaks, not
    fitted. Raises ConfigError for any other name."""
    if name not in PRESETS:
        raise ConfigError(f"hardware: must be one of {', '.join(PRESETS)} or a file, got {name!r}")
    h100 = Hardware.from_json(
        resources.files("conflux_jax.simulation").joinpath("h100.json").read_text("utf-8")
    )
    if name == "h200":
        return h100.scaled(
            "H200 SXM 141 GB",
            source=f"memory 4.8 TB/s instead of 3.35; otherwise: {h100.source}",
            memory=4.8 / 3.35,
            memory_bytes=141e9,
        )
    if name == "a100":
        return h100.scaled(
            "A100 SXM 80 GB",
            source="scaled by the data sheets' ratios, not fitted",
            sms=108,
            flops=312 / 989,
            memory=2.039 / 3.35,
            link=300 / 450,
            sm_bytes_s=64 * 1.41e9,
        )
    return h100


PRESETS = ("h100", "h200", "a100")


def load_hardware(name: str) -> Hardware:
    """A preset, or a file that `python -m bench.hardware --write` made. Raises ConfigError that
    names the file and what is wrong with it."""
    if name in PRESETS or not (path := Path(name)).suffix:
        return preset(name)
    try:
        return Hardware.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"hardware {path}: {error}") from error


def _between(by_gpus: dict[int, Collective], num_bytes: float, gpus: int) -> float:
    """Of a number of GPUs that was not measured."""
    known = sorted(by_gpus)
    right = next((at for at, n in enumerate(known) if n > gpus), len(known) - 1) or 1
    low, high = by_gpus[known[right - 1]], by_gpus[known[right]]
    share = math.log(gpus / known[right - 1]) / math.log(known[right] / known[right - 1])
    low_s, high_s = low.seconds(num_bytes), high.seconds(num_bytes)
    if share > 1:
        return high_s + (share - 1) * max(0.0, high.start_s - low.start_s)
    return low_s + share * (high_s - low_s)


def _stored() -> list[str]:
    return [item.name for item in fields(Hardware) if item.init]


def _read_collectives(document: Any) -> dict[str, dict[int, Collective]]:
    _same_names("collectives.", document, set(COLLECTIVES))
    found: dict[str, dict[int, Collective]] = {}
    for kind, by_gpus in document.items():
        if not isinstance(by_gpus, dict) or len(by_gpus) < 2 or not all(map(str.isdigit, by_gpus)):
            raise ConfigError(f"collectives.{kind}: must have figures of two numbers of GPUs")
        found[kind] = {
            int(gpus): _figures(f"collectives.{kind}.{gpus}", figures, Collective)
            for gpus, figures in by_gpus.items()
        }
    return found


def _figures(name: str, document: Any, kind: type) -> Any:
    _same_names(f"{name}.", document, {item.name for item in fields(kind)})
    for part, value in document.items():
        _positive(f"{name}.{part}", value)
    return kind(**document)


def _same_names(prefix: str, document: Any, names: set[str]) -> None:
    if not isinstance(document, dict):
        raise ConfigError(f"{prefix.rstrip('.')}: must be an object, got {document!r}")
    if wrong := sorted(names ^ set(document)):
        problem = "missing" if wrong[0] in names else "no such number"
        raise ConfigError(f"{prefix}{wrong[0]}: {problem}")


def _positive(name: str, value: Any, zero: bool = False) -> None:
    if (
        type(value) in (int, float)
        and math.isfinite(value)
        and (value > 0 or (zero and value == 0))
    ):
        return
    limit = "of at least 0" if zero else "above 0"
    raise ConfigError(f"{name}: must be a number {limit}, got {value!r}")
