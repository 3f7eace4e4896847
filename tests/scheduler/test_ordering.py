from itertools import islice

from conflux_jax.scheduler.ordering import FirstComeFirstServed
from conflux_jax.scheduler.state import RequestState
from tests.scheduler.harness import make_request


def states(*lengths: int) -> list[RequestState]:
    return [RequestState(make_request(f"r{i}", length, 4), i) for i, length in enumerate(lengths)]


def test_who_returns_takes_the_place_of_its_arrival():
    queue, made = FirstComeFirstServed(), states(1, 2, 3, 4, 5)
    for state in made:
        queue.add(state)
    for state in (made[0], made[1], made[3]):
        queue.remove(state)
        state.num_preemptions, state.outputs = 1, [7]
    for state in (made[3], made[0], made[1]):
        queue.add(state)
    assert list(queue.waiting(0.0)) == made
    assert len(queue) == 5 and queue.num_tokens == 15 + 3
    queue.remove(made[1])
    queue.remove(made[2])
    assert list(queue.waiting(0.0)) == [made[0], made[3], made[4]]
    assert len(queue) == 3 and queue.num_tokens == 2 + 5 + 5


def test_tokens_that_come_while_waiting_do_not_upset_the_count():
    queue, (state,) = FirstComeFirstServed(), states(3)
    state.num_preemptions = 1
    queue.add(state)
    state.outputs.append(1)
    queue.remove(state)
    assert queue.num_tokens == 0 and len(queue) == 0


def test_the_first_of_many_is_found_after_many_left():
    queue, made = FirstComeFirstServed(), states(*[1] * 2000)
    for state in made:
        queue.add(state)
    for state in made[:-2]:
        assert next(iter(queue.waiting(0.0))) is state
        queue.remove(state)
    assert list(islice(queue.waiting(0.0), 9)) == made[-2:]


def test_partly_prefilled_go_by_arrival():
    queue, made = FirstComeFirstServed(), states(1, 1, 1)
    assert queue.started([made[2], made[0], made[1]], 0.0) == made
