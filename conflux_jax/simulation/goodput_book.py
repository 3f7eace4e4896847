"""What a survey of goodput has found so far: a line of JSON for each piece of work, so that one
that was broken off goes on where it stood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conflux_jax.config import ConfigError
from conflux_jax.simulation.goodput import Case

KINDS = ("tuned", "found", "curve")  # the settings of a case; of one seed its goodput; attainment

Record = dict[str, Any]  # JSON values


class Book:
    """path: of the file that is read and added to; None: nothing is kept. Raises ConfigError that
    names file and line where one is no record, OSError where it cannot be read."""

    def __init__(self, path: Path | None = None):
        self._path = path
        self._records: dict[str, Record] = {}
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                kind, case, seed = record["kind"], record["case"], record["seed"]
                known = kind in KINDS and isinstance(case, dict) and isinstance(seed, int)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}: line {number}: no record of a survey") from error
            if not known:
                raise ConfigError(f"{path}: line {number}: no record of a survey")
            self._records[_key(kind, case, seed)] = record

    def get(self, kind: str, case: Case, seed: int = 0) -> Record | None:
        return self._records.get(_key(kind, case.record(), seed))

    def put(self, kind: str, case: Case, seed: int, values: Mapping[str, Any]) -> None:
        """Written at once."""
        record = {"kind": kind, "case": case.record(), "seed": seed, **values}
        self._records[_key(kind, case.record(), seed)] = record
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _key(kind: str, case: Mapping[str, Any], seed: int) -> str:
    return json.dumps([kind, case, seed], sort_keys=True)
