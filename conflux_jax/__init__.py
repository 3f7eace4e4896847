"""conflux_jax: an LLM inference engine that batches prefill and decode together in the linear
layers and splits them in attention. Importing it does not import JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conflux_jax.llm import LLM, RequestOutput
    from conflux_jax.request import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "conflux_jax.llm",
    "RequestOutput": "conflux_jax.llm",
    "SamplingParams": "conflux_jax.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
