"""How the groups share an iteration's prefill tokens.

An iteration lasts as long as its fullest group, and every group runs the same static number of
rows; so prefill is poured like water over the groups' decode rows, lowest cups first.
"""

from __future__ import annotations

from collections.abc import Sequence


def waterfill(loads: Sequence[int], level: int, total: int) -> tuple[int, ...]:
    """Cut `total` prefill tokens into a share for each group.

    loads: decode rows of each group. level: the most rows that a group may have with its share; a
    group whose load is above it takes none. The shares sum to `total`, and the largest
    `load + share` of the groups that have one is the least possible. Where water does not divide
    evenly, the groups of lowest index take one token more. O(G log G).

    Raises ValueError when `total` is negative or more than the groups can take.

    Worked: loads 40, 10, 10, 0 and level 300 take 260 + 290 + 290 + 300 = 1,140 tokens at most. A
    total of 25 fills the last cup to 10, then raises three cups by 5 each:

    >>> waterfill((40, 10, 10, 0), 300, 1140)
    (260, 290, 290, 300)
    >>> waterfill((40, 10, 10, 0), 300, 25)
    (0, 5, 5, 15)
    >>> waterfill((40, 10, 10, 0), 300, 12)
    (0, 1, 1, 10)
    """
    if total < 0:
        raise ValueError(f"total must not be negative, got {total}")
    if not total:
        return (0,) * len(loads)
    shares = [0] * len(loads)
    cups = sorted(range(len(loads)), key=loads.__getitem__)
    poured, wet = 0, 0  # tokens that bring the first `wet` cups level with the last of them
    for cup in cups:
        if loads[cup] >= level:
            break
        step = (loads[cup] - loads[cups[wet - 1]]) * wet if wet else 0
        if poured + step > total:
            break
        poured += step
        wet += 1
    if wet == 0:
        raise ValueError(f"{total} tokens do not fit: every group is at the level of {level}")
    surface, rest = divmod(total - poured, wet)
    surface += loads[cups[wet - 1]]
    if surface + (rest > 0) > level:
        raise ValueError(f"{total} tokens do not fit below the level of {level}")
    for rank, cup in enumerate(sorted(cups[:wet])):
        shares[cup] = surface - loads[cup] + (rank < rest)
    return tuple(shares)
