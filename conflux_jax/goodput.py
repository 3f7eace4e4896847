"""Finds the goodput of simulated serving systems on a trace of your traffic: the highest request
rate at which 95% of the requests have every token on time, on GPUs that nobody has at hand.

TRACE is Mooncake JSONL (timestamp, input_length, output_length, hash_ids) or Azure CSV (TIMESTAMP,
ContextTokens, GeneratedTokens), in order of arrival. Slices of it are replayed faster and slower;
requests of one time are spread up to the next time. The other systems run with the best of a short
list of settings, found on the first minutes of the first slice. With --results, what was found is
kept, and is not looked for again.

The defaults (all systems, each in its own order, three slices of five minutes) are meant to be done
within 15 minutes on two cores; time is in proportion to the slices and to their minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from conflux_jax.config import ConfigError
from conflux_jax.flags import one_line, positive, positive_int
from conflux_jax.models.known_specs import KNOWN_SPECS
from conflux_jax.models.spec import ModelError
from conflux_jax.progress import ProgressBar
from conflux_jax.simulation import goodput, goodput_report
from conflux_jax.simulation.goodput import ORDERS, Case, Tuned
from conflux_jax.simulation.goodput_book import Book
from conflux_jax.simulation.hardware import load_hardware
from conflux_jax.simulation.systems import SYSTEMS
from conflux_jax.simulation.traces import TraceError

MINUTES, SLICES = 5.0, 3  # what they take: docs/simulation.md
CURVE = (1.1, 1.25)  # times the goodput: rates of the plots beyond it
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main(arguments: Sequence[str] | None = None) -> int:
    """Survey; returns the exit code. What is wrong is one line on stderr."""
    parsed = parse(arguments)
    try:
        drawing = matplotlib() if parsed.plot else None  # now, not after minutes
        for path in (parsed.json, parsed.results):
            if path is not None and not path.absolute().parent.is_dir():
                raise OSError(f"{path}: its directory does not exist")
        load_hardware(parsed.hardware)
        cases = cases_of(parsed)
        book = Book(parsed.results)
        survey(cases, parsed.slices, book, parsed.processes, curves=drawing is not None)
        found = goodput_report.rows(book, cases, parsed.slices)
        if parsed.json is not None:
            text = json.dumps(goodput_report.flat(found), indent=1) + "\n"
            parsed.json.write_text(text, encoding="utf-8")
        if drawing is not None and parsed.plot is not None:
            parsed.plot.mkdir(parents=True, exist_ok=True)
            goodput_report.plot(found, book, parsed.plot, drawing)
    except (TraceError, ConfigError, ModelError, ImportError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(goodput_report.text(found))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.goodput", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="the trace to read")
    add(
        "--system",
        choices=SYSTEMS,
        action="append",
        help="may be repeated (default: all of them)",
    )
    add("--model", choices=KNOWN_SPECS, default=Case.model, help="default: %(default)s")
    add(
        "--hardware",
        default=Case.hardware,
        metavar="NAME or FILE",
        help="h100, h200, a100 or a file of `python -m bench.hardware` (default: %(default)s)",
    )
    add(
        "--gpus",
        type=positive_int,
        default=Case.gpus,
        metavar="N",
        help="in all (default: %(default)s)",
    )
    add(
        "--order",
        choices=ORDERS,
        action="append",
        help="whose prompt is next: first come first served, or each system's own order "
        "(deadline; shortest remaining prefill first); may be repeated (default: own)",
    )
    add("--ttft", type=positive, metavar="S", help="seconds to the first token, for any prompt")
    add(
        "--tbt",
        type=positive,
        action="append",
        metavar="MS",
        help=f"milliseconds between two tokens; may be repeated (default: {Case.tbt_ms:g})",
    )
    add(
        "--minutes",
        type=positive,
        default=MINUTES,
        metavar="N",
        help="of trace in a slice (default: %(default)g)",
    )
    add(
        "--slices",
        type=positive_int,
        default=SLICES,
        metavar="N",
        help="of the trace, one after the other, each with its own noise (default: %(default)s)",
    )
    add(
        "--processes",
        type=positive_int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="that run at once (default: one a core)",
    )
    add("--results", type=Path, metavar="FILE", help="keep what is found, and start from it")
    add("--json", type=Path, metavar="FILE", help="write the figures as flat JSON")
    add("--plot", type=Path, metavar="DIR", help="draw them (needs matplotlib)")
    return parser.parse_args(arguments)


def cases_of(parsed: argparse.Namespace) -> list[Case]:
    choices = itertools.product(
        parsed.tbt or (Case.tbt_ms,), parsed.order or ("own",), parsed.system or SYSTEMS
    )
    return [
        Case(
            trace=str(parsed.trace),
            system=system,
            model=parsed.model,
            hardware=parsed.hardware,
            gpus=parsed.gpus,
            order=order,
            tbt_ms=tbt_ms,
            ttft_s=parsed.ttft,
            minutes=parsed.minutes,
        )
        for tbt_ms, order, system in choices
    ]


class Task(NamedTuple):
    kind: str  # of `goodput_book.KINDS`
    case: Case
    seed: int


def survey(
    cases: Sequence[Case],
    slices: int,
    book: Book,
    processes: int,
    curves: bool = False,
) -> None:
    """Fill the book with what it lacks, in processes of their own; cases that come first are done
    first. curves: also attainment beyond the goodput of the first slice."""
    for name in THREADS:
        os.environ.setdefault(name, "1")  # the processes share the cores, not their libraries
    total = len(cases) * (1 + slices + curves)
    ready = deque(Task("tuned", case, 0) for case in cases)
    running: dict[Future[dict[str, Any]], Task] = {}
    done, bar = 0, ProgressBar()
    bar("goodput", done, total)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        while ready or running:
            while ready and len(running) < processes:
                task = ready.popleft()
                if book.get(*task) is None:
                    running[pool.submit(work, *task, *_before(task, book))] = task
                else:
                    done += 1
                    ready.extendleft(reversed(_next(task, slices, curves)))
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                book.put(*task, future.result())
                done += 1
                ready.extendleft(reversed(_next(task, slices, curves)))
            bar("goodput", done, total)


def _next(task: Task, slices: int, curves: bool) -> list[Task]:
    """What can be done once that has been."""
    if task.kind == "tuned":
        return [Task("found", task.case, seed) for seed in range(slices)]
    wanted = curves and task.kind == "found" and task.seed == 0
    return [Task("curve", task.case, 0)] if wanted else []


def _before(task: Task, book: Book) -> Iterable[dict[str, Any]]:
    """The records that it goes on from."""
    kinds = {"tuned": (), "found": ("tuned",), "curve": ("tuned", "found")}[task.kind]
    return [record for kind in kinds if (record := book.get(kind, task.case)) is not None]


def work(
    kind: str, case: Case, seed: int, tuned: dict[str, Any] | None = None, found: Any = None
) -> dict[str, Any]:
    """One task, in a process of its own; JSON values. tuned, found: earlier records of the case."""
    if tuned is None:
        return goodput.tune(case)._asdict()
    if kind == "found":
        known = Tuned(tuned["settings"], tuned["rate"], tuned["sustained"])
        return dataclasses.asdict(goodput.measure(case, seed, known))
    rates = [found["rate"] * times for times in CURVE if found["rate"]]
    return {"points": goodput.curve(case, seed, tuned["settings"], rates)}


def matplotlib() -> Any:
    """matplotlib.figure, which draws without a display."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'conflux-jax[plot]'") from error


if __name__ == "__main__":
    sys.exit(main())
