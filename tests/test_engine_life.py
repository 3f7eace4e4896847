"""The engine's own life over a scripted executor: idle, failing, hanging, draining, closing."""

from __future__ import annotations

import threading
import time

import pytest

from conflux_jax.inbox import Unavailable
from conflux_jax.request import FinishReason, SamplingParams
from tests.fakes import make_fake, open_stream, run, wait_until


def test_an_idle_engine_sleeps_and_is_healthy():
    with make_fake(engine={"stall_limit_s": 0.1}) as fake:
        run(fake, max_tokens=5)
        calls = []
        schedule = fake.scheduler.schedule
        fake.scheduler.schedule = lambda now: calls.append(now) or schedule(now)
        time.sleep(0.4)
        assert fake.engine.healthy
        assert not calls
        assert len(run(fake, max_tokens=5).token_ids) == 5


def test_a_failing_step_ends_every_stream_with_an_error():
    with make_fake(max_num_seqs=2, step_s=0.002) as fake:
        streams = [open_stream(fake) for _ in range(4)]  # two run, two wait
        next(streams[0])
        fake.executor.fail_with = RuntimeError("out of memory")
        for stream in streams:
            last = list(stream)[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert "out of memory" in last.message
        assert not fake.engine.healthy
        with pytest.raises(Unavailable, match="out of memory"):
            open_stream(fake)
        with pytest.raises(Unavailable):
            fake.engine.load().result(1)
        assert fake.engine.drain(1.0)
    assert fake.executor.closed


def test_a_hanging_step_turns_health_false_and_ends_every_stream():
    with make_fake(engine={"stall_limit_s": 0.2}) as fake:
        fake.executor.pause_at(lambda plan: plan.iteration == 5)
        stream = open_stream(fake)
        started = time.monotonic()
        last = list(stream)[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert "no progress for 0.2 s" in last.message
        assert time.monotonic() - started < 2.0
        assert not fake.engine.healthy
        with pytest.raises(Unavailable, match="no progress"):
            open_stream(fake)


def test_work_that_the_scheduler_never_plans_counts_as_stalled():
    with make_fake(engine={"stall_limit_s": 0.2}) as fake:
        fake.scheduler.schedule = lambda now: None
        last = open_stream(fake).read_all()
        assert last.finish_reason is FinishReason.ERROR
        assert "no progress" in last.message


def test_draining_finishes_what_runs_and_refuses_the_rest():
    with make_fake(step_s=0.001) as fake:
        streams = [open_stream(fake, "abc", SamplingParams(max_tokens=100)) for _ in range(6)]
        next(streams[0])
        done: list[bool] = []
        drainer = threading.Thread(target=lambda: done.append(fake.engine.drain(20.0)))
        drainer.start()
        wait_until(lambda: fake.engine.state_message != "")
        with pytest.raises(Unavailable, match="shutting down"):
            open_stream(fake)
        for stream in streams:
            assert stream.read_all().finish_reason is FinishReason.LENGTH
        drainer.join(5)
        assert done == [True]
        assert fake.engine.drain(0.0)  # again, with nothing left


@pytest.mark.parametrize("hangs", [False, True])
def test_a_drain_that_takes_too_long_gives_everyone_a_final_status(monkeypatch, hangs: bool):
    monkeypatch.setattr("conflux_jax.engine.STOP_GRACE_S", 0.1)
    with make_fake(step_s=0.005, max_num_seqs=2) as fake:
        streams = [open_stream(fake) for _ in range(4)]
        if hangs:
            fake.executor.pause_at(lambda plan: True)
        assert fake.engine.drain(0.1) is False
        for stream in streams:
            last = list(stream)[-1]
            assert last.finish_reason is FinishReason.ABORT
            assert "0.1 s of draining" in last.message


def test_closing_ends_every_stream_and_the_executor():
    with make_fake(step_s=0.001) as fake:
        streams = [open_stream(fake) for _ in range(6)]
        next(streams[0])
        fake.engine.close()
        assert all(list(s)[-1].finish_reason is FinishReason.ABORT for s in streams)
        assert fake.executor.closed
        assert not fake.engine.healthy
        with pytest.raises(Unavailable, match="closed"):
            open_stream(fake)
        fake.engine.close()


def test_the_record_has_every_plan_in_order():
    record: list[tuple[int, float]] = []

    def note(plan, elapsed_s: float) -> None:
        record.append((plan.iteration, elapsed_s))

    with make_fake(step_s=0.001, engine={"on_plan": note}) as fake:
        run(fake, max_tokens=20)
        fake.wait_free()
        assert [i for i, _ in record] == [p.iteration for p in fake.executor.plans][: len(record)]
        assert len(record) >= 20
        assert all(elapsed_s == 0.001 for _, elapsed_s in record)
