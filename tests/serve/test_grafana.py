"""The Grafana dashboard asks for metrics that there are, and for labels that they have."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.core import HistogramMetricFamily

from conflux_jax.serve.metrics import FAMILIES
from tests.serve.harness import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
METRIC = re.compile(r"\b((?:vllm|conflux):\w+)(?:\{([^}]*)\})?")


def samples() -> dict[str, set[str]]:
    """The labels of every sample, by its name."""
    named = {}
    for family in FAMILIES:
        is_histogram = family.kind is HistogramMetricFamily
        for ending in ("_bucket", "_sum", "_count") if is_histogram else ("",):
            labels = {"model_name", *family.labels} | ({"le"} if ending == "_bucket" else set())
            named[family.full_name("vllm:") + ending] = labels
    return named


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_is_there(expression: str):
    found = METRIC.findall(expression)
    assert found
    has = samples()
    for name, matchers in found:
        assert set(re.findall(r"(\w+)=", matchers)) <= has[name]
    grouped = [set(names.split(", ")) for names in re.findall(r"by \(([^)]*)\)", expression)]
    for names in grouped:
        assert names <= set.intersection(*(has[name] for name, _ in found))


def test_legends_name_labels_that_the_result_has():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = METRIC.findall(target["expr"])
            has = set.union(*(samples()[name] for name, _ in names))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= has


def test_panels_lie_beside_each_other():
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
