# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""The Triton programs. Pointers first, then sizes; what a size means is said by `attention.py`.

Rows of the pool are counted in int32 and addressed in int64. UPCAST: products of float32, which is
how the interpreter, whose products misread bfloat16 and which cuts where a GPU rounds, runs the
same program.
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(-1e30)  # finite: a tile that is masked whole must not make NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _product(a, b, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _softmax_step(q, k, v, seen, scale, maximum, total, values, UPCAST: tl.constexpr):
    """More keys `[head_dim, keys]` and values `[keys, head_dim]`, of which `seen` count."""
    scores = tl.where(seen, _product(q, k, UPCAST) * scale, NEG_INF)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp2(scores - new_maximum[:, None]), 0.0)
    keep = tl.exp2(maximum - new_maximum)
    total = total * keep + tl.sum(weights, 1)
    if not UPCAST:
        weights = weights.to(v.dtype)
    values = values * keep[:, None] + _product(weights, v, UPCAST)
    return new_maximum, total, values


@triton.jit
def _pages(
    pool,
    table,
    key,
    first_row,
    values_offset,
    is_key,
    PAGE_ROWS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """(keys `[head_dim, n]`, values `[n, head_dim]`) of the tokens `key` of a sequence; zeros where
    not `is_key`. first_row: of the head in page 0 of the layer's keys."""
    dim = tl.arange(0, HEAD_DIM)
    page = tl.load(table + key // PAGE_TOKENS, mask=is_key, other=0)
    row = (first_row + page * PAGE_ROWS + key % PAGE_TOKENS).to(tl.int64)
    k = tl.load(pool + row[None, :] * HEAD_DIM + dim[:, None], mask=is_key[None, :], other=0.0)
    row += values_offset
    v = tl.load(pool + row[:, None] * HEAD_DIM + dim[None, :], mask=is_key[:, None], other=0.0)
    return k, v


@triton.jit
def prefill_program(
    layer,
    items,
    num_items,
    runs,
    page_table,
    qkv,
    pool,
    out,
    lse,
    TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    NUM_RUNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One block of queries of one head; programs after the last unit clear rows of no run."""
    program = tl.program_id(0)
    item = program // Q_HEADS
    if item >= MAX_ITEMS:
        _clear(
            runs,
            out,
            program - MAX_ITEMS * Q_HEADS,
            TOKENS,
            Q_HEADS * HEAD_DIM,
            HEAD_DIM,
            NUM_RUNS,
            QUERIES,
        )
    elif item < tl.load(num_items):
        head = program % Q_HEADS
        kv_head = head // (Q_HEADS // KV_HEADS)
        fields = items + item * ITEM_FIELDS
        row = tl.load(fields) + tl.arange(0, QUERIES)
        low, high = tl.load(fields + 1), tl.load(fields + 2)
        context, segment = tl.load(fields + 3), tl.load(fields + 4)
        first_run, own_run = tl.load(fields + 5), tl.load(fields + 6)
        dim, offset = tl.arange(0, HEAD_DIM), tl.arange(0, KEYS)
        stride = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        is_row = row < TOKENS
        at = row.to(tl.int64)[:, None] * stride + head * HEAD_DIM + dim[None, :]
        q = tl.load(qkv + at, mask=is_row[:, None], other=0.0)
        maximum = tl.full([QUERIES], NEG_INF, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        values = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
        page_tokens: tl.constexpr = PAGE_ROWS // KV_HEADS
        first_row = tl.load(layer) * (2 * PAGES * PAGE_ROWS) + kv_head * page_tokens
        table = page_table + segment * MAX_PAGES
        for start in range(0, context, KEYS):
            key = start + offset
            k, v = _pages(
                pool,
                table,
                key,
                first_row,
                PAGES * PAGE_ROWS,
                key < context,
                PAGE_ROWS,
                page_tokens,
                HEAD_DIM,
            )
            seen = (key < context)[None, :] & is_row[:, None]
            maximum, total, values = _softmax_step(
                q, k, v, seen, SCALE, maximum, total, values, UPCAST
            )
        keys = qkv + (Q_HEADS + kv_head) * HEAD_DIM
        for run in range(first_run, own_run + 1):
            end = tl.minimum(tl.load(runs + run * 2 + 1), high)
            for start in range(tl.load(runs + run * 2), end, KEYS):
                key = start + offset
                place = key.to(tl.int64) * stride
                is_key = key < end
                k = tl.load(keys + place[None, :] + dim[:, None], mask=is_key[None, :], other=0.0)
                at_values = keys + KV_HEADS * HEAD_DIM + place[:, None] + dim[None, :]
                v = tl.load(at_values, mask=is_key[:, None], other=0.0)
                seen = is_key[None, :] & (key[None, :] <= row[:, None])
                maximum, total, values = _softmax_step(
                    q, k, v, seen, SCALE, maximum, total, values, UPCAST
                )
        is_query = (row >= low) & (row < high)
        total = tl.maximum(total, 1e-30)
        at = row.to(tl.int64)[:, None] * (Q_HEADS * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
        result = (values / total[:, None]).to(q.dtype)
        tl.store(out + at, result, mask=is_query[:, None])
        block = tl.load(fields + 12)  # its place in `lse`, whatever the order of the items
        at_lse = head * (MAX_ITEMS * QUERIES) + block * QUERIES + tl.arange(0, QUERIES)
        tl.store(lse + at_lse, (maximum + tl.log2(total)) * LN_2)


@triton.jit
def _clear(runs, out, part, TOKENS, WIDTH, HEAD_DIM: tl.constexpr, NUM_RUNS, ROWS: tl.constexpr):
    """Zeros for those of ROWS rows that are no run's."""
    row = part * ROWS + tl.arange(0, ROWS)
    is_free = row < TOKENS
    for run in range(0, NUM_RUNS):
        start, end = tl.load(runs + run * 2), tl.load(runs + run * 2 + 1)
        is_free = is_free & ((row < start) | (row >= end))
    zeros = tl.zeros([ROWS, HEAD_DIM], tl.bfloat16)
    for first in range(0, WIDTH, HEAD_DIM):
        at = row.to(tl.int64)[:, None] * WIDTH + first + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(out + at, zeros, mask=is_free[:, None])


@triton.jit
def decode_program(
    q,
    new_k,
    new_v,
    pool,
    layer,
    page_table,
    context_lens,
    part,
    part_lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """All queries of one row and KV head against one of SPLITS parts of its context; the first part
    begins with the row's own key and value."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dim, query, offset = tl.arange(0, HEAD_DIM), tl.arange(0, PADDED_GROUP), tl.arange(0, KEYS)
    is_query = query < GROUP
    segment = row * KV_HEADS + kv_head
    at = (segment * GROUP + query)[:, None] * HEAD_DIM + dim[None, :]
    tile = tl.load(q + at, mask=is_query[:, None], other=0.0)
    own_k = tl.load(new_k + segment * HEAD_DIM + dim).to(tl.float32)
    own_v = tl.load(new_v + segment * HEAD_DIM + dim).to(tl.float32)
    maximum = tl.full([PADDED_GROUP], NEG_INF, tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    values = tl.zeros([PADDED_GROUP, HEAD_DIM], tl.float32)
    if split == 0:
        maximum = tl.sum(tile.to(tl.float32) * own_k[None, :], 1) * SCALE
        total += 1.0
        values += own_v[None, :]
    context = tl.load(context_lens + row)
    share = tl.cdiv(tl.cdiv(context, KEYS), SPLITS) * KEYS
    page_tokens: tl.constexpr = PAGE_ROWS // KV_HEADS
    first_row = tl.load(layer) * (2 * PAGES * PAGE_ROWS) + kv_head * page_tokens
    for start in range(split * share, tl.minimum((split + 1) * share, context), KEYS):
        key = start + offset
        is_key = key < context
        k, v = _pages(
            pool,
            page_table + row * MAX_PAGES,
            key,
            first_row,
            PAGES * PAGE_ROWS,
            is_key,
            PAGE_ROWS,
            page_tokens,
            HEAD_DIM,
        )
        seen = is_key[None, :] & is_query[:, None]
        maximum, total, values = _softmax_step(
            tile, k, v, seen, SCALE, maximum, total, values, UPCAST
        )
    total = tl.maximum(total, 1e-30)
    place = (segment * GROUP + query) * SPLITS + split
    at = place[:, None] * HEAD_DIM + dim[None, :]
    tl.store(part + at, values / total[:, None], mask=is_query[:, None])
    tl.store(part_lse + place, maximum + tl.log2(total), mask=is_query)


@triton.jit
def merge_program(
    part, part_lse, out, lse, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr
):
    """The parts of one query, weighted by their log-sum-exps."""
    query = tl.program_id(0)
    dim, split = tl.arange(0, HEAD_DIM), tl.arange(0, PADDED)
    is_split = split < SPLITS
    log2_sums = tl.load(part_lse + query * SPLITS + split, mask=is_split, other=NEG_INF)
    maximum = tl.max(log2_sums, 0)
    weights = tl.where(is_split, tl.exp2(log2_sums - maximum), 0.0)
    total = tl.sum(weights, 0)
    at = (query * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(part + at, mask=is_split[:, None], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + query * HEAD_DIM + dim, result.to(tl.bfloat16))
    tl.store(lse + query, (maximum + tl.log2(total)) * LN_2)
