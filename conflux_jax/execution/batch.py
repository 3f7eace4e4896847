"""From a plan to what the compiled step reads: one int32 buffer per group and iteration.

`BatchBuilder` mirrors slots and page tables from the plans' changes, so a plan need not repeat
them. `BufferLayout` says where each field lies, on the host and inside the step alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from conflux_jax.execution.adjustments import (
    LISTED,
    ONLY_LISTED,
    UNLISTED,
    biased_until,
    is_penalised,
)
from conflux_jax.execution.limits import BatchLimits
from conflux_jax.execution.prompt_scores import ScoredPrompts
from conflux_jax.plan import Admission, Bucket, IterationPlan
from pallas_kernels.blockwise import max_prefill_blocks, prefill_block_queries


@dataclass(frozen=True)
class BufferLayout:
    """Fields of one group's row of the buffer: name -> (offset, shape)."""

    fields: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    @classmethod
    def make(cls, bucket: Bucket, limits: BatchLimits) -> BufferLayout:
        groups = limits.geometry.groups
        samples = num_samples(bucket, limits)
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (bucket.rows,),
            "positions": (bucket.rows,),
            "num_decodes": (),
            "sample_rows": (samples,),
            "sample_slots": (samples,),
            "temperature": (samples,),
            "top_k": (samples,),
            "top_p": (samples,),
            "min_p": (samples,),
            "seed": (samples, 2),
            "sample_positions": (samples,),
            "wants_logprobs": (),
            "presence": (samples,),
            "frequency": (samples,),
            "repetition": (samples,),
            "listed": (samples,),
            "biased": (),
            "penalised": (),
        }
        if bucket.decode_rows:
            # Those that a device attends for: its group's, or with shared pages those of all.
            attended = bucket.decode_rows * (groups if limits.geometry.shared else 1)
            shapes |= {
                "decode_slots": (bucket.decode_rows,),
                "context_lens": (attended,),
                "decode_writes": (attended,),
                "decode_table": (attended, limits.decode_table),
            }
        if bucket.prefill:
            tokens = groups * bucket.rows
            shapes |= {
                "received": (tokens,),
                "compact": (tokens,),
                "prefill_writes": (tokens,),
                "segment_starts": (limits.max_segments,),
                "segment_contexts": (limits.max_segments,),
                "prefill_table": (limits.max_segments, limits.prefill_table),
                "blocks": (max_prefill_blocks(tokens, limits.max_segments), 3),
                "num_blocks": (),
            }
        if bucket.handoff:
            tokens = limits.handoff_pages * limits.geometry.page_tokens
            shapes |= {"handoff_sources": (groups, tokens), "handoff_writes": (tokens,)}
        fields, offset = {}, 0
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += prod(shape)
        return cls(fields, offset)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable fields `[groups, *shape]` of a buffer `[groups, size]`."""
        return {
            name: buffer[:, at : at + prod(shape)].reshape(len(buffer), *shape)
            for name, (at, shape) in self.fields.items()
        }

    def unpack(self, row: Any) -> dict[str, Any]:
        """The fields of one group's row `[size]`; NumPy or JAX."""
        return {
            name: row[at : at + prod(shape)].reshape(shape)
            for name, (at, shape) in self.fields.items()
        }


def num_samples(bucket: Bucket, limits: BatchLimits) -> int:
    """Rows of a group that may sample: its decodes, and the last token of every prompt chunk."""
    return bucket.decode_rows + (limits.max_segments if bucket.prefill else 0)


@dataclass(frozen=True)
class Batch:
    """A plan made ready: `buffer` int32 [groups, layout.size]; sample i of the plan is found at
    `[sample_group[i], sample_index[i]]` of the step's outputs. logprobs: for each request that
    asked, how many alternatives, and which sample of the plan is its own. adjusted: the admissions
    of those that change their logits. prompts: the rows that say how likely prompts were."""

    bucket: Bucket
    buffer: np.ndarray
    sample_group: np.ndarray
    sample_index: np.ndarray
    logprobs: dict[str, tuple[int, int]]
    adjusted: tuple[Admission, ...] = ()
    prompts: ScoredPrompts | None = None


FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


class BatchBuilder:
    """Mirrors the plans' changes and writes buffers. Not thread-safe; plans must come in order."""

    def __init__(self, limits: BatchLimits):
        self.limits = limits
        geometry, slots = limits.geometry, limits.max_slots
        self._layouts: dict[Bucket, BufferLayout] = {}
        self._no_write = geometry.num_pages * limits.page_rows  # past the pool: dropped
        self._decode_pages = np.zeros((slots, limits.decode_table), np.int32)
        self._prefill_pages = np.zeros((geometry.groups, slots, limits.prefill_table), np.int32)
        self._tokens: list[np.ndarray] = [np.zeros(0, np.int32)] * slots
        self._floats = np.zeros((len(FLOATS), slots), np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._listed = np.zeros(slots, np.int32)
        self._biased_until = np.zeros(slots, np.int32)  # the position
        self._penalised = np.zeros(slots, bool)
        self._seed = np.zeros((slots, 2), np.uint32)
        self._logprobs = np.full(slots, -1, np.int32)  # alternatives wanted; -1: no report
        # Prompts to be scored: the request's id, how many alternatives.
        self._scored: dict[int, tuple[str, int]] = {}

    def layout(self, bucket: Bucket) -> BufferLayout:
        if bucket not in self._layouts:
            self._layouts[bucket] = BufferLayout.make(bucket, self.limits)
        return self._layouts[bucket]

    def build(self, plan: IterationPlan) -> Batch:
        self._apply_changes(plan)
        layout = self.layout(plan.bucket)
        buffer = np.zeros((self.limits.geometry.groups, layout.size), np.int32)
        f = layout.views(buffer)
        f["sample_slots"][...] = self.limits.max_slots  # past the end: dropped
        if plan.bucket.decode_rows:
            self._decode_fields(plan, f)
        # A group's samples: its decode rows in order, then the prompts that end on it.
        counts = [len(rows) for rows in plan.decodes]
        groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        indices = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
        if plan.bucket.prefill:
            ends = np.array(self._prefill_fields(plan, f), np.int32).reshape(-1, 2)
            groups = np.concatenate([groups, ends[:, 0]])
            indices = np.concatenate([indices, ends[:, 1]])
        if plan.bucket.handoff:
            self._handoff_fields(plan, f)
        logprobs = self._wanted_logprobs(plan, f)
        adjusted = [a for a in plan.admissions if self._listed[a.slot] or self._penalised[a.slot]]
        return Batch(
            bucket=plan.bucket,
            buffer=buffer,
            sample_group=groups,
            sample_index=indices,
            logprobs=logprobs,
            adjusted=tuple(adjusted),
            prompts=self._scored_prompts(plan) if self._scored else None,
        )

    def _apply_changes(self, plan: IterationPlan) -> None:
        for change in plan.admissions:
            slot, params = change.slot, change.request.params
            self._tokens[slot] = np.asarray(change.token_ids, np.int32)
            geometry = self.limits.geometry
            for group in range(geometry.groups):
                pages = change.prefill_pages[geometry.pool_of(group)]
                self._prefill_pages[group, slot, : len(pages)] = pages
            self._set_adjustments(change)
            self._top_k[slot] = params.top_k
            seed = change.request.seed & (2**64 - 1)
            self._seed[slot] = seed >> 32, seed & (2**32 - 1)
            self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        for placed in plan.placements:
            self._decode_pages[placed.slot, : len(placed.pages)] = placed.pages
        page_tokens = self.limits.geometry.page_tokens
        for rows in plan.decodes:
            opens = rows.new_pages >= 0
            at = rows.slots[opens], rows.positions[opens] // page_tokens
            self._decode_pages[at] = rows.new_pages[opens]

    def _set_adjustments(self, change: Admission) -> None:
        slot, request, params = change.slot, change.request, change.request.params
        self._floats[:, slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        until = biased_until(request)
        only = params.allowed_token_ids is not None
        self._listed[slot] = ONLY_LISTED if only else LISTED if until else UNLISTED
        self._biased_until[slot] = until
        self._penalised[slot] = is_penalised(params)
        self._scored.pop(slot, None)
        # With output there, the prompt was scored before its first token came.
        is_new = len(change.token_ids) == len(request.prompt_token_ids)
        if params.prompt_logprobs is not None and is_new:
            self._scored[slot] = request.request_id, params.prompt_logprobs

    def _decode_fields(self, plan: IterationPlan, f: dict) -> None:
        f["decode_writes"][...] = self._no_write
        for group, rows in enumerate(plan.decodes):
            n = len(rows)
            f["num_decodes"][group] = n
            if not n:
                continue
            slots, positions = rows.slots, rows.positions
            f["decode_slots"][group, :n] = slots
            f["positions"][group, :n] = positions
            shared, first = self.limits.geometry.shared, group * plan.bucket.decode_rows
            attended = np.s_[:, first : first + n] if shared else np.s_[group, :n]
            f["context_lens"][attended] = positions
            f["decode_table"][attended] = self._decode_pages[slots]
            f["decode_writes"][attended] = self._decode_row(slots, positions)
            f["sample_rows"][group, :n] = np.arange(n)
            self._sampling_fields(f, group, slice(0, n), slots, positions + 1)

    def _decode_row(self, slots: Any, positions: np.ndarray) -> np.ndarray:
        """First pool row of tokens in decode layout."""
        tokens = self.limits.geometry.page_tokens
        pages = self._decode_pages[slots, positions // tokens]
        return pages * self.limits.page_rows + positions % tokens

    def _prefill_fields(self, plan: IterationPlan, f: dict) -> list[tuple[int, int]]:
        geometry, rows = self.limits.geometry, plan.bucket.rows
        owner, row = self._prefill_places(plan)
        total = len(owner)
        f["received"][:, :total] = owner * rows + row
        f["compact"][:, owner * rows + row] = np.arange(total, dtype=np.int32)
        f["prefill_writes"][...] = self._no_write
        at, blocks, where, used = 0, [], [], [0] * geometry.groups
        step = prefill_block_queries(geometry.groups * rows)
        for segment, chunk in enumerate(plan.chunks):
            span = slice(at, at + chunk.length)
            positions = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
            tokens = self._tokens[chunk.slot][positions]
            f["token_ids"][owner[span], row[span]] = tokens
            f["positions"][owner[span], row[span]] = positions
            f["segment_starts"][:, segment] = at
            f["segment_contexts"][:, segment] = chunk.start
            f["prefill_table"][:, segment] = self._prefill_pages[:, chunk.slot]
            at_row = owner[span] * rows + row[span]
            f["prefill_writes"][:, at_row] = self._prefill_row(chunk.slot, positions)
            blocks += [(segment, q, span.stop) for q in range(at, span.stop, step)]
            at = span.stop
            if chunk.is_last:
                group = int(owner[at - 1])
                index = plan.bucket.decode_rows + used[group]
                used[group] += 1
                f["sample_rows"][group, index] = row[at - 1]
                slot, position = np.array([chunk.slot]), np.array([chunk.start + chunk.length])
                self._sampling_fields(f, group, slice(index, index + 1), slot, position)
                where.append((group, index))
        f["blocks"][:, : len(blocks)] = blocks
        f["num_blocks"][:] = len(blocks)
        return where

    def _prefill_places(self, plan: IterationPlan) -> tuple[np.ndarray, np.ndarray]:
        """The group and the row of each token of the chunks, laid end to end."""
        shares = np.array(plan.prefill_shares, np.int32)
        starts = np.array([len(group) for group in plan.decodes], np.int32)
        if self.limits.apart:
            starts[:] = plan.bucket.decode_rows
        owner = np.repeat(np.arange(len(shares), dtype=np.int32), shares)
        cuts = np.cumsum(shares) - shares
        return owner, starts[owner] + np.arange(len(owner), dtype=np.int32) - cuts[owner]

    def _scored_prompts(self, plan: IterationPlan) -> ScoredPrompts | None:
        """The rows after which a token of a prompt came that is to be scored."""
        if not any(chunk.slot in self._scored for chunk in plan.chunks):
            return None
        owner, row = self._prefill_places(plan)
        parts, at = [], 0
        for chunk in plan.chunks:
            if chunk.slot in self._scored:
                request_id, top = self._scored[chunk.slot]
                following = self._tokens[chunk.slot][chunk.start + 1 :][: chunk.length]
                span = slice(at, at + len(following))
                parts.append((request_id, chunk.start + 1, top, owner[span], row[span], following))
            at += chunk.length
            if chunk.is_last:
                self._scored.pop(chunk.slot, None)
        return ScoredPrompts.of(self.limits.geometry.groups, parts)

    def _prefill_row(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """First pool row of tokens in prefill layout, `[groups, tokens]`."""
        tokens = self.limits.geometry.prefill_page_tokens
        pages = self._prefill_pages[:, slot, positions // tokens]
        return pages * self.limits.page_rows + positions % tokens

    def _handoff_fields(self, plan: IterationPlan, f: dict) -> None:
        geometry = self.limits.geometry
        size = geometry.page_tokens
        f["handoff_writes"][...] = self._no_write
        used = [0] * geometry.groups
        # Tokens of this iteration's chunks are not in the pool yet: (start, compact index).
        fresh, at = {}, 0
        for chunk in plan.chunks:
            fresh[chunk.slot] = (chunk.start, at)
            at += chunk.length
        for move in plan.handoffs:
            first = move.first_page * size
            last = min((move.first_page + move.num_pages) * size, move.num_tokens)
            positions = np.arange(first, last, dtype=np.int32)
            at = used[move.group]
            used[move.group] += len(positions)
            span = slice(at, at + len(positions))
            sources = self._prefill_row(move.slot, positions)
            if move.slot in fresh:
                start, compact = fresh[move.slot]
                token = np.maximum(compact + positions - start, 0)
                sources = np.where(positions >= start, -1 - f["received"][0, token], sources)
            f["handoff_sources"][:, move.group, span] = sources
            f["handoff_writes"][move.group, span] = self._decode_row(move.slot, positions)

    def _sampling_fields(self, f: dict, group: int, at: slice, slots: Any, positions: Any) -> None:
        f["sample_slots"][group, at] = slots
        f["listed"][group, at] = self._listed[slots]
        for name, values in zip(FLOATS, self._floats, strict=True):
            f[name][group, at] = values[slots].view(np.int32)
        f["top_k"][group, at] = self._top_k[slots]
        f["seed"][group, at] = self._seed[slots].view(np.int32)
        f["sample_positions"][group, at] = positions
        if (positions < self._biased_until[slots]).any():
            f["biased"][group] = 1

    def _wanted_logprobs(self, plan: IterationPlan, f: dict) -> dict[str, tuple[int, int]]:
        ends = [chunk.slot for chunk in plan.chunks if chunk.is_last]
        slots = np.concatenate([*(rows.slots for rows in plan.decodes), np.array(ends, np.int32)])
        asking = (self._logprobs[slots] >= 0).nonzero()[0].tolist()
        f["wants_logprobs"][:] = bool(asking)
        f["penalised"][:] = self._penalised[slots].any()
        if not asking:
            return {}
        ids = plan.samples
        return {ids[index]: (int(self._logprobs[slots[index]]), index) for index in asking}
