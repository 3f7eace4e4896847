"""What several commands share: types of flags, for argparse, and how they say what is wrong."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def positive_int(text: str) -> int:
    """An integer of at least 1. Raises ArgumentTypeError or ValueError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def one_line(error: Exception) -> str:
    """What is wrong; of a file, its name and the system's word for it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
