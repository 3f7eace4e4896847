"""`python -m tests.soak [--seconds N] [--calls N] [--seed N]`: a real server under a storm of
sound, bad, cancelled and broken requests, for as long as asked, and until there were so many.

Fails unless every call ends in time and as it must, every answer that is read to its end is what
the same request says alone, and in the calm after each round nothing is left: no request, page,
file or thread; memory within 5% of what it was after the warm-up. First of all, 2,000 streams are
open at once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from tests.soak.server import serving
from tests.soak.storm import NUM_STREAMS, Storm

MIN_LEFT_S = 10.0  # for rounds, however long the start took
MAX_ROUND_S = 60.0
ROUNDS = 4  # of a short run, with that of the warm-up
SHOWN_PROBLEMS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="at least (default: 120)")
    parser.add_argument(
        "--calls", type=int, default=0, metavar="N", help="at least, without the warm-up's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is asked (default: 0)")
    options = parser.parse_args(arguments)
    started_s = time.monotonic()
    with serving() as served:
        print(f"serving after {time.monotonic() - started_s:.0f} s, {served.num_files} files")
        storm = Storm(served, options.seed)
        asyncio.run(run(storm, started_s + options.seconds, options.calls))
        code, log = served.stop()
        at = log.find("Traceback")
        if code or at >= 0:
            said = log[max(at - 500, 0) : at + 4000] if at >= 0 else log[-3000:]
            storm.problems.append(f"the server ended with {code} and said: {said}")
    report(storm, time.monotonic() - started_s)
    return 1 if storm.problems else 0


async def run(storm: Storm, ends_s: float, num_calls: int) -> None:
    """Rounds until `ends_s`, on time.monotonic's clock, and until they made `num_calls`; the first
    one, and the streams before it, are the warm-up."""
    await storm.learn()
    await storm.settle()
    await storm.many_streams()
    say(storm, f"{NUM_STREAMS} streams at once")
    round_s = min(max(ends_s - time.monotonic(), MIN_LEFT_S) / ROUNDS, MAX_ROUND_S)
    await storm.round(round_s)
    num_warm, enough = len(storm.looks), storm.num_calls + num_calls
    say(storm, "warm-up")
    while len(storm.looks) == num_warm or time.monotonic() < ends_s or storm.num_calls < enough:
        if len(storm.problems) >= SHOWN_PROBLEMS:
            break
        left_s = ends_s - time.monotonic() if storm.num_calls >= enough else round_s
        await storm.round(min(round_s, max(left_s, MIN_LEFT_S / ROUNDS)))
        say(storm, f"round {len(storm.looks) - num_warm}")
    storm.judge(num_warm)


def say(storm: Storm, what: str) -> None:
    print(f"{what}: {storm.num_calls} calls, {storm.looks[-1]}", flush=True)


def report(storm: Storm, seconds: float) -> None:
    print(f"{storm.num_calls} calls in {seconds:.0f} s: {dict(storm.tally)}")
    print(f"requests that the server ended, by reason: {storm.looks[-1].over}")
    for problem in storm.problems[:SHOWN_PROBLEMS]:
        print(f"problem: {problem}")
    print("failed" if storm.problems else "passed")


if __name__ == "__main__":
    sys.exit(main())
