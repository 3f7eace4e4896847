"""`python -m conflux_jax.calibrate --config configs/x.yaml [--out FILE]`

Times the steps of the engine that `python -m conflux_jax.serve` would run with the same flags, and
writes a latency profile for it. Prints how far the profile is off, also on iterations that it was
not fitted to, and how far two measurements of the same iteration are apart: no profile can be
better than that. Run it while nothing else runs on the machine.

Where a GPU's multiprocessors are divided between decode and prefill attention, and the config does
not say how (`decode_sms`), it first looks for the division with the fastest iterations of both, and
writes that into the profile, from which the engine takes it. Elsewhere it says why it does not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conflux_jax.build import Progress, build_runner
from conflux_jax.config import Config, ConfigError
from conflux_jax.models.spec import ModelError
from conflux_jax.progress import ProgressBar

if TYPE_CHECKING:
    from conflux_jax.execution.measurements import Calibration
    from conflux_jax.execution.runner import Runner
    from conflux_jax.scheduler.latency_model import Identity


Builder = Callable[[Config, Progress], "tuple[Runner, Any]"]


def main(arguments: Sequence[str] | None = None, build: Builder = build_runner) -> int:
    """Calibrate; returns the exit code. What is wrong is one line on stderr."""
    parsed = parse(arguments)
    try:
        for path in (parsed.out, parsed.json, parsed.plot):
            if path is not None and not path.absolute().parent.is_dir():
                raise OSError(f"{path}: its directory does not exist")
        if parsed.plot is not None:
            _matplotlib()  # now, not after minutes of profiling
        config = Config.from_arguments(parsed)
        calibration, choice = profile(config, parsed.quick, parsed.seed, build)
        out = parsed.out or Path(default_name(calibration.model.identity))
        calibration.model.save(out)
        print(choice)
        print(calibration.table())
        if parsed.json is not None:
            summary = json.dumps(calibration.summary())
            parsed.json.write_text(summary + "\n", encoding="utf-8")
        if parsed.plot is not None:
            plot(calibration, parsed.plot)
    except (ConfigError, ModelError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"Wrote {out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conflux_jax.calibrate", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the profile (default: named after what it is of)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="errors and noise floor, as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="predicted against measured",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer repeats")
    parser.add_argument("--seed", type=int, default=0, help="which shapes, and in which order")
    Config.add_arguments(parser)
    return parser.parse_args(arguments)


def profile(config: Config, quick: bool, seed: int, build: Builder) -> tuple[Calibration, str]:
    """Load, compile, divide the multiprocessors, measure, fit. Returns also what to say of
    `decode_sms`."""
    bar = ProgressBar()
    # What an earlier profile found must not count as set, and it need not be there.
    config = Config.from_flat(config, latency_profile=None)
    runner, _ = build(config, bar)

    from conflux_jax.execution.calibration import QUICK, Effort, calibrate, draw_workloads
    from conflux_jax.execution.sms_search import choose_decode_sms, mixed_shapes, why_no_search

    max_tokens = config.scheduler.max_num_batched_tokens
    effort = QUICK if quick else Effort()
    mixed = mixed_shapes(draw_workloads(runner, max_tokens, effort, seed))
    platform, configured = runner.mesh.devices.flat[0].platform, config.execution.decode_sms
    if reason := why_no_search(platform, runner.attention, configured, mixed):
        choice = f"decode_sms: not looked for: {reason}"
    else:
        progress = partial(bar, "divide")
        choice = str(choose_decode_sms(runner, mixed, effort.repeats, seed, progress))
        runner.warm_up(partial(bar, "compile"))
    return calibrate(runner, max_tokens, effort, seed, partial(bar, "profile")), choice


def default_name(identity: Identity) -> str:
    """A file name that says what the profile is of.

    >>> default_name({"model": "a/b", "sp": 3, "tp": 1, "dtype": "bfloat16", "device_kind": "X 1"})
    'latency-a-b-sp3-tp1-bfloat16-x-1.json'
    """
    words = ["latency", identity["model"], f"sp{identity['sp']}", f"tp{identity['tp']}"]
    words += [identity["dtype"], identity["device_kind"].lower()]
    return re.sub(r"[^\w.-]+", "-", "-".join(words)) + ".json"


def plot(calibration: Calibration, path: Path) -> None:
    """Predicted against measured milliseconds, on logarithmic axes. Raises ImportError without
    matplotlib."""
    from conflux_jax.execution.measurements import KINDS

    drawing, ticker = _matplotlib()
    figure = drawing.Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    groups = (("fit", calibration.fitted, "."), ("held out", calibration.held_out, "x"))
    for name, measurements, marker in groups:
        for index, kind in enumerate(KINDS):
            chosen = [m for m in measurements if m.workload.kind == kind]
            if chosen:
                axes.plot(
                    [1000 * m.seconds for m in chosen],
                    [1000 * calibration.model.predict_s(m.workload.shape) for m in chosen],
                    marker,
                    color=f"C{index}",
                    label=f"{kind}, {name}",
                )
    ends = sorted(1000 * m.seconds for m in (*calibration.fitted, *calibration.held_out))
    axes.plot([ends[0], ends[-1]], [ends[0], ends[-1]], color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.legend()
    figure.savefig(path)


def _matplotlib() -> tuple[Any, Any]:
    """matplotlib.figure, which draws without a display, and matplotlib.ticker."""
    try:
        load = importlib.import_module
        return load("matplotlib.figure"), load("matplotlib.ticker")
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'conflux-jax[plot]'") from error


if __name__ == "__main__":
    sys.exit(main())
