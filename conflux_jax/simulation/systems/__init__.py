"""The systems that a simulation knows, by name."""

from __future__ import annotations

from collections.abc import Callable

from conflux_jax.simulation.system import System
from conflux_jax.simulation.systems import conflux_design, rivals

# builder(spec, hardware, gpus, settings, ordering): raises ConfigError that names what cannot work.
SYSTEMS: dict[str, Callable[..., System]] = {"conflux": conflux_design.build, **rivals.BUILDERS}
