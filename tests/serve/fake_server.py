"""`python -m tests.serve.fake_server`: the real server process over a scripted engine.

FAKE_STEP_S: seconds a step. FAKE_BUILD_S: seconds that loading takes.
"""

from __future__ import annotations

import os
import sys
import time

from conflux_jax.build import Progress
from conflux_jax.config import Config
from conflux_jax.engine import Engine
from conflux_jax.serve.__main__ import main
from tests.fakes import make_fake


def build(config: Config, progress: Progress) -> Engine:
    progress("load", 0, 1)
    time.sleep(float(os.environ.get("FAKE_BUILD_S", "0")))
    progress("load", 1, 1)
    return make_fake(step_s=float(os.environ.get("FAKE_STEP_S", "0.002"))).engine


if __name__ == "__main__":
    sys.exit(main(build=build))
