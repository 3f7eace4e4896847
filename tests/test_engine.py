"""The engine over the real scheduler and a scripted executor: streams, ends, drains, failures."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from conflux_jax.intake import Chat
from conflux_jax.request import (
    FinishReason,
    InvalidRequest,
    OutOfRange,
    QueueFull,
    SamplingParams,
)
from conflux_jax.streams import OutputStream
from tests.fakes import EOS, LONG, VOCAB_SIZE, Fake, make_fake, open_stream, run, spell

EMOJI = "ď 🫠 龜 👨‍👩‍👧 z"


def test_a_request_streams_its_tokens_in_time_and_order():
    with make_fake() as fake:
        stream = open_stream(fake, "hello ", SamplingParams(max_tokens=14))
        deltas = list(stream)
        assert "".join(d.text for d in deltas) == "hello hello he"
        assert [i for d in deltas for i in d.token_ids] == list(b"hello hello he")
        times = [t for d in deltas for t in d.times_s]
        assert times == sorted(times)
        assert len(times) == 14
        assert times[0] > 0
        reasons = [d.finish_reason for d in deltas]
        assert reasons == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
        assert list(stream) == []
        fake.wait_free()


@pytest.mark.parametrize("groups", [1, 3])
def test_many_streams_at_once_from_asyncio(groups: int):
    async def consume(fake: Fake, index: int) -> str:
        params = SamplingParams(max_tokens=20 + index)
        stream = await fake.engine.submit(fake.engine.prepare(f"<{index}>", params))
        return "".join([delta.text async for delta in stream])

    async def main(fake: Fake) -> list[str]:
        return await asyncio.gather(*(consume(fake, index) for index in range(40)))

    with make_fake(groups=groups) as fake:
        texts = asyncio.run(main(fake))
        fake.wait_free()
    assert texts == [(f"<{i}>" * 30)[: 20 + i] for i in range(40)]


@pytest.mark.parametrize("groups", [1, 2])
def test_preempted_requests_stream_every_token_once(groups: int):
    """Eight of 48 in and 52 out, seven pages of 16 each at their ends; memory for four."""
    pages = {1: 28, 2: 14}[groups]
    with make_fake(groups=groups, max_num_seqs=8, pool_tokens=16 * pages) as fake:
        params = SamplingParams(max_tokens=52, ignore_eos=True)
        prompts = [f"{number:048d}" for number in range(8)]
        requests = [fake.engine.prepare(prompt, params) for prompt in prompts]
        for prompt, stream in zip(prompts, fake.engine.submit_many(requests), strict=True):
            deltas = list(stream)
            assert "".join(delta.text for delta in deltas) == (prompt * 2)[:52]
            # What the service counts as completion tokens:
            assert sum(len(delta.token_ids) for delta in deltas) == 52
            assert sum(len(delta.times_s) for delta in deltas) == 52
        assert fake.engine.load().result(10).num_preemptions >= 2
        fake.wait_free()


@pytest.mark.parametrize(
    ("ignore_eos", "count", "reason"),
    [(True, 200, FinishReason.LENGTH), (False, 11, FinishReason.STOP)],
)
def test_eos_ends_unless_ignored(ignore_eos: bool, count: int, reason: FinishReason):
    with make_fake(spell("0123456789")) as fake:
        delta = run(fake, max_tokens=200, ignore_eos=ignore_eos)
        assert (len(delta.token_ids), delta.finish_reason) == (count, reason)
        assert delta.text.startswith("0123456789")
        if not ignore_eos:
            assert delta.token_ids[-1] == EOS
            assert delta.text == "0123456789"


def test_every_piece_of_text_is_whole_characters():
    with make_fake(spell(EMOJI)) as fake:
        deltas = list(open_stream(fake, "x", SamplingParams(max_tokens=100)))
        assert "".join(d.text for d in deltas) == EMOJI
        assert not any("\ufffd" in d.text for d in deltas)


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    with make_fake(spell("a🫠")) as fake:
        delta = run(fake, max_tokens=3)
        assert delta.text.startswith("a\ufffd")
        assert delta.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stop", ["🫠", "ď ", "👩", " z"])
def test_a_stop_string_ends_text_and_request(stop: str):
    with make_fake(spell(EMOJI)) as fake:
        params = SamplingParams(max_tokens=500, stop=("never", stop), ignore_eos=True)
        deltas = list(open_stream(fake, "x", params))
        assert "".join(d.text for d in deltas) == EMOJI[: EMOJI.index(stop)]
        assert deltas[-1].finish_reason is FinishReason.STOP
        length = len(EMOJI[: EMOJI.index(stop)].encode()) + len(stop.encode())
        assert sum(len(d.token_ids) for d in deltas) == length
        fake.wait_free()


def test_a_stop_string_ends_a_request_that_nobody_reads():
    with make_fake(spell("one two three")) as fake:
        params = SamplingParams(max_tokens=500, stop=("two",), ignore_eos=True)
        stream = open_stream(fake, "x", params, "a")
        fake.wait_free()
        # 7 tokens complete the stop; each is a plan, and one more was under way.
        assert fake.executor.num_plans_with("a") <= 8
        assert stream.read_all().text == "one "


def test_a_stop_string_in_the_last_token_wins_over_length():
    with make_fake(spell("ab!")) as fake:
        delta = run(fake, max_tokens=3, stop=("!",))
        assert (delta.text, delta.finish_reason) == ("ab", FinishReason.STOP)


def test_logprobs_come_with_their_tokens():
    with make_fake() as fake:
        delta = run(fake, max_tokens=3, logprobs=2)
        assert [entry.sampled for entry in delta.logprobs] == [-0.5, -1.5, -2.5]
        assert all(len(entry.top) == 2 for entry in delta.logprobs)
        assert run(fake, max_tokens=3).logprobs == ()


def test_seeds_are_drawn_or_kept():
    with make_fake() as fake:
        drawn = {fake.engine.prepare("a", SamplingParams()).seed for _ in range(20)}
        assert len(drawn) == 20
        assert fake.engine.prepare("a", SamplingParams(seed=-7)).seed == -7


def test_chat_is_rendered():
    with make_fake() as fake:
        chat = Chat([{"role": "user", "content": "hi"}])
        prompt = fake.engine.prepare(chat, SamplingParams()).prompt_token_ids
        start, end = 257, 258  # <|im_start|>, <|im_end|>
        assert prompt == (start, *b"user\nhi", end, *b"\n", start, *b"assistant\n")


# Bad input: refused before anything is queued, and nothing is left of it.


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", InvalidRequest, ["prompt", "at least one token"]),
        ([], InvalidRequest, ["prompt", "at least one token"]),
        ([1, VOCAB_SIZE], InvalidRequest, ["prompt", f"{VOCAB_SIZE} at position 1", "0 to 299"]),
        ([-1], InvalidRequest, ["prompt", "-1 at position 0"]),
        ([True], InvalidRequest, ["prompt", "token 0 must be an integer"]),
        ("\ud800", InvalidRequest, ["prompt", "Unicode"]),
        (Chat([]), InvalidRequest, ["messages", "at least one"]),
        (Chat([{"role": "user"}]), InvalidRequest, ["messages", "message 0", "content"]),
        ("x" * 1024, OutOfRange, ["prompt", "1024"]),
        ([7] * 1025, OutOfRange, ["prompt", "1025", "1024"]),
        ("x" * 6_000_000, OutOfRange, ["prompt", "more than", "1024"]),
    ],
)
def test_bad_prompts_name_field_and_limit(prompt, error: type[InvalidRequest], words: list[str]):
    with make_fake() as fake:
        with pytest.raises(error) as caught:
            fake.engine.prepare(prompt, SamplingParams())
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert (type(caught.value), caught.value.field) == (error, words[0])
        assert fake.is_free
        assert not fake.executor.plans
        assert run(fake, max_tokens=2).text == "ab"


def test_a_prompt_one_below_the_limit_gets_its_one_token():
    with make_fake() as fake:
        delta = run(fake, "x" * 1023, max_tokens=50)
        assert (delta.text, delta.finish_reason) == ("x", FinishReason.LENGTH)


def test_a_prompt_that_can_never_fit_is_refused_and_the_next_served():
    with make_fake(pool_tokens=1024, max_model_len=4096) as fake:
        with pytest.raises(OutOfRange, match=r"1500.*KV pool.*1024"):
            fake.engine.prepare("a" * 1500, SamplingParams())
        assert len(run(fake, "b" * 32, max_tokens=8).token_ids) == 8
        assert len(run(fake, "c" * 1024, max_tokens=8).token_ids) == 1
        fake.wait_free()


def test_a_full_queue_refuses_and_recovers():
    # 300 tokens at 50 ms: the first request outlasts whatever else happens here.
    with make_fake(max_waiting=2, max_num_seqs=1, pool_tokens=1024, step_s=0.05) as fake:
        fake.executor.pause_at(lambda plan: True)
        first = open_stream(fake)
        fake.executor.wait_paused()
        requests = [fake.engine.prepare("q", SamplingParams(max_tokens=2)) for _ in range(3)]
        reply = []
        adder = threading.Thread(target=lambda: reply.extend(fake.engine.submit_many(requests)))
        adder.start()
        fake.executor.resume()
        adder.join()
        assert len(reply) == 2  # in order, until it was full
        with pytest.raises(QueueFull, match="max_waiting: 2"):
            fake.engine.submit_many(requests[2:])
        first.close()
        assert [stream.read_all().text for stream in reply] == ["qq", "qq"]
        assert fake.engine.submit_many(requests[2:])[0].read_all().text == "qq"


def test_an_id_in_use_is_refused_and_its_owner_not_disturbed():
    with make_fake(step_s=0.01) as fake:  # so that the owner runs for two seconds
        owner = open_stream(fake, "own", SamplingParams(max_tokens=200), "same")
        others = [fake.engine.prepare("x", LONG, i) for i in ("one", "same", "two")]
        with pytest.raises(InvalidRequest, match="request_id: 'same' is in use"):
            fake.engine.submit_many(others)
        assert len(owner.read_all().token_ids) == 200
        fake.wait_free()
        again = open_stream(fake, "own", SamplingParams(max_tokens=3), "same")
        assert len(again.read_all().token_ids) == 3


# Cancels: in every phase, by every way that a consumer can go.


@pytest.mark.parametrize("groups", [1, 3])
def test_a_prompt_cancelled_in_its_third_chunk_is_gone(groups: int):
    with make_fake(groups=groups, max_model_len=8192, pool_tokens=8192) as fake:
        other = open_stream(fake, "other", LONG, "b")
        fake.executor.pause_at(lambda plan: any(c.start >= 100 for c in plan.chunks))
        stream = open_stream(fake, "p" * 4096, LONG, "a")
        fake.executor.wait_paused()
        aborted = fake.engine.abort("a")
        count = fake.executor.num_plans_with("a")
        fake.executor.resume()
        assert aborted.result(5) is True
        assert fake.executor.num_plans_with("a") == count == 3
        delta = stream.read_all()
        assert (delta.token_ids, delta.finish_reason) == ((), FinishReason.ABORT)
        assert other.read_all().text == "other" * 60
        fake.wait_free()


def test_a_prompt_cancelled_before_its_handoff_is_gone():
    with make_fake(groups=3, handoff_pages=1, pool_tokens=4096) as fake:
        fake.executor.pause_at(lambda plan: any(h.first_page == 1 for h in plan.handoffs))
        stream = open_stream(fake, "p" * 200, LONG, "a")
        fake.executor.wait_paused()
        stream.close()
        fake.executor.resume()
        fake.wait_free()
        count = fake.executor.num_plans_with("a")
        run(fake, max_tokens=30)
        assert fake.executor.num_plans_with("a") == count


def test_a_waiting_request_can_be_cancelled():
    with make_fake(max_num_seqs=1) as fake:
        fake.executor.pause_at(lambda plan: True)  # or it may be over before the abort
        prepare = fake.engine.prepare
        running, waiting = fake.engine.submit_many(
            [prepare("abc", LONG, "r"), prepare("abc", LONG, "w")]
        )
        fake.executor.wait_paused()
        aborted = fake.engine.abort("w")
        fake.executor.resume()
        assert aborted.result(5) is True
        assert waiting.read_all().finish_reason is FinishReason.ABORT
        assert fake.engine.abort("w").result(5) is False
        assert fake.executor.num_plans_with("w") == 0
        assert len(running.read_all().token_ids) == 300


def test_a_dropped_stream_cancels_its_request():
    with make_fake(step_s=0.001) as fake:
        stream = open_stream(fake)
        next(stream)
        del stream
        gc.collect()
        fake.wait_free(1.0)
        assert len(fake.executor.plans) < 200
        with open_stream(fake) as stream:
            next(stream)
        fake.wait_free(1.0)


def test_closed_and_cancelled_async_consumers_cancel_their_requests():
    async def generator(fake: Fake):
        with await fake.engine.submit(fake.engine.prepare("abc", LONG)) as stream:
            async for delta in stream:
                yield delta

    async def first_token(fake: Fake) -> None:
        agen = generator(fake)
        await agen.__anext__()
        await agen.aclose()

    async def cancelled_task(fake: Fake) -> None:
        stream = await fake.engine.submit(fake.engine.prepare("abc", LONG))
        fake.executor.pause_at(lambda plan: True)
        await asyncio.to_thread(fake.executor.wait_paused)

        async def consume() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fake.executor.resume()

    with make_fake(step_s=0.001) as fake:
        for scenario in (first_token, cancelled_task):
            asyncio.run(scenario(fake))
            fake.wait_free(1.0)


def test_a_submit_that_is_cancelled_leaves_nothing():
    async def scenario(fake: Fake) -> None:
        fake.executor.pause_at(lambda plan: True)
        owner = await fake.engine.submit(fake.engine.prepare("abc", LONG, "id"))
        await asyncio.to_thread(fake.executor.wait_paused)
        for request_id in ("id", "other"):  # neither its own request nor the owner's of the id
            submitting = fake.engine.submit(fake.engine.prepare("abc", LONG, request_id))
            task = asyncio.create_task(submitting)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        fake.executor.resume()
        assert sum([len(d.token_ids) async for d in owner]) == 300

    with make_fake() as fake:
        asyncio.run(scenario(fake))
        assert fake.executor.num_plans_with("other") == 0
        fake.wait_free()


def test_twelve_clients_that_give_up_leave_four_slots_free_every_time():
    async def read(stream: OutputStream) -> None:
        async for _ in stream:
            pass

    async def give_up(fake: Fake) -> None:
        stream = await fake.engine.submit(fake.engine.prepare("abc", LONG))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(stream), 0.05)

    async def main(fake: Fake) -> None:
        await asyncio.gather(*(give_up(fake) for _ in range(12)))

    with make_fake(step_s=0.002, max_num_seqs=4) as fake:
        for _ in range(3):
            asyncio.run(main(fake))
            fake.wait_free(1.0)
            assert fake.engine.num_live == 0
            assert fake.engine.healthy


def test_a_consumer_that_stops_reading_blocks_nobody():
    with make_fake() as fake:
        sleeper = open_stream(fake)
        first = next(sleeper)
        assert len(run(fake, max_tokens=100).token_ids) == 100
        fake.wait_free()  # also the sleeper's request has run to its end
        rest = list(sleeper)
        assert len(rest) <= 1  # all that was kept comes in one piece
        assert sum(len(delta.token_ids) for delta in [first, *rest]) == LONG.max_tokens
