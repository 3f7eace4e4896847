"""Fits the operators' figures to tables of measured latencies, and says how well they fit.

The table is a CSV with the columns op, source, a, b, c, d, latency_ms (and any others), sizes
written as name=number. Every third row of an operator is held out; the rest are fitted on the
logarithm of predicted over measured, robustly, so that a small product counts as much as a large
one and an outlier counts little.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from conflux_jax.config import ConfigError
from conflux_jax.simulation.operators import (
    BYTES,
    HEAD_DIM,
    Collective,
    DecodeAttention,
    Gemm,
    PrefillAttention,
    chunk_tiles,
)

HELD_OUT = 3  # every third row
ROBUST = 0.08  # relative error from which a row counts less than its square
SIZES = {  # of each operator, in the order of its columns
    "gemm_bf16": ("m", "n", "k"),
    "attn_prefill_causal_hd128": ("b", "s", "hq", "hkv"),
    "attn_decode_hd128": ("b", "s", "hq", "hkv"),
    "nccl_all_gather": ("gpus", "bytes"),
    "nccl_all_reduce": ("gpus", "bytes"),
    "nccl_alltoall": ("gpus", "bytes"),
    "nccl_reduce_scatter": ("gpus", "bytes"),
}
COLLECTIVES = {
    "all_gather": "nccl_all_gather",
    "all_reduce": "nccl_all_reduce",
    "all_to_all": "nccl_alltoall",
    "reduce_scatter": "nccl_reduce_scatter",
}


@dataclass(frozen=True)
class Errors:
    """Relative, of |predicted / measured - 1|. region: rows that serving spends its time in."""

    operator: str
    rows: int
    fitted: float
    median: float
    p90: float
    worst: float
    region: float
    region_rows: int


@dataclass(frozen=True)
class Fit:
    """figures: by operator, as `Hardware` takes them. errors: of held-out rows."""

    gemm: Gemm
    prefill: PrefillAttention
    decode: DecodeAttention
    collectives: dict[str, dict[int, Collective]]
    errors: tuple[Errors, ...]


def read_tables(path: Path) -> dict[str, np.ndarray]:
    """Rows by operator: its sizes, then seconds. Rows of other operators or number formats are
    left out. Raises ConfigError that names file and line."""
    rows: dict[str, list[list[float]]] = {name: [] for name in SIZES}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                if (op := row.get("op")) in SIZES:
                    try:
                        rows[op].append(_parsed(row, SIZES[op]))
                    except (KeyError, TypeError, ValueError) as error:
                        raise ConfigError(f"{path}:{number}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, found in rows.items():
        if not found:
            raise ConfigError(f"{path}: has no rows of op {name}")
    return {name: np.array(found) for name, found in rows.items()}


def _parsed(row: dict[str, str], names: tuple[str, ...]) -> list[float]:
    values = []
    for column, name in zip("abcd", names, strict=False):
        cell = row[column] or ""
        given, _, value = cell.partition("=")
        if given != name:
            raise ValueError(f"column {column}: must be {name}=NUMBER, got {cell!r}")
        values.append(float(value))
    seconds = float(row["latency_ms"]) / 1e3
    if not seconds > 0 or min(values) < 1:
        raise ValueError(f"sizes and latency_ms must be positive, got {row}")
    return [*values, seconds]


def fit(tables: dict[str, np.ndarray], sms: int, peak_flops: float, peak_bytes_s: float) -> Fit:
    """sms and peaks of the GPU that was measured; no figure is let beyond a peak."""
    errors: list[Errors] = []
    gemm = _fit_gemm(tables["gemm_bf16"], sms, peak_flops, peak_bytes_s, errors)
    prefill = _fit_prefill(tables["attn_prefill_causal_hd128"], sms, errors)
    decode = _fit_decode(tables["attn_decode_hd128"], sms, peak_bytes_s, errors)
    collectives: dict[str, dict[int, Collective]] = {}
    for name, op in COLLECTIVES.items():
        collectives[name] = _fit_collective(name, tables[op], errors)
    return Fit(gemm, prefill, decode, collectives, tuple(errors))


def _fit_gemm(table: np.ndarray, sms: int, flops: float, rate: float, errors: list[Errors]) -> Gemm:
    m, n, k, seconds = table.T
    figures = _least_squares(
        lambda x, of: Gemm(*x).seconds(m[of], n[of], k[of], sms, sms),
        seconds,
        first=Gemm(3e-6, 0.86 * flops, 1e-6, 0.1, 1e-3, 0.85 * rate, 0.86 * rate, 2, 8),
        low=Gemm(1e-6, 0.3 * flops, 1e-8, 0.01, 1e-4, 0.3 * rate, 0.3 * rate, 1, 1.2),
        high=Gemm(2e-5, flops, 1e-5, 0.5, 1e-2, rate, rate, 4, 20),
    )
    gemm = Gemm(*figures)
    region = (n >= 2048) & (k >= 2048)
    errors.append(_errors("gemm", gemm.seconds(m, n, k, sms, sms), seconds, region))
    return gemm


def _fit_prefill(table: np.ndarray, sms: int, errors: list[Errors]) -> PrefillAttention:
    batch, length, heads, _, seconds = table.T
    tiles, blocks, longest = chunk_tiles(np.zeros_like(length), length, heads * batch)
    figures = _least_squares(
        lambda x, of: PrefillAttention(*x).seconds(tiles[of], blocks[of], longest[of], sms),
        seconds,
        first=PrefillAttention(1e-5, 1.6e-6, 1e-6, 3),
        low=PrefillAttention(1e-6, 1e-7, 1e-8, 1.2),
        high=PrefillAttention(5e-5, 2e-5, 2e-5, 20),
    )
    prefill = PrefillAttention(*figures)
    predicted = prefill.seconds(tiles, blocks, longest, sms)
    region = (length >= 1024) & (heads >= 4)
    errors.append(_errors("prefill attention", predicted, seconds, region))
    return prefill


def _fit_decode(
    table: np.ndarray, sms: int, peak_bytes_s: float, errors: list[Errors]
) -> DecodeAttention:
    rows, context, _, kv_heads, seconds = table.T
    kv_bytes = rows * context * kv_heads * 2 * HEAD_DIM * BYTES
    figures = _least_squares(
        lambda x, of: DecodeAttention(*x).seconds(
            rows[of], kv_bytes[of], kv_heads[of], sms, cached=True
        ),
        seconds,
        first=DecodeAttention(1.2e-5, 0.95 * peak_bytes_s, 5e-6, 5e7, 6e12, 3.5e-6, 2),
        low=DecodeAttention(1e-6, 0.3 * peak_bytes_s, 1e-8, 1e7, 1e12, 1e-7, 1.1),
        high=DecodeAttention(5e-5, peak_bytes_s, 5e-5, 2e8, 3e13, 1e-4, 10),
    )
    decode = DecodeAttention(*figures)
    predicted = decode.seconds(rows, kv_bytes, kv_heads, sms, cached=True)
    errors.append(_errors("decode attention", predicted, seconds, kv_bytes >= 1e8))
    return decode


def _fit_collective(name: str, table: np.ndarray, errors: list[Errors]) -> dict[int, Collective]:
    """Each number of GPUs for itself: rings, trees and switches differ in more than a factor."""
    found: dict[int, Collective] = {}
    predicted = np.zeros(len(table))
    for gpus in sorted({int(count) for count in table[:, 0]}):
        rows = table[:, 0] == gpus
        num_bytes, seconds = table[rows, 1], table[rows, 2]
        figures = _least_squares(
            lambda x, of, num_bytes=num_bytes: Collective(*x).seconds(num_bytes[of]),
            seconds,
            first=Collective(7e-6, 8e-6, 1e6, 4e11),
            low=Collective(1e-6, 1e-9, 1e3, 1e10),
            high=Collective(1e-4, 2e-4, 1e8, 2e12),
            held=_held_out(len(table))[rows],
        )
        found[gpus] = Collective(*figures)
        predicted[rows] = found[gpus].seconds(num_bytes)
    region = (table[:, 1] >= 1e5) & (table[:, 1] <= 3e8)
    errors.append(_errors(name, predicted, table[:, 2], region))
    return found


def _least_squares(
    predict: Callable[[np.ndarray, np.ndarray], np.ndarray],
    seconds: np.ndarray,
    first: Any,
    low: Any,
    high: Any,
    held: np.ndarray | None = None,
) -> list[float]:
    """Figures between `low` and `high`, in logarithms: they differ by many powers of ten."""
    rows = ~(_held_out(len(seconds)) if held is None else held)
    target = np.log(seconds[rows])
    found = least_squares(
        lambda x: np.log(predict(np.exp(x), rows)) - target,
        np.log(astuple(first)),
        bounds=(np.log(astuple(low)), np.log(astuple(high))),
        loss="soft_l1",
        f_scale=ROBUST,
    )
    return [float(f"{value:.4g}") for value in np.exp(found.x)]


def _held_out(rows: int) -> np.ndarray:
    return np.arange(rows) % HELD_OUT == 1


def _errors(
    operator: str, predicted: np.ndarray, measured: np.ndarray, region: np.ndarray
) -> Errors:
    error, held = np.abs(predicted / measured - 1), _held_out(len(measured))
    return Errors(
        operator=operator,
        rows=int(held.sum()),
        fitted=float(np.median(error[~held])),
        median=float(np.median(error[held])),
        p90=float(np.percentile(error[held], 90)),
        worst=float(error[held].max()),
        region=float(np.median(error[held & region])),
        region_rows=int((held & region).sum()),
    )
