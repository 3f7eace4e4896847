"""Operators of a layer, each as the engine has it and as torch's Llama calls it: what
`xla_vs_torch` times. Every method of `Operators` gives (ours, theirs), functions without arguments
that return when the work is done."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from conflux_jax.config import Config
from conflux_jax.execution.sampling import SamplingInputs, VocabShard, sample
from conflux_jax.models.attention import AttentionInputs, DecodeInputs, PrefillInputs
from conflux_jax.models.heads import HeadLayout
from conflux_jax.models.hopper_kernels import attention_options
from conflux_jax.models.layers import linear, rms_norm, rope_inv_freq, rope_tables, rotate
from conflux_jax.models.spec import ModelSpec
from pallas_kernels.blockwise import Segments, max_prefill_blocks, prefill_block_queries

from sizes import sized

Run = Callable[[], Any]
CONTEXT = 1024  # tokens of every request in the pool
REQUESTS, PAGE, SEGMENTS = 8, 16, 4
REPEATS = sized(9, quick=1)
SETTLE_S = 0.005  # OpenMP's threads spin for a while when torch is done, and would slow XLA's


def milliseconds(runs: Mapping[Hashable, Run]) -> dict[Any, float]:
    """Median of REPEATS of each of the functions, which take turns after one run that does not
    count."""
    for run in runs.values():
        run()
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            time.sleep(SETTLE_S)
            began_s = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - began_s))
    return {name: statistics.median(values) for name, values in times.items()}


def on_xla(function: Callable[..., Any], *arguments: Any) -> Run:
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*arguments))


def on_torch(function: Callable[..., Any], *arguments: Any) -> Run:
    def run() -> None:
        function(*arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


class Operators:
    """widen_rows: see `models.layers.linear`; of the engine's own choice for this device."""

    def __init__(self, spec: ModelSpec, device: str, widen_rows: int | None):
        self.spec, self.device, self.widen_rows = spec, device, widen_rows
        self.heads = HeadLayout.make(spec, 1, 1)
        self.qkv = spec.num_heads + 2 * spec.num_kv_heads

    def random(self, *shape: int, dtype: str) -> tuple[jax.Array, torch.Tensor]:
        """The same numbers for both."""
        array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        theirs = torch.from_numpy(array).to(self.device, getattr(torch, dtype))
        return jnp.asarray(array, dtype), theirs

    def linear(self, dtype: str, rows: int) -> tuple[Run, Run]:
        """Gate and up projection."""
        hidden, outputs = self.spec.hidden_size, 2 * self.spec.intermediate_size
        x, their_x = self.random(rows, hidden, dtype=dtype)
        w, their_w = self.random(outputs, hidden, dtype=dtype)
        widen = self.widen_rows if dtype == "bfloat16" else None
        ours = partial(linear, widen_rows=widen)
        return on_xla(ours, x, w), on_torch(F.linear, their_x, their_w)

    def norm(self, dtype: str, rows: int) -> tuple[Run, Run]:
        x, theirs = self.random(rows, self.spec.hidden_size, dtype=dtype)
        module = LlamaRMSNorm(self.spec.hidden_size, self.spec.rms_norm_eps).to(theirs)
        weight = jnp.ones(self.spec.hidden_size, dtype)
        ours = partial(rms_norm, eps=self.spec.rms_norm_eps)
        return on_xla(ours, x, weight), on_torch(module, theirs)

    def rotary(self, dtype: str, rows: int) -> tuple[Run, Run]:
        spec = self.spec
        x, theirs = self.random(
            rows, spec.num_heads + spec.num_kv_heads, spec.head_dim, dtype=dtype
        )
        cos, sin = rope_tables(jnp.arange(rows), rope_inv_freq(spec))
        full = [torch.from_numpy(np.concatenate([t, t], 1))[None].to(theirs) for t in (cos, sin)]
        q, k = theirs[None].transpose(1, 2).split((spec.num_heads, spec.num_kv_heads), dim=1)
        return on_xla(rotate, x, cos, sin), on_torch(apply_rotary_pos_emb, q, k, *full)

    def sampling(self, dtype: str, rows: int, top_p: float = 0.95) -> tuple[Run, Run]:
        """Temperature 0.8 and top-p; logits are float32 in both."""
        logits, theirs = self.random(rows, self.spec.vocab_size, dtype="float32")
        inputs = SamplingInputs(
            temperature=jnp.full(rows, 0.8),
            top_k=jnp.zeros(rows, jnp.int32),
            top_p=jnp.full(rows, top_p),
            min_p=jnp.zeros(rows),
            seed=jnp.zeros((rows, 2), jnp.uint32),
            position=jnp.arange(rows),
            wants_logprobs=jnp.bool_(False),
        )

        def draw(logits: torch.Tensor) -> torch.Tensor:
            values, order = (logits / 0.8).sort(dim=-1, descending=True)
            shares = values.softmax(-1)
            shares[shares.cumsum(-1) - shares > top_p] = 0
            return order.gather(-1, shares.multinomial(1))

        ours = partial(sample, vocab=VocabShard(self.spec.vocab_size))
        return on_xla(ours, logits, inputs), on_torch(draw, theirs)

    def decode_attention(self, dtype: str, rows: int, context: int) -> tuple[Run, Run]:
        """A token of each of `rows` requests (at most REQUESTS) against `context` tokens (at most
        CONTEXT), itself among them. Ours reads pages through a page table, torch one contiguous
        array."""
        spec, kernels = self.spec, self._kernels(dtype)
        sent, theirs, pool, table = self._operands(rows, dtype)
        contexts = jnp.full(rows, context - 1, jnp.int32)
        writes = jnp.zeros(rows, jnp.int32)
        inputs = DecodeInputs(jnp.int32(rows), contexts, table[:rows], writes)

        def ours(sent, pool, inputs):
            given = AttentionInputs(inputs, None, None)
            planned = kernels.planned(given, self.heads, self.heads).decode
            return kernels.decode(sent[None], pool, jnp.int32(0), planned, self.heads)

        _, kv = self.random(2, rows, spec.num_kv_heads, context, spec.head_dim, dtype=dtype)
        attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
        query = theirs[:, : spec.num_heads, None]
        return on_xla(ours, sent, pool, inputs), on_torch(attend, query, kv[0], kv[1])

    def prefill_attention(self, dtype: str, context: int, rows: int = 256) -> tuple[Run, Run]:
        """A chunk of `rows` tokens after `context` others, at most CONTEXT."""
        spec, kernels = self.spec, self._kernels(dtype)
        sent, theirs, pool, table = self._operands(rows, dtype)
        firsts = range(0, rows, prefill_block_queries(rows))
        blocks = np.zeros((max_prefill_blocks(rows, SEGMENTS), 3), np.int32)
        blocks[: len(firsts)] = [(0, first, rows) for first in firsts]
        segments = Segments(
            starts=jnp.zeros(SEGMENTS, jnp.int32),
            context_lens=jnp.zeros(SEGMENTS, jnp.int32).at[0].set(context),
            page_table=jnp.zeros((SEGMENTS, table.shape[1]), jnp.int32).at[0].set(table[0]),
            blocks=jnp.asarray(blocks),
            num_blocks=jnp.int32(len(firsts)),
        )
        where = jnp.arange(rows, dtype=jnp.int32)
        inputs = PrefillInputs(where, where, where, segments)

        def ours(sent, pool, inputs):
            given = AttentionInputs(None, inputs, None)
            planned = kernels.planned(given, self.heads, self.heads).prefill
            return kernels.prefill(sent, pool, jnp.int32(0), planned, self.heads)

        keys = context + rows
        _, kv = self.random(2, 1, spec.num_kv_heads, keys, spec.head_dim, dtype=dtype)
        mask = torch.ones(rows, keys, dtype=torch.bool, device=self.device).tril(context)
        attend = partial(F.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        query = theirs[:, : spec.num_heads].transpose(0, 1)[None]
        return on_xla(ours, sent, pool, inputs), on_torch(attend, query, kv[0], kv[1])

    def gpu_attention(self, tokens: int) -> dict[str, Run]:
        """Causal attention of a sequence by those of a GPU's back ends that run here."""
        shape = 1, self.spec.num_heads, tokens, self.spec.head_dim
        q, k, v = torch.randn(3, *shape, dtype=torch.bfloat16, device=self.device)
        runs: dict[str, Run] = {}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def attend(backend: SDPBackend = backend) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            with contextlib.suppress(RuntimeError):  # it says so where it does not run
                attend()
                runs[f"torch SDPA, {backend.name.lower()}, {tokens} causal"] = on_torch(attend)
        flat = jnp.zeros((1, tokens, *shape[1::2]), jnp.bfloat16)
        cudnn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        runs[f"JAX cuDNN, {tokens} causal"] = on_xla(cudnn, flat, flat, flat)
        return runs

    def _kernels(self, dtype: str) -> Any:
        """What the engine would attend with on this device."""
        device, head_dim = jax.devices()[0], self.spec.head_dim
        options = attention_options(Config().execution, device, jnp.dtype(dtype), head_dim, PAGE)
        return options.kernels

    def _operands(self, rows: int, dtype: str) -> tuple[jax.Array, torch.Tensor, Any, Any]:
        """Queries, keys and values of `rows` tokens, for both; a pool and its page table."""
        sent, theirs = self.random(rows, self.qkv, self.spec.head_dim, dtype=dtype)
        pages = REQUESTS * CONTEXT // PAGE
        page_rows = self.spec.num_kv_heads * PAGE
        pool, _ = self.random(1, 2, pages, page_rows, self.spec.head_dim, dtype=dtype)
        return sent, theirs, pool, jnp.arange(pages, dtype=jnp.int32).reshape(REQUESTS, -1)
