"""What requests change in their logits before a token is chosen: biases and bans, penalties.

A request's lists and the tokens that it has seen are kept on the device, by slot, and written there
once, when it is admitted. From then on each step counts the token that it samples itself: the next
step is launched before the host knows it. A batch in which nobody asks skips all of it but that
count, which is one element a row.

Lists are sparse, of a fixed number of entries. Tokens seen are one int16 for each token of the
vocabulary: no shorter list would hold a long prompt. The last few of an answer are kept in their
order too: what ends a phrase that must not come is banned once all before it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int16

from conflux_jax.execution.sampling import VocabShard
from conflux_jax.models.decoder import TP
from conflux_jax.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_PHRASES,
    MAX_BAD_TOKEN_IDS,
    MAX_ENDING_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_PHRASE_TOKENS,
    Request,
    SamplingParams,
)

NUM_ENTRIES = max(MAX_LOGIT_BIAS + MAX_BAD_TOKEN_IDS, MAX_ALLOWED_TOKEN_IDS) + MAX_ENDING_TOKEN_IDS
FOREVER = 2**31 - 1  # a position that no token has
BEFORE = MAX_PHRASE_TOKENS - 1  # tokens of a phrase before its last
IN_PROMPT, ONCE = 1, 2  # of a mark: its first bit, and what each time generated adds
MOST_TIMES = (2**15 - 1 - IN_PROMPT) // ONCE
UNLISTED, LISTED, ONLY_LISTED = range(3)


class SlotTables(NamedTuple):
    """Of the request in each slot that adjusts its logits; of others, what was there before.

    marks: of each token, whether it is in the prompt (IN_PROMPT) and how often it was generated
    (ONCE each, up to MOST_TIMES). ids: tokens with a bias, in no order; -1: none. biases: added
    (minus infinity: banned) to tokens at positions before `untils`. phrases: tokens that must not
    come in that order, the last one at the end, -1 in front of the first; all -1: none. recent: the
    last tokens generated, the one at position p of prompt and output at p modulo their number; -1:
    none.
    """

    marks: Int16[Array, "*slots vocab"]
    ids: Int[Array, "*slots entries"]
    biases: Float[Array, "*slots entries"]
    untils: Int[Array, "*slots entries"]
    phrases: Int[Array, "*slots phrases tokens"]
    recent: Int[Array, "*slots tokens"]


class RowAdjustments(NamedTuple):
    """Per sampled row. listed: UNLISTED, LISTED, or ONLY_LISTED where no other token may come.
    position: of the token to draw. biased, penalised: whether any row is (scalars)."""

    slots: Int[Array, " samples"]
    listed: Int[Array, " samples"]
    position: Int[Array, " samples"]
    presence: Float[Array, " samples"]
    frequency: Float[Array, " samples"]
    repetition: Float[Array, " samples"]
    biased: Bool[Array, ""]
    penalised: Bool[Array, ""]


def table_specs() -> SlotTables:
    """How the tables lie on the mesh: marks split as the logits are, the same in all groups."""
    return _specs(PartitionSpec(None, TP))


def row_specs() -> SlotTables:
    """The same, of one slot."""
    return _specs(PartitionSpec(TP))


def _specs(marks: PartitionSpec) -> SlotTables:
    specs: Any = dict.fromkeys(SlotTables._fields, PartitionSpec()) | {"marks": marks}
    return SlotTables(**specs)


def table_shapes(slots: int, vocab: int, mesh: Mesh) -> SlotTables:
    """Shapes, types and shardings of the tables, over the whole mesh."""
    return _structs((slots,), vocab, table_specs(), mesh)


def slot_bytes(vocab: int, tp: int) -> int:
    """Bytes of one slot in the tables of one device.

    Worked, 152,064 tokens and tp = 2: 76,032 marks of 2 bytes, 1,216 entries of 12, 64 phrases of
    16 tokens and 16 recent ones of 4 each: 152,064 + 14,592 + 4,096 + 64 = 170,816."""
    whole = {
        name: prod(shape) * jnp.dtype(dtype).itemsize
        for name, (shape, dtype) in _shapes(vocab).items()
    }
    return sum(whole.values()) - whole["marks"] + whole["marks"] // tp


def _shapes(vocab: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Of each field, what a slot has of it, and its type."""
    return {
        "marks": ((vocab,), jnp.int16),
        "ids": ((NUM_ENTRIES,), jnp.int32),
        "biases": ((NUM_ENTRIES,), jnp.float32),
        "untils": ((NUM_ENTRIES,), jnp.int32),
        "phrases": ((MAX_BAD_PHRASES, MAX_PHRASE_TOKENS), jnp.int32),
        "recent": ((MAX_PHRASE_TOKENS,), jnp.int32),
    }


def _structs(slots: tuple[int, ...], vocab: int, specs: Any, mesh: Mesh) -> SlotTables:
    made: Any = {
        name: jax.ShapeDtypeStruct(slots + shape, dtype, sharding=NamedSharding(mesh, spec))
        for (name, (shape, dtype)), spec in zip(_shapes(vocab).items(), specs, strict=True)
    }
    return SlotTables(**made)


def allocate_tables(slots: int, vocab: int, mesh: Mesh) -> SlotTables:
    """Empty tables."""
    structs = table_shapes(slots, vocab, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, structs)
    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), structs)
    return jax.jit(zeros, out_shardings=shardings)()


def lower_write(slots: int, vocab: int, mesh: Mesh) -> jax.stages.Lowered:
    """The program `(tables, slot, row) -> tables` that puts a request's row in place."""

    def write(tables: SlotTables, slot: Int[Array, ""], row: SlotTables) -> SlotTables:
        put = partial(lax.dynamic_update_index_in_dim, index=slot, axis=0)
        return jax.tree.map(put, tables, row)

    tables = table_shapes(slots, vocab, mesh)
    row = _structs((), vocab, row_specs(), mesh)
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    shardings = jax.tree.map(lambda x: x.sharding, tables)
    return jax.jit(write, donate_argnums=(0,), out_shardings=shardings).lower(tables, slot, row)


# On the host, at admission


def is_penalised(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )


def biased_until(request: Request) -> int:
    """The position before which some token has a bias: 0 where none ever has."""
    params = request.params
    banned = params.bad_token_ids or request.bad_phrases
    if params.bias_pairs or banned or params.allowed_token_ids is not None:
        return FOREVER
    return len(request.prompt_token_ids) + params.min_tokens if params.min_tokens else 0


def row_of(request: Request, token_ids: Any, vocab: int) -> SlotTables:
    """What the tables are to have of a request. token_ids: its prompt, and what it had generated
    before it was preempted."""
    tokens = np.asarray(token_ids, np.int32)
    prompt = len(request.prompt_token_ids)
    marks = np.minimum(np.bincount(tokens[prompt:], minlength=vocab), MOST_TIMES) * ONCE
    marks[tokens[:prompt]] |= IN_PROMPT
    entries = _entries(request)
    ids = np.full(NUM_ENTRIES, -1, np.int32)
    biases, untils = np.zeros(NUM_ENTRIES, np.float32), np.zeros(NUM_ENTRIES, np.int32)
    for column, values in zip((ids, biases, untils), zip(*entries, strict=True), strict=False):
        column[: len(values)] = values
    phrases = np.full((MAX_BAD_PHRASES, MAX_PHRASE_TOKENS), -1, np.int32)
    for place, phrase in zip(phrases, request.bad_phrases, strict=False):
        place[-len(phrase) :] = phrase
    recent = np.full(MAX_PHRASE_TOKENS, -1, np.int32)
    last = np.arange(max(prompt, len(tokens) - MAX_PHRASE_TOKENS), len(tokens))
    recent[last % MAX_PHRASE_TOKENS] = tokens[last]
    row: Any = marks.astype(np.int16), ids, biases, untils, phrases, recent
    return SlotTables(*row)


def _entries(request: Request) -> list[tuple[int, float, int]]:
    """(token, bias, until) of all that a request lists. A token that ends the answer may have an
    entry more, for its first tokens."""
    params = request.params
    biases = dict(params.bias_pairs) | dict.fromkeys(params.bad_token_ids, -np.inf)
    allowed = params.allowed_token_ids
    if allowed is not None:
        biases = {token_id: biases.get(token_id, 0.0) for token_id in allowed}
    entries = [(token_id, bias, FOREVER) for token_id, bias in biases.items()]
    if params.min_tokens:
        until = len(request.prompt_token_ids) + params.min_tokens
        for token_id in sorted({*request.eos_token_ids, *params.stop_token_ids}):
            if allowed is None or token_id in biases:
                entries.append((token_id, -np.inf, until))
    return entries


# In the step


@dataclass(frozen=True)
class TableAdjustment:
    """By the slots' tables; a `sampling.Adjustment`. Rows that ask for nothing keep every bit."""

    rows: RowAdjustments
    tables: SlotTables
    vocab: VocabShard

    def apply(self, logits: Float[Array, "samples shard"]) -> Float[Array, "samples shard"]:
        rows = self.rows

        def change(logits):
            logits = lax.cond(rows.biased, self._biased, lambda x: x, logits)
            return lax.cond(rows.penalised, self._penalised, lambda x: x, logits)

        # A branch that changes nothing hands its operand on, in place.
        return lax.cond(rows.biased | rows.penalised, change, lambda x: x, logits)

    def undo(
        self, values: Float[Array, " samples"], places: Int[Array, " samples"]
    ) -> Float[Array, " samples"]:
        """To the last bit or so: sums are rounded both ways. Rows that ask for nothing: exactly."""
        rows = self.rows
        marks = self.tables.marks.at[rows.slots, places].get(mode="clip")
        times = (marks >> 1).astype(jnp.float32)
        values = values + rows.presence * (times > 0) + rows.frequency * times
        repetition = _divisor(rows.repetition)
        repeated = jnp.where(values > 0, values * repetition, values / repetition)
        listed, biases = self._biases()
        finite = (listed == places[:, None]) & (biases > -jnp.inf)
        return jnp.where(marks > 0, repeated, values) - jnp.where(finite, biases, 0.0).sum(axis=1)

    def _biases(self) -> tuple[Int[Array, "samples entries"], Float[Array, "samples entries"]]:
        """Places in this rank's part, and what is added there now. Past the end, and so dropped:
        other ranks' tokens, and lists that are not this row's."""
        rows, vocab = self.rows, self.vocab
        ids, biases, untils = (
            jnp.take(x, rows.slots, axis=0, mode="clip")
            for x in (self.tables.ids, self.tables.biases, self.tables.untils)
        )
        places = jnp.where(ids >= 0, ids - vocab.offset, -1)
        places = jnp.where((rows.listed > UNLISTED)[:, None] & (places >= 0), places, vocab.size)
        return places, jnp.where(rows.position[:, None] < untils, biases, 0.0)

    def _biased(self, logits: Float[Array, "samples shard"]) -> Float[Array, "samples shard"]:
        places, biases = self._biases()
        row = jnp.arange(logits.shape[0])[:, None]
        listed = jnp.take_along_axis(logits, places, axis=1, mode="fill", fill_value=-jnp.inf)
        only = (self.rows.listed == ONLY_LISTED)[:, None]
        logits = jnp.where(only, -jnp.inf, logits).at[row, places].max(listed, mode="drop")
        logits = logits.at[row, places].add(biases, mode="drop")
        return logits.at[row, self._phrase_ends()].set(-jnp.inf, mode="drop")

    def _phrase_ends(self) -> Int[Array, "samples phrases"]:
        """Places of tokens that would end a phrase whose others are what was generated last."""
        rows, vocab = self.rows, self.vocab
        phrases, recent = (
            jnp.take(x, rows.slots, axis=0, mode="clip")
            for x in (self.tables.phrases, self.tables.recent)
        )
        at = (rows.position[:, None] - jnp.arange(BEFORE, 0, -1)) % MAX_PHRASE_TOKENS
        before = jnp.take_along_axis(recent, at, axis=1)[:, None]
        first, end = phrases[..., :-1], phrases[..., -1]
        there = ((first < 0) | (first == before)).all(axis=2) & (end >= vocab.offset)
        banned = there & (rows.listed > UNLISTED)[:, None]
        return jnp.where(banned, end - vocab.offset, vocab.size)

    def _penalised(self, logits: Float[Array, "samples shard"]) -> Float[Array, "samples shard"]:
        rows = self.rows
        marks = jnp.take(self.tables.marks, rows.slots, axis=0, mode="clip")
        presence, frequency, repetition = (
            x[:, None] for x in (rows.presence, rows.frequency, _divisor(rows.repetition))
        )
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(marks > 0, repeated, logits)
        times = (marks >> 1).astype(jnp.float32)
        return logits - frequency * times - presence * (times > 0)


def _divisor(repetition: Float[Array, " samples"]) -> Float[Array, " samples"]:
    """1 in rows that nobody has, which are all zeros."""
    return jnp.where(repetition > 0, repetition, 1.0)


def count(
    marks: Int16[Array, "slots shard"],
    slots: Int[Array, " samples"],
    token_ids: Int[Array, " samples"],
    vocab: VocabShard,
) -> Int16[Array, "slots shard"]:
    """With one more of each row's token at its slot. Slots past the end are dropped; no two rows
    have the same one."""
    places = token_ids - vocab.offset
    places = jnp.where((places >= 0) & (places < vocab.size), places, vocab.size)
    before = marks.at[slots, places].get(mode="fill", fill_value=0)
    after = jnp.where(before < ONCE * MOST_TIMES, before + jnp.int16(ONCE), before)
    return marks.at[slots, places].set(after, mode="drop")


def note(
    recent: Int[Array, "slots tokens"],
    slots: Int[Array, " samples"],
    positions: Int[Array, " samples"],
    token_ids: Int[Array, " samples"],
) -> Int[Array, "slots tokens"]:
    """With each row's token, which is at that position, at its slot."""
    return recent.at[slots, positions % MAX_PHRASE_TOKENS].set(token_ids, mode="drop")
