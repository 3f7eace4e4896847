"""What the engine does when something under it breaks: a step, a request's numbers, its own thread,
a program that has to be made first, a reader that does not read."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from conflux_jax.inbox import Unavailable
from conflux_jax.plan import NO_TOKEN
from conflux_jax.request import FinishReason, SamplingParams
from conflux_jax.streams import OutputStream
from conflux_jax.watchdog import SUSPECT_S, Watchdog
from tests.fakes import Fake, echo, make_fake, open_stream, run

LIMITED = SamplingParams(max_tokens=40, ignore_eos=True)


def failing_once(fake: Fake, in_launch: bool) -> list[int]:
    """Breaks a step with decodes; the list gets an entry for each reset."""
    resets: list[int] = []
    fake.executor.reset = lambda: resets.append(len(fake.executor.plans))
    fake.executor.fail_at(lambda plan: len(plan.decodes[0]) == 2, in_launch)
    return resets


def open_together(fake: Fake, count: int) -> list[OutputStream]:
    """Before any of them runs."""
    return fake.engine.submit_many([fake.engine.prepare("ab", LIMITED) for _ in range(count)])


@pytest.mark.parametrize("in_launch", [False, True])
def test_a_failed_step_ends_its_requests_and_no_others(in_launch: bool):
    with make_fake(max_num_seqs=2, step_s=0.001) as fake:
        resets = failing_once(fake, in_launch)
        streams = [open_stream(fake, f"<{i}>", LIMITED) for i in range(6)]  # two run, four wait
        for stream in streams[:2]:
            last = stream.read_all()
            assert last.finish_reason is FinishReason.ERROR
            assert stream.request_id in last.message
            assert "MemoryError: no room for plan" in last.message
        for number, stream in enumerate(streams[2:], 2):
            last = stream.read_all()
            assert last.finish_reason is FinishReason.LENGTH
            assert last.text == (f"<{number}>" * 14)[:40]
        assert len(resets) == 1
        assert fake.engine.healthy
        fake.wait_free()


def test_what_a_launch_that_fails_finds_under_way_is_delivered():
    """The last token of "first" is on the device when the launch after it fails."""
    with make_fake(max_num_seqs=1, step_s=0.001) as fake:
        fake.executor.reset = lambda: None
        fake.executor.fail_at(lambda plan: plan.iteration == 3, in_launch=True)
        first = open_stream(fake, "ab", SamplingParams(max_tokens=3, ignore_eos=True))
        second = open_stream(fake, "cd", LIMITED)
        assert first.read_all().text == "aba"
        assert second.read_all().finish_reason is FinishReason.ERROR
        assert run(fake, "cd", max_tokens=4).text == "cdcd"


def test_steps_that_fail_again_and_again_end_the_engine():
    with make_fake(max_num_seqs=1) as fake:
        fake.executor.reset = lambda: None
        fake.executor.fail_with = RuntimeError("device lost")
        streams = open_together(fake, 5)
        for stream in streams:
            last = stream.read_all()
            assert last.finish_reason is FinishReason.ERROR
            assert "device lost" in last.message
        assert not fake.engine.healthy
        assert "device lost" in fake.engine.state_message


def test_a_reset_that_fails_ends_the_engine():
    with make_fake(max_num_seqs=1) as fake:

        def reset() -> None:
            raise MemoryError("not even an empty pool")

        fake.executor.reset = reset
        fake.executor.fail_at(lambda plan: True)
        streams = open_together(fake, 3)
        messages = [stream.read_all().message for stream in streams]
        assert all("not even an empty pool" in message for message in messages)
        assert not fake.engine.healthy


def test_a_request_without_finite_logits_ends_alone():
    def script(request, index: int) -> int:
        spoilt = request.prompt_token_ids[0] == ord("!") and index == 5
        return NO_TOKEN if spoilt else echo(request, index)

    with make_fake(script) as fake:
        streams = [open_stream(fake, prompt, LIMITED) for prompt in ("ab", "!x", "cd")]
        outputs = [stream.read_all() for stream in streams]
        assert [output.text for output in outputs] == ["ab" * 20, "!x!x!", "cd" * 20]
        assert outputs[1].finish_reason is FinishReason.ERROR
        assert f"request {streams[1].request_id}: the logits after 7 tokens" in outputs[1].message
        assert fake.engine.healthy
        fake.wait_free()


def test_an_observer_that_breaks_does_not_keep_an_end_from_anyone():
    class Broken:
        def __getattr__(self, name: str):
            raise RuntimeError("a bad day")

    with make_fake(step_s=0.001) as fake:
        streams = [open_stream(fake) for _ in range(6)]
        next(streams[0])
        broken: Any = Broken()
        fake.engine.observe(broken)
        for stream in streams:
            last = stream.read_all()
            assert last.finish_reason is FinishReason.ERROR
            assert "a bad day" in last.message
        with pytest.raises(Unavailable, match="a bad day"):
            open_stream(fake)


def test_a_program_that_is_made_while_requests_wait_is_no_hang():
    with make_fake(engine={"stall_limit_s": 0.1}) as fake:
        fake.executor.is_compiling = True
        fake.executor.pause_at(lambda plan: plan.iteration == 3)
        stream = open_stream(fake, "ab", LIMITED)
        fake.executor.wait_paused()
        time.sleep(0.4)
        assert fake.engine.healthy
        fake.executor.is_compiling = False
        fake.executor.resume()
        assert stream.read_all().finish_reason is FinishReason.LENGTH


def test_a_short_hang_shows_in_health_and_passes():
    with make_fake(engine={"stall_limit_s": 30.0}) as fake:
        clock = [time.monotonic]
        fake.engine._watchdog._clock = lambda: clock[0]()
        fake.executor.pause_at(lambda plan: plan.iteration == 3)
        stream = open_stream(fake, "ab", LIMITED)
        fake.executor.wait_paused()
        assert fake.engine.healthy
        clock[0] = lambda: time.monotonic() + SUSPECT_S + 0.1
        assert not fake.engine.healthy
        clock[0] = time.monotonic
        fake.executor.resume()
        assert stream.read_all().finish_reason is FinishReason.LENGTH
        assert fake.engine.healthy


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_too_long_follows_from_the_iterations():
    """Suspect after ten times the longest iteration, and never before SUSPECT_S."""
    clock = Clock()
    dog = Watchdog(30.0, clock, lambda: True, lambda: False, lambda message: None)
    dog.busy()
    clock.now_s += SUSPECT_S
    assert not dog.is_suspect
    clock.now_s += 0.01
    assert dog.is_suspect
    dog.collected(2.0)
    assert not dog.is_suspect
    clock.now_s += 15.0
    assert dog.is_suspect
    dog.launched(predicted_s=6.0)  # this one may take a minute
    assert not dog.is_suspect
    clock.now_s += 60.0
    assert dog.is_suspect
    dog.idle()
    clock.now_s += 1000.0
    assert not dog.is_suspect
    dog.woken()
    assert not dog.is_suspect


def test_a_thread_that_is_gone_is_noticed():
    told: list[str] = []
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

    def on_stall(message: str) -> None:
        told.append(message)
        dog.stop()

    dog = Watchdog(0.1, time.monotonic, thread.is_alive, lambda: False, on_stall)
    dog.start()
    dog.join()
    assert told == ["its thread has ended"]


async def test_a_reader_that_falls_behind_is_ended_and_nobody_else():
    with make_fake(max_num_seqs=2) as fake:
        request = fake.engine.prepare("ab", SamplingParams(max_tokens=300, ignore_eos=True))
        slow = await fake.engine.submit(request, max_unread=20)
        other = open_stream(fake, "cd", SamplingParams(max_tokens=300, ignore_eos=True))
        assert other.read_all().text == "cd" * 150
        last = slow.read_all()
        assert (last.finish_reason, last.text) == (FinishReason.ABORT, "ab" * 10)
        assert last.overflowed and "max_unread_tokens: 20" in last.message
        fake.wait_free()


async def test_a_reader_that_keeps_up_may_have_any_number_of_tokens():
    with make_fake(step_s=0.001) as fake:
        request = fake.engine.prepare("ab", SamplingParams(max_tokens=200, ignore_eos=True))
        stream = await fake.engine.submit(request, max_unread=50)
        deltas = [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == "ab" * 100
        assert deltas[-1].finish_reason is FinishReason.LENGTH
