"""Random lives: arrivals, cancels, stops, ends of text, turns; checked at every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conflux_jax.request import OutOfRange
from tests.scheduler.harness import Harness


class Lives(RuleBasedStateMachine):
    """One engine's life. A group count comes with each subclass; the rest is drawn."""

    groups = 1
    shared = False
    harness: Harness

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        page_tokens = draw(st.sampled_from((1, 2, 4)), label="page_tokens")
        spread = draw(st.integers(1, self.groups), label="prefill pages hold times as much")
        max_num_seqs = draw(st.integers(1, 6), label="max_num_seqs")
        self.harness = Harness(
            groups=self.groups,
            num_pages=draw(st.integers(4, 16), label="num_pages"),
            page_tokens=page_tokens,
            prefill_page_tokens=page_tokens * spread,
            max_model_len=draw(st.sampled_from((12, 40)), label="max_model_len"),
            max_decodes=draw(st.integers(1, 6)) if self.groups > 1 else None,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=draw(st.integers(1, 24), label="max_num_batched_tokens"),
            max_prefill_segments=draw(st.integers(1, 4), label="max_prefill_segments"),
            handoff_pages=draw(st.integers(1, 4), label="handoff_pages"),
            max_bypass=draw(st.integers(0, 4), label="max_bypass"),
            shared=self.shared,
        )

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
    )
    def arrive(self, lengths, max_tokens, ignore_eos):
        """Under ids that are free: maybe some whose last result is still on its way."""
        for length in lengths:
            request_id = next(i for i in map("r{}".format, range(999)) if i not in self._live())
            try:
                allowed = self.harness.scheduler.output_limit(length, max_tokens)
            except OutOfRange:
                continue
            self.harness.add(request_id, length, allowed, ignore_eos=ignore_eos)

    @rule(turns=st.integers(1, 12))
    def turn(self, turns):
        self.harness.run(turns)

    @precondition(lambda self: self.harness.scheduler.has_work)
    @rule(data=st.data())
    def cancel(self, data):
        assert self.harness.cancel(data.draw(st.sampled_from(self._live())))

    @precondition(lambda self: any(self.harness.tokens.get(r) for r in self._live()))
    @rule(data=st.data())
    def stop_string(self, data):
        live = [r for r in self._live() if self.harness.tokens[r]]
        assert self.harness.stop(data.draw(st.sampled_from(live)))

    def _live(self):
        return sorted(self.harness.scheduler._requests)

    @invariant()
    def books_are_right(self):
        self.harness.audit()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.drain()


@pytest.mark.parametrize(
    ("groups", "shared"), [(1, False), (2, False), (3, False), (4, False), (3, True)]
)
def test_lives(groups, shared):
    machine = type("LivesOf", (Lives,), {"groups": groups, "shared": shared})
    case = machine.TestCase
    case.settings = settings(
        max_examples=50,
        stateful_step_count=40,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    case("runTest").runTest()
