"""`python -m tests.fuzz grpc|http [--seconds N]`: looks for bytes that a server would answer with
an error of its own, guided by the code that they reach (atheris). What it has found of interest is
kept for the next time in `.cache/fuzz/`; such bytes are there too, and then it ends with 77.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import atheris  # pyright: ignore  (in a venv of its own)

with atheris.instrument_imports(include=["conflux_jax"]):  # pyright: ignore
    from tests.fakes import make_fake
    from tests.fuzz.targets import SEEDS, TARGETS

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="default: 60")
    options = parser.parse_args(arguments)
    corpus = ROOT / ".cache" / "fuzz" / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[options.target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    flags = [f"-max_total_time={options.seconds}", "-max_len=512", f"-artifact_prefix={corpus}-"]
    target = TARGETS[options.target]
    with make_fake(max_model_len=64) as fake:
        atheris.Setup([sys.argv[0], *flags, str(corpus)], lambda data: target(fake.engine, data))
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
