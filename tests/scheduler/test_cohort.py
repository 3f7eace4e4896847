"""What the members of a cohort were given, against a list for each."""

from __future__ import annotations

import random

from conflux_jax.request import Request, SamplingParams
from conflux_jax.scheduler.cohort import Cohort
from conflux_jax.scheduler.state import RequestState


def make_state(number: int) -> RequestState:
    request = Request(str(number), (1, 2), SamplingParams(max_tokens=5), 5)
    state = RequestState(request, number)
    state.group, state.row = number % 3, number
    return state


def test_everybody_has_what_was_opened_for_it_and_nothing_else():
    """Over many openings, with members that come, go, and open a page on their own."""
    rng, cohort, page = random.Random(0), Cohort(), 0
    expected: dict[RequestState, list[int]] = {}
    gone: list[RequestState] = []
    for number in range(400):
        chance = rng.random()
        if chance < 0.3 or not cohort.members:
            state = make_state(number)
            expected[state] = [1000 + number]  # what it had before
            state.pages.append(1000 + number)
            cohort.add(state)
        elif chance < 0.45:
            state = rng.choice(cohort.members)
            cohort.remove(state)
            gone.append(state)
        elif chance < 0.55:
            state = rng.choice(cohort.members)
            cohort.settle(state)
            state.pages.append(-number)
            expected[state].append(-number)
        else:
            pages = list(range(page, page + len(cohort.members)))
            page += len(pages)
            for state, opened in zip(cohort.members, pages, strict=True):
                expected[state].append(opened)
            cohort.open(pages)
        assert all(list(state.held_pages) == pages for state, pages in expected.items())
        groups, (index, rows) = cohort.where
        assert groups == index.tolist() == [state.group for state in cohort.members]
        assert rows.tolist() == [state.row for state in cohort.members]
    assert gone and all(list(state.pages) == expected[state] for state in gone)
    assert max(map(len, expected.values())) > 64  # of more openings than a cohort keeps
