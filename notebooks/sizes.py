"""How much a notebook does. With CONFLUX_NOTEBOOK_QUICK=1 in the environment, as `make
notebooks-check` sets it, just enough to show that every cell still runs; no figure means anything
then."""

from __future__ import annotations

import os

VARIABLE = "CONFLUX_NOTEBOOK_QUICK"


def sized[T](full: T, quick: T) -> T:
    """Raises ValueError where the variable is neither 0 nor 1."""
    setting = os.environ.get(VARIABLE) or "0"
    if setting not in ("0", "1"):
        raise ValueError(f"{VARIABLE}: must be 0 or 1, got {setting!r}")
    return quick if setting == "1" else full
