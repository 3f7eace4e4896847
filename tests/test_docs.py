"""The pages whose examples are computed: what they print must be what comes out."""

from __future__ import annotations

import doctest

import pytest

from tests.test_structure import ROOT


@pytest.mark.parametrize("page", ["scheduling.md", "execution.md"])
def test_examples_come_out_as_written(page: str):
    found = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert found.attempted > 1 and not found.failed
