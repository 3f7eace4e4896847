"""SmolLM2 in float32, greedy, equals transformers token for token: on every mesh, in any company,
in chunks of any size. The goldens come from `tests/goldens/generate.py` (torch, transformers)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conflux_jax.config import Config
from conflux_jax.execution.runner import Runner
from conflux_jax.loop import turn
from conflux_jax.models.loading import open_source
from conflux_jax.request import FinishReason, Request, SamplingParams
from conflux_jax.scheduler.scheduler import Scheduler
from conflux_jax.text import open_text
from tests.serving import no_compilation

MESHES = pytest.mark.meshes  # minutes each; the others run in `make test`
MODEL = "smollm2-135m-instruct"
GOLDENS = json.loads((Path(__file__).parent / "goldens" / "smollm2.json").read_text())
PROMPTS = {golden["name"]: golden for golden in GOLDENS["prompts"]}
MAX_TOKENS = GOLDENS["max_tokens"]


def settings(sp: int) -> Config:
    return Config.from_flat(
        sp=sp,
        dtype="float32",
        max_model_len=640,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        rows_ladder=(64,),
        decode_rows_ladder=(12,),
        kv_pool_tokens=3200,
        handoff_pages=4,
    )


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=MESHES), 3, pytest.param(4, marks=MESHES)],
    ids="sp={}".format,
)
def runner(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Runner]:
    made = Runner.create(open_source(str(smollm2_path)), settings(request.param))
    made.warm_up()
    yield made
    made.close()


def run(
    runner: Runner, arrivals: dict[str, int], batched_tokens: int, max_tokens: int = MAX_TOKENS
) -> dict[str, list[int]]:
    """Serve goldens that arrive at given iterations, under a scheduler of its own."""
    with no_compilation():
        return _run(runner, arrivals, batched_tokens, max_tokens)


def _run(
    runner: Runner, arrivals: dict[str, int], batched_tokens: int, max_tokens: int
) -> dict[str, list[int]]:
    config = Config.from_flat(
        settings(runner.geometry.groups), max_num_batched_tokens=batched_tokens
    )
    scheduler = Scheduler(config.scheduler, runner.geometry, runner.ladders, runner.max_model_len)
    outputs: dict[str, list[int]] = {name: [] for name in arrivals}
    ended: dict[str, FinishReason | None] = {}
    iteration, in_flight = 0, None
    while len(ended) < len(arrivals):
        for name, at in arrivals.items():
            if at == iteration:
                scheduler.add(make_request(name, max_tokens))
        in_flight, events = turn(scheduler, runner, lambda at=iteration: float(at), in_flight)
        iteration += 1
        for event in events:
            assert event.token_id is not None
            outputs[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                ended[event.request_id] = event.finish_reason
    while in_flight is not None:
        in_flight, events = turn(scheduler, runner, lambda: float(iteration), in_flight)
        assert not events
    assert not scheduler.has_work
    assert set(scheduler.load().free_pages) == {runner.geometry.num_pages}
    assert set(ended.values()) == {FinishReason.LENGTH}
    return outputs


def make_request(name: str, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, tuple(PROMPTS[name]["prompt_ids"]), params, max_tokens)


def check(outputs: dict[str, list[int]], max_tokens: int = MAX_TOKENS) -> None:
    for name, got in outputs.items():
        golden = PROMPTS[name]
        # Past a near tie either of two tokens is right; up to there the answer is one.
        until = min([*golden["near_ties"], max_tokens])
        assert got[:until] == golden["output_ids"][:until], name
        assert len(got) == max_tokens


def test_the_goldens_are_what_the_issue_names():
    assert len(PROMPTS) >= 8
    assert max(len(golden["prompt_ids"]) for golden in PROMPTS.values()) > 400
    assert min(len(golden["prompt_ids"]) for golden in PROMPTS.values()) == 1
    assert PROMPTS["capital"]["text"].startswith(" Paris.\n\nThe answer is: 2018-01-22")
    tied = sum(bool(golden["near_ties"]) for golden in PROMPTS.values())
    assert len(PROMPTS) - tied >= 8


def test_arriving_at_different_times_in_chunks_of_64(runner: Runner):
    """All goldens; prompts are prefilled beside running decodes, the long one in many chunks."""
    arrivals = {name: i for i, name in enumerate(reversed(PROMPTS))}
    check(run(runner, arrivals, batched_tokens=64))


@pytest.mark.parametrize("chunk", [pytest.param(3, marks=MESHES), 17])
def test_in_small_chunks(runner: Runner, chunk: int):
    names = ["single token", "chat", "capital"]
    check(run(runner, dict.fromkeys(names, 0), batched_tokens=chunk, max_tokens=12), 12)


def test_text_is_that_of_the_golden(smollm2_path: Path):
    text = open_text(str(smollm2_path))
    for golden in PROMPTS.values():
        assert text.decode(golden["output_ids"]) == golden["text"]
