"""What requests change in their logits, on the device: against float64 arithmetic and against
transformers' processors, with the vocabulary whole and split."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from conflux_jax.execution.adjustments import (
    IN_PROMPT,
    LISTED,
    MOST_TIMES,
    NUM_ENTRIES,
    ONCE,
    ONLY_LISTED,
    UNLISTED,
    RowAdjustments,
    TableAdjustment,
    allocate_tables,
    biased_until,
    count,
    is_penalised,
    lower_write,
    note,
    row_of,
    slot_bytes,
    table_specs,
)
from conflux_jax.execution.runner import make_mesh
from conflux_jax.execution.sampling import VocabShard
from conflux_jax.request import MAX_BAD_PHRASES, MAX_PHRASE_TOKENS, Request, SamplingParams
from tests.decoder_float64 import adjusted

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "processors.json").read_text())
VOCAB, SLOTS = 48, 16
EOS = frozenset({5, 40})
SPLIT = pytest.mark.parametrize("ranks", [1, 3])
CASES = {
    "nothing": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.4},
    "bias": {"logit_bias": {0: -100.0, 17: 3.25, 31: 0.1, 47: 100.0}},
    "bad": {"bad_token_ids": (0, 16, 33)},
    "allowed": {"allowed_token_ids": (2, 19, 45), "logit_bias": {19: 1.5, 20: 50.0}},
    "allowed but bad": {"allowed_token_ids": (2, 19, 45), "bad_token_ids": (19, 3)},
    "at least": {"min_tokens": 4, "stop_token_ids": (7, 40)},
    "allowed, at least": {"min_tokens": 4, "allowed_token_ids": (5, 6), "logit_bias": {5: 2.0}},
    "all": {
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.7,
        "logit_bias": {5: 9.0, 7: -3.0, 12: 1.0},
        "bad_token_ids": (1, 30),
        "min_tokens": 3,
        "stop_token_ids": (7,),
    },
}


PHRASES = {
    "phrases": ((3, 19), (19, 19, 5), (5, 3, 3, 3, 40), (44, 0)),
    "phrases, allowed": ((3, 19), (19, 3)),
}
CASES |= {"phrases": {}, "phrases, allowed": {"allowed_token_ids": (3, 5, 19)}}


def request(case: str, prompt: tuple[int, ...]) -> Request:
    params = SamplingParams(max_tokens=100, **CASES[case])
    return Request(case, prompt, params, 100, EOS, bad_phrases=PHRASES.get(case, ()))


class Device:
    """The tables on `ranks` devices, written and counted on as the runner does."""

    def __init__(self, ranks: int):
        self.mesh = make_mesh(1, ranks)
        self.vocab = VocabShard(VOCAB // ranks, ranks)
        self.tables = allocate_tables(SLOTS, VOCAB, self.mesh)
        self._write = lower_write(SLOTS, VOCAB, self.mesh).compile()
        self._step = _step(ranks)

    def admit(self, slot: int, request: Request, output: list[int]) -> None:
        row = row_of(request, (*request.prompt_token_ids, *output), VOCAB)
        shapes = jax.tree.map(lambda x: x.shape[1:], self.tables)
        assert jax.tree.map(np.shape, row) == shapes
        shardings = self._write.input_shardings[0]
        arguments = jax.device_put((np.int32(slot), row), shardings[1:])
        self.tables = self._write(self.tables, *arguments)

    def step(self, logits: np.ndarray, rows: RowAdjustments, tokens: list[int]) -> np.ndarray:
        """The adjusted logits; then each row has had its token. What its logit was is found from
        what it is, unless it is banned."""
        whole, ids = np.asarray(logits, np.float32), jnp.asarray(tokens, jnp.int32)
        out, undone, self.tables = self._step(whole, rows, self.tables, ids)
        out, row = np.asarray(out), np.arange(len(tokens))
        found = np.isfinite(out[row, tokens])
        before = whole[row, tokens][found]
        np.testing.assert_allclose(np.asarray(undone)[found], before, rtol=1e-6, atol=2e-5)
        return out


@cache
def _step(ranks: int):
    vocab = VocabShard(VOCAB // ranks, ranks)
    split, whole = PartitionSpec(None, vocab.axis), PartitionSpec()

    def step(logits, rows, tables, tokens):
        adjustment = TableAdjustment(rows, tables, vocab)
        out, places = adjustment.apply(logits), tokens - vocab.offset
        mine = (places >= 0) & (places < vocab.size)
        values = jnp.take_along_axis(out, places[:, None], axis=1, mode="clip")[:, 0]
        undone = lax.psum(jnp.where(mine, adjustment.undo(values, places), 0.0), vocab.axis)
        marks = count(tables.marks, rows.slots, tokens, vocab)
        recent = note(tables.recent, rows.slots, rows.position, tokens)
        return out, undone, tables._replace(marks=marks, recent=recent)

    specs = {
        "in_specs": (split, whole, table_specs(), whole),
        "out_specs": (split, whole, table_specs()),
    }
    return jax.jit(jax.shard_map(step, mesh=make_mesh(1, ranks), check_vma=False, **specs))


def rows_of(slots: list[int], requests: list[Request], position: list[int]) -> RowAdjustments:
    def listed(request: Request) -> int:
        if request.params.allowed_token_ids is not None:
            return ONLY_LISTED
        return LISTED if biased_until(request) else UNLISTED

    def floats(name: str):
        return jnp.asarray([getattr(r.params, name) for r in requests], jnp.float32)

    untils = [biased_until(r) for r in requests]
    return RowAdjustments(
        slots=jnp.asarray(slots, jnp.int32),
        listed=jnp.asarray([listed(r) for r in requests], jnp.int32),
        position=jnp.asarray(position, jnp.int32),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
        repetition=floats("repetition_penalty"),
        biased=jnp.asarray(any(p < u for p, u in zip(position, untils, strict=True))),
        penalised=jnp.asarray(any(is_penalised(r.params) for r in requests)),
    )


@SPLIT
def test_logits_change_by_the_rules_while_tokens_come(ranks):
    """Every case at once, each in the slot of another that was there before, some with output from
    before a preemption. Each row's tokens are known to the device alone."""
    draw = random.Random(1)
    device = Device(ranks)
    names = list(CASES)
    prompts = [tuple(draw.choices(range(VOCAB), k=draw.randint(1, 30))) for _ in names]
    requests = [request(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
    outputs = [draw.choices(range(VOCAB), k=draw.choice((0, 0, 2))) for _ in names]
    slots = draw.sample(range(SLOTS), len(names))
    for slot, made in zip(slots[1:] + slots[:1], requests, strict=True):
        device.admit(slot, made, [1, 1, 1])
    for slot, made, output in zip(slots, requests, outputs, strict=True):
        device.admit(slot, made, output)
    for step in range(12):
        logits = np.random.default_rng(step).normal(size=(len(names), VOCAB)) * 4
        logits[:, 44] = -np.inf  # no token has this id
        position = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
        tokens = [draw.choice((3, 19, 5, 44)) for _ in names]
        got = device.step(logits, rows_of(slots, requests, position), tokens)
        assert (got[0] == logits[0].astype(np.float32)).all()
        for row, made in enumerate(requests):
            history = (made.prompt_token_ids, outputs[row], EOS, made.bad_phrases)
            expected = adjusted(logits[row].astype(np.float32), made.params, *history)
            np.testing.assert_allclose(
                got[row], expected, rtol=1e-6, atol=2e-6, err_msg=made.request_id
            )
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)


@SPLIT
def test_what_nobody_asks_for_changes_no_bit(ranks):
    """Whatever the tables have of earlier requests, and whatever others ask for."""
    device = Device(ranks)
    for slot in range(SLOTS):
        device.admit(slot, request("all", (1, 2, 3, 47)), [9, 9])
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    plain = [request("nothing", (1,))] * 2
    got = device.step(logits, rows_of([0, 1], plain, [1, 1]), [2, 2])
    np.testing.assert_array_equal(got, logits)
    beside = [plain[0], request("all", (1, 2, 3, 47))]
    got = device.step(logits, rows_of([0, 1], beside, [1, 6]), [2, 2])
    np.testing.assert_array_equal(got[0], logits[0])
    assert (got[1] != logits[1]).any()


@SPLIT
def test_the_end_of_a_phrase_is_banned_where_all_before_it_was_generated(ranks):
    """The longest phrase there can be, its tokens before and after a preemption; then a token later
    it may come, and in the prompt alone it bans nothing."""
    phrase = tuple(range(20, 20 + MAX_PHRASE_TOKENS))
    params, last = SamplingParams(max_tokens=100), phrase[-1]
    device, logits = Device(ranks), np.zeros((1, VOCAB), np.float32)
    for known in (0, 7, MAX_PHRASE_TOKENS - 1):
        made = Request("r", phrase[:-1], params, 100, EOS, bad_phrases=((1, 2), phrase))
        device.admit(4, made, [9, 9, *phrase[:known]][: known + 2])
        output = [9, 9, *phrase[:known]]
        for token in (*phrase[known:-1], 5, last):
            position = len(made.prompt_token_ids) + len(output)
            got = device.step(logits, rows_of([4], [made], [position]), [token])[0]
            banned = [last] if output[1 - MAX_PHRASE_TOKENS :] == [*phrase[:-1]] else []
            assert np.flatnonzero(np.isneginf(got)).tolist() == banned
            output.append(token)
        assert output[-2:] == [5, last]


@SPLIT
def test_counts_stop_at_the_most_and_empty_rows_count_nothing(ranks):
    device = Device(ranks)
    device.admit(3, request("all", (7, 7)), [7] * (MOST_TIMES - 1) + [8] * 2)
    rows = rows_of([3, SLOTS], [request("all", (7, 7))] * 2, [1, 1])
    for _ in range(3):
        device.step(np.zeros((2, VOCAB), np.float32), rows, [7, 7])
    marks = np.array(device.tables.marks)
    assert marks[3, 7] == ONCE * MOST_TIMES + IN_PROMPT == 2**15 - 1
    assert marks[3, 8] == ONCE * 2
    marks[3, [7, 8]] = 0
    assert not marks.any()


def test_the_longest_lists_have_their_places():
    """As many entries as validation lets through."""
    ids = tuple(range(5000))
    most = {
        "logit_bias": dict.fromkeys(ids[:512], 1.0),
        "bad_token_ids": ids[600:1112],
        "stop_token_ids": ids[2000:2128],
        "min_tokens": 2,
    }
    many = Request("r", (1,), SamplingParams(**most), 16, frozenset(ids[3000:3064]))
    row = row_of(many, (1,), 5000)
    assert NUM_ENTRIES == (row.ids >= 0).sum() == 512 + 512 + 128 + 64
    assert sorted(row.ids[row.biases == -np.inf]) == [
        *ids[600:1112],
        *ids[2000:2128],
        *ids[3000:3064],
    ]
    allowed = SamplingParams(allowed_token_ids=ids[:1024], min_tokens=2, stop_token_ids=ids[:128])
    row = row_of(Request("r", (1,), allowed, 16, frozenset(ids[900:964])), (1,), 5000)
    assert (row.ids >= 0).sum() == NUM_ENTRIES
    assert (row.untils == 3).sum() == 128 + 64


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slot_has_the_bytes_that_are_counted_for_it(ranks):
    """By hand, 48 tokens: 2 bytes of each rank's; 1,216 entries of three numbers of 4 bytes, 64
    phrases and the tail of the answer of 16 such numbers each."""
    assert (MAX_BAD_PHRASES, MAX_PHRASE_TOKENS) == (64, 16)
    by_hand = {1: 96 + 14_592 + 4096 + 64, 2: 48 + 14_592 + 4096 + 64}
    tables = allocate_tables(3, VOCAB, make_mesh(1, ranks))
    on_one = sum(table.addressable_shards[0].data.nbytes for table in tables)
    assert slot_bytes(VOCAB, ranks) == by_hand[ranks] == on_one // 3


@SPLIT
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_logits_are_those_of_transformers(golden, ranks):
    params = SamplingParams(max_tokens=100, **_given(golden["params"]))
    made = Request("r", tuple(golden["prompt"]), params, 100, frozenset(golden["eos"]))
    device = Device(ranks)
    device.admit(0, made, golden["output"])
    position = len(golden["prompt"]) + len(golden["output"])
    got = device.step(np.array([golden["logits"]]), rows_of([0], [made], [position]), [0])
    expected = [-np.inf if value is None else value for value in golden["processed"]]
    np.testing.assert_allclose(got[0], expected, rtol=1e-6, atol=1e-6)
    by_hand = adjusted(golden["logits"], params, golden["prompt"], golden["output"], golden["eos"])
    np.testing.assert_allclose(by_hand, expected, rtol=1e-6, atol=1e-6)


def _given(params: dict) -> dict:
    if "logit_bias" in params:
        biases = {int(token_id): bias for token_id, bias in params["logit_bias"].items()}
        return params | {"logit_bias": biases}
    return params
