"""Every rival system: its tokens, its memory, its rules, and one request alone by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from conflux_jax.simulation.rival_costs import ElasticCosts, MultiplexedCosts, SideCosts
from conflux_jax.simulation.system import System
from conflux_jax.simulation.systems.chunked import Budget, Chunked
from conflux_jax.simulation.systems.disaggregated import Disaggregated, Side
from conflux_jax.simulation.systems.jobs import Job
from conflux_jax.simulation.systems.loongserve import Elasticity, Fitted, LoongServe, fit, share_out
from conflux_jax.simulation.systems.muxwise import Multiplexing, MuxWise
from tests.simulation.rivals import (
    PlainCosts,
    PlainOperators,
    assert_conserved,
    request,
    run,
    traffic,
)

OPS = PlainOperators()
SHARES = (20, 40, 60, 80)
MEMORY = 9000  # KV tokens of a GPU: few requests at once


def chunked(order: str = "fcfs", oracle: bool = False, costs: PlainCosts | None = None) -> Chunked:
    return Chunked(costs or PlainCosts(), 2, MEMORY, Budget(512, oracle, floor=64), order)


def loongserve(order: str = "fcfs") -> LoongServe:
    return LoongServe(ElasticCosts(OPS), 4, MEMORY, Elasticity((1, 2, 3), 2048), order)


def muxwise(order: str = "fcfs", shares: tuple[int, ...] = SHARES) -> MuxWise:
    return MuxWise(MultiplexedCosts(OPS, 2), 2, 2 * MEMORY, Multiplexing(shares, 2048), order)


def disaggregated(order: str = "fcfs", ops: PlainOperators = OPS) -> Disaggregated:
    prefill = Side(1, SideCosts(ops, degree=2), 2 * MEMORY)
    return Disaggregated(prefill, Side(2, SideCosts(ops), MEMORY), 2048, order)


SYSTEMS: dict[str, Callable[..., System]] = {
    "chunked": chunked,
    "chunked-oracle": lambda order: chunked(order, oracle=True),
    "loongserve": loongserve,
    "muxwise": muxwise,
    "disaggregated": disaggregated,
}
every_system = pytest.mark.parametrize("name", SYSTEMS)
every_order = pytest.mark.parametrize("order", ["fcfs", "srpf"])


@every_order
@every_system
@pytest.mark.parametrize(("rate", "count"), [(2.0, 30), (200.0, 100)])
def test_every_request_gets_its_tokens_and_results_repeat(
    name: str, order: str, rate: float, count: int
):
    """At 200 requests a second memory is full and the queue long. Memory raises where it is asked
    for more than there is, and so do LoongServe's instances."""
    requests = traffic(count, rate, tbt_slo_s=0.05)
    given = run(SYSTEMS[name](order), requests)
    assert_conserved(requests, given)
    assert run(SYSTEMS[name](order), requests) == given


@pytest.mark.parametrize(
    ("name", "target_s"),
    [("chunked-oracle", 0.009), ("loongserve", 0.014), ("muxwise", 0.0095)],
)
def test_those_that_know_the_target_keep_it(name: str, target_s: float):
    """However long the queue, no token is late, nor the second one of a prompt that ended while
    others decoded: decodes alone take 5 ms (3 on MuxWise's pairs of GPUs, 6 on few SMs)."""
    given = run(SYSTEMS[name]("fcfs"), traffic(100, 200.0, tbt_slo_s=target_s))
    worst_s = max(gap for times_s in given for gap in gaps(times_s))
    assert target_s / 2 < worst_s <= target_s + 1e-12


@every_system
def test_noise_follows_its_seed(name: str):
    requests = traffic(30, 20.0)

    def noisy(seed: int) -> list[list[float]]:
        system = SYSTEMS[name]("fcfs")
        system.vary(0.02, seed)  # type: ignore[attr-defined]
        return run(system, requests)

    assert noisy(1) == noisy(1)
    assert noisy(1) != noisy(2)
    # Alone, a factor of exp(noise) that is drawn anew each time.
    assert noisy(1)[0][0] == pytest.approx(run(SYSTEMS[name]("fcfs"), requests)[0][0], rel=0.1)


@every_system
def test_memory_is_given_back_and_was_scarce(name: str):
    system = SYSTEMS[name]("fcfs")
    run(system, traffic(80, 200.0))
    pools = system.pools  # type: ignore[attr-defined]
    assert [pool.used_tokens for pool in pools] == [0] * len(pools)
    assert max(pool.peak_tokens / pool.capacity_tokens for pool in pools) > 0.7


@every_system
def test_a_request_that_can_never_fit_is_refused(name: str):
    with pytest.raises(ValueError, match=r"prompt_tokens \+ output_tokens is 40000"):
        SYSTEMS[name]("fcfs").add(request(0, 0.0, 39_000, 1000))


def alone(system: System, prompt: int, output: int) -> list[float]:
    return run(system, [request(0, 1.0, prompt, output)])[0]


def decode_s(ops: PlainOperators, context: int, tp: int = 1) -> float:
    """One request's iteration on `tp` GPUs, by hand."""
    return ops.iteration_s + (ops.weights_s + context * ops.context_s + ops.sample_s) / tp


def prefill_s(ops: PlainOperators, start: int, length: int, tp: int, samples: int) -> float:
    """A chunk's, by hand; longer than reading the weights."""
    pairs = length * (start + length / 2)
    rows_s = length * ops.row_s + pairs * ops.pair_s + samples * ops.sample_s
    return ops.iteration_s + rows_s / tp


def gaps(times_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def test_chunked_alone():
    """1,000 tokens in a budget of 512 are two chunks; then two iterations of one token each."""
    times_s = alone(chunked(), 1000, 3)
    ttft_s = prefill_s(OPS, 0, 512, 1, samples=0) + prefill_s(OPS, 512, 488, 1, samples=1)
    assert times_s[0] - 1.0 == pytest.approx(ttft_s)
    assert gaps(times_s) == pytest.approx([decode_s(OPS, 1001), decode_s(OPS, 1002)])


def test_muxwise_alone():
    """Nothing beside it: all SMs for its prefill, all for its decode, on both GPUs."""
    times_s = alone(muxwise(), 1000, 3)
    assert times_s[0] - 1.0 == pytest.approx(prefill_s(OPS, 0, 1000, 2, samples=1))
    assert gaps(times_s) == pytest.approx([decode_s(OPS, 1001, 2), decode_s(OPS, 1002, 2)])


def test_loongserve_alone():
    """300 tokens on three instances: 100 rows each take less than reading the weights, and a hop of
    their keys more than a step of the ring. Then one instance decodes."""
    times_s = alone(loongserve(), 300, 3)
    step_s, hop_s = 300**2 / 2 * OPS.pair_s / 9, 100 * OPS.sent_s
    assert 100 * OPS.row_s < OPS.weights_s and step_s < hop_s
    ttft_s = OPS.iteration_s + OPS.weights_s + OPS.sample_s + 2 * hop_s + step_s
    assert times_s[0] - 1.0 == pytest.approx(ttft_s)
    assert gaps(times_s) == pytest.approx([decode_s(OPS, 301), decode_s(OPS, 302)])


def two_halves_s(ops: PlainOperators, tokens: int) -> float:
    """Prefill on two instances, where steps of attention hide the hops between them."""
    pairs_s = tokens**2 / 2 * ops.pair_s
    assert tokens / 2 * ops.sent_s < pairs_s / 4
    return ops.iteration_s + tokens / 2 * ops.row_s + ops.sample_s + pairs_s / 2


def test_disaggregated_alone():
    """The first gap holds what is still to be sent: the last of ten layers' KV."""
    times_s = alone(disaggregated(), 1200, 3)
    assert times_s[0] - 1.0 == pytest.approx(two_halves_s(OPS, 1200))
    sent_s = 1200 * OPS.sent_s / OPS.num_layers
    assert gaps(times_s) == pytest.approx([sent_s + decode_s(OPS, 1201), decode_s(OPS, 1202)])


def test_disaggregated_with_infinite_bandwidth():
    """Prefill as on its GPUs alone, and decode at once; however many requests there are, as if two
    machines shared nothing."""
    ops = PlainOperators(sent_s=0.0)
    times_s = alone(disaggregated(ops=ops), 1200, 3)
    assert times_s[0] - 1.0 == pytest.approx(two_halves_s(ops, 1200))
    assert gaps(times_s) == pytest.approx([decode_s(ops, 1201), decode_s(ops, 1202)])
    # First tokens are those of the same prompts with no output after them.
    side = Side(1, SideCosts(ops), 10**6)
    requests = traffic(60, 20.0)
    single = [request(r.number, r.arrival_s, r.prompt_tokens, 1) for r in requests]
    given = run(Disaggregated(side, side, 2048, "fcfs"), requests)
    alone_given = run(Disaggregated(side, side, 2048, "fcfs"), single)
    assert [times[0] for times in given] == [times[0] for times in alone_given]


def test_nobody_overtakes_on_the_way_to_decode():
    """Decode has memory for 1,000 tokens, and 700 in use: a prompt of 800 is kept until they are
    free, and one of 100 that would fit stays behind it."""
    prefill, decode = Side(1, SideCosts(OPS), 10_000), Side(1, SideCosts(OPS), 1000)
    requests = [request(0, 0.0, 600, 100), request(1, 0.1, 800, 100), request(2, 0.2, 100, 50)]
    first, second, third = run(Disaggregated(prefill, decode, 2048, "fcfs"), requests)
    assert second[0] < first[-1] < second[1] <= third[1]


def test_what_kv_still_travels_after_prefill():
    """Ten layers whose KV takes 5 ms: half a millisecond after a long prefill, 3.2 after 2 ms."""
    costs = SideCosts(PlainOperators(sent_s=1e-6))
    assert costs.exposed_s(5000, prefill_s=0.020) == pytest.approx(0.0005)
    assert costs.exposed_s(5000, prefill_s=0.002) == pytest.approx(0.0032)


@every_order
def test_chunked_keeps_its_budget(order: str):
    costs = PlainCosts()
    run(chunked(order, costs=costs), traffic(120, 200.0))
    assert max(work.rows for work in costs.seen) == 512
    assert all(work.rows == work.decodes[0] + sum(work.shares) for work in costs.seen)


def test_chunked_decodes_no_more_than_its_budget():
    """Sixty requests with memory for all, and a budget of 16 rows."""
    costs = PlainCosts()
    requests = [request(number, 0.0, 5, 50) for number in range(60)]
    assert_conserved(requests, run(Chunked(costs, 1, 100_000, Budget(16), "fcfs"), requests))
    assert max(work.decodes[0] for work in costs.seen) == 16
    assert max(work.rows for work in costs.seen) == 16


def test_the_oracle_fills_iterations_up_to_the_target():
    """Decodes never wait longer than 10 ms, and 64 more tokens would have been too many."""
    costs = PlainCosts()
    system = Chunked(costs, 1, 100_000, Budget(4096, oracle=True), "fcfs")
    requests = [request(0, 0.0, 100, 40, tbt_slo_s=0.010), request(1, 0.0, 8000, 5)]
    given = run(system, requests)
    assert_conserved(requests, given)
    worst_s = max(gaps(given[0]))
    assert 0.010 - 64 * OPS.row_s - 64 * 8000 * OPS.pair_s < worst_s <= 0.010


def test_the_oracle_goes_on_slowly_where_decodes_are_late_anyway():
    """An iteration takes 4.5 ms and more, for a target of 4."""
    costs = PlainCosts()
    budget = Budget(4096, oracle=True, floor=64)
    requests = [request(0, 0.0, 100, 500, tbt_slo_s=0.004), request(1, 0.01, 640, 1)]
    run(Chunked(costs, 1, 100_000, budget, "fcfs"), requests)
    beside = [work.chunks for work in costs.seen if work.decodes[0] and work.shares[0]]
    ran = [chunks for chunks in beside if chunks[0][1] == 64]
    assert {chunks[0][0] for chunks in ran} == set(range(0, 640, 64))


def test_shortest_first_passes_a_prompt_that_has_begun():
    """Beside 5,120 tokens that run in chunks, or layer by layer, 100 tokens come: served next in
    one order, last in the other."""
    requests = [request(0, 0.0, 5120, 2), request(1, 0.001, 100, 2)]
    prefill, decode = Side(1, SideCosts(OPS), 20_000), Side(1, SideCosts(OPS), 20_000)
    muxing = Multiplexing(SHARES, 2048)
    makes: list[Callable[[str], System]] = [
        lambda order: Chunked(PlainCosts(), 1, 20_000, Budget(512), order),
        lambda order: MuxWise(MultiplexedCosts(OPS, 1), 1, 20_000, muxing, order),
        lambda order: Disaggregated(prefill, decode, 512, order),
    ]
    for make in makes:
        long, short = run(make("srpf"), requests)
        assert short[0] < long[0]
        long, short = run(make("fcfs"), requests)
        assert long[0] < short[0]


@pytest.mark.parametrize("target_s", [0.012, 0.030])
def test_muxwise_decodes_on_time_beside_prefill(target_s: float):
    """Decodes beside a prompt of 50,000 tokens: with the least share that meets the target, and so
    with all iterations within it."""
    costs = MultiplexedCosts(OPS, 1)
    system = MuxWise(costs, 1, 200_000, Multiplexing(SHARES, 2048), "fcfs")
    requests = [request(n, 0.0, 100, 60, target_s) for n in range(8)]
    requests.append(request(8, 0.001, 50_000, 2, target_s))
    given = run(system, requests)
    assert_conserved(requests, given)
    assert given[0][-1] < given[8][0]  # all beside it
    within = [gap for times_s in given[:8] for gap in gaps(times_s)]
    assert max(within) <= target_s + 1e-12
    least = next(s for s in SHARES if beside_s(costs, 8 * 160, s) <= target_s)
    assert max(within) == pytest.approx(beside_s(costs, 8 * 159, least))


def test_muxwise_leaves_room_for_noise():
    """Twenty decodes beside a long prompt take 11.8 ms on 20 SMs and 9.6 on 25, for a target of
    11.9: the fewer do, but not with 2% of noise, by which one in three of these would be late."""
    requests = [request(n, 0.0, 100, 60, 0.0119) for n in range(20)]
    requests.append(request(20, 0.001, 50_000, 1))
    worst_s = []
    for noise in (0.0, 0.02):
        muxing = Multiplexing((20, 25), 2048)
        system = MuxWise(MultiplexedCosts(OPS, 1), 1, 200_000, muxing, "fcfs")
        system.vary(noise, seed=0)
        given = run(system, requests)
        worst_s.append(max(gap for times_s in given[:20] for gap in gaps(times_s)))
    assert 0.0117 < worst_s[0] < 0.0119
    assert worst_s[1] < 0.0110


def beside_s(costs: MultiplexedCosts, contexts: int, decode_sms: int) -> float:
    """An iteration of eight decodes beside the prefill of 50,000 tokens."""
    return costs.decode_s(8, contexts, decode_sms, costs.draw([(0, 50_000)], decode_sms))


def test_muxwise_slows_both_where_memory_has_too_little():
    """60 of 100 SMs can draw all of the bandwidth. Prefill of 1,000 tokens on the other 40 takes
    50 ms for rows, 1.25 for attention and 0.01 for its sample, and 4 of it read the weights."""
    costs = MultiplexedCosts(OPS, 1)
    alone_s = 0.050 + 0.00125 + 0.00001
    assert costs.draw([(0, 1000)], 60) == pytest.approx(0.004 / alone_s)
    factor = 1.1 * (1 + 0.004 / alone_s)
    prefill_s = costs.prefill_s([(0, 1000)], 60, beside=True)
    assert prefill_s == pytest.approx(OPS.iteration_s + factor * alone_s)
    decode_alone_s = OPS.weights_s + 500 * OPS.context_s + OPS.sample_s
    slowed_s = costs.decode_s(1, 500, 60, draw=0.004 / alone_s)
    assert slowed_s == pytest.approx(OPS.iteration_s + factor * decode_alone_s)
    # 20 SMs draw 40%: there is enough for both, and decode reads at that pace.
    paced_s = (OPS.weights_s + 500 * OPS.context_s) / 0.4 + OPS.sample_s
    assert costs.decode_s(1, 500, 20, draw=0.5) == pytest.approx(OPS.iteration_s + 1.1 * paced_s)


def test_muxwise_prefill_slows_with_the_share_that_is_left():
    """A prompt of 50,000 tokens beside decodes that need most SMs takes longer by just that."""
    costs = MultiplexedCosts(OPS, 1)
    for share in SHARES[1:3]:
        system = MuxWise(costs, 1, 200_000, Multiplexing((share,), 2048), "fcfs")
        requests = [request(0, 0.0, 100, 4000), request(1, 0.0, 50_000, 1)]
        given = run(system, requests)
        begin_s = costs.prefill_s([(0, 100)], 0, beside=False)
        whole_s = costs.prefill_s([(0, 50_000)], share, beside=True)
        assert given[1][0] - begin_s == pytest.approx(whole_s)


def test_loongserve_fit_recovers_its_own_form():
    true = Fitted(0.003, 2e-5, 1e-9)
    found = fit(
        lambda chunks: true.seconds(sum(n for _, n in chunks), sum(n * n for _, n in chunks))
    )
    assert found == pytest.approx(true)


def jobs_of(*prompts: int) -> list[Job]:
    return [Job(request(number, 0.0, prompt, 1)) for number, prompt in enumerate(prompts)]


def test_loongserve_shares_instances_out_by_latency():
    """With perfect scaling one after the other on all is no choice (all start now): two prompts of
    1 s each on four instances take half a second each on two of them, or one both on four."""
    models = {degree: Fitted(0.0, 1.0 / degree, 0.0) for degree in (1, 2, 4)}
    parts = share_out(jobs_of(1, 1), 4, models, 1000)
    assert sum(part.degree for part in parts) == 4
    assert [part.degree for part in share_out(jobs_of(1), 4, models, 1000)] == [4]
    # More instances that cost more are not taken.
    models = {1: Fitted(0.0, 1.0, 0.0), 2: Fitted(0.5, 0.9, 0.0)}
    assert [part.degree for part in share_out(jobs_of(1, 1), 4, models, 1000)] == [1, 1]
    # Memory: a prompt of 1,500 needs two instances; three of those do not fit in four instances.
    parts = share_out(jobs_of(1499, 1499, 1499), 4, models, 1000)
    assert [(len(part.jobs), part.degree) for part in parts] == [(1, 2), (1, 2)]


def test_loongserve_grows_and_shrinks_its_decodes():
    """Eight decodes whose iterations miss their target on one instance have more, as long as nobody
    else wants them; the total never exceeds four."""
    ops = PlainOperators(row_s=1e-3)
    system = LoongServe(ElasticCosts(ops), 4, 10_000, Elasticity((1, 2), 2048), "fcfs")
    requests = [request(n, 0.0, 10, 40, tbt_slo_s=0.006) for n in range(8)]
    most = 0
    for one in requests:
        system.add(one)
    while system.next_s < math.inf:
        system.step()
        system.instances.check()
        most = max(most, system.instances.decoding)
    assert most == 2  # four rows a master take 4 ms, eight 8


@pytest.mark.parametrize(("target_s", "lent"), [(0.020, 0), (0.040, 1)])
def test_loongserve_lends_its_decoding_instance(target_s: float, lent: int):
    """One instance decodes in iterations of 5 ms, the other prefills 10,000 tokens. Another 1,000
    take 21 ms: within a target of 40 ms the first one does it, otherwise they wait."""
    costs = ElasticCosts(OPS)
    system = LoongServe(costs, 2, 20_000, Elasticity((1, 2), 4096), "fcfs")
    requests = [request(0, 0.0, 100, 100, target_s), request(1, 0.05, 10_000, 1)]
    requests.append(request(2, 0.06, 1000, 1))
    given = run(system, requests)
    assert given[1][0] == pytest.approx(0.05 + costs.prefill_s([(0, 10_000)], 1))
    begin_s = next(time_s for time_s in given[0] if time_s >= 0.06) if lent else given[1][0]
    prefill_s = costs.prefill_s([(0, 1000)], 1)
    assert given[2][0] == pytest.approx(begin_s + prefill_s)
    longest_s = max(gaps(given[0]))
    assert longest_s <= target_s
    assert (longest_s > prefill_s) == bool(lent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(0), "budget: 0 tokens; at least 1"),
        (lambda: Multiplexing((50, 40), 1), "shares: .* must rise"),
        (lambda: Multiplexing((50,), 0), "batch_tokens: 0"),
        (lambda: Multiplexing((50,), 1, 0.0), "target_fraction: 0.0"),
        (lambda: muxwise(shares=(100,)), "shares: 100 SMs of 100"),
        (lambda: Elasticity((2, 1), 1), "degrees"),
        (lambda: Elasticity((1,), 0), "batch_tokens: 0"),
        (lambda: Elasticity((1,), 1, 1.5), "target_fraction: 1.5"),
        (lambda: LoongServe(ElasticCosts(OPS), 2, 9, Elasticity((2,), 1), "fcfs"), "degrees: with"),
        (lambda: chunked("lifo"), "order: 'lifo' is none of fcfs, srpf"),
    ],
)
def test_settings_that_cannot_work(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        make()
