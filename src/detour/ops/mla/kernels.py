"""The Triton kernel of absorbed latent attention, for both row layouts, chosen slots or pages.

Rows are the matrix units' M side and (token, head) pairs the N side: 8 heads a rank waste nothing.
A packed row's e4m3 numbers become float16 exactly; its four scales meet the scores and the weights
instead of the numbers, and `level`, the largest scale so far, keeps the weights in float16's range.
"""

import triton
import triton.language as tl


@triton.jit
def power_of_two(top):
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 27 << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_query(source, part: tl.constexpr, WIDTH: tl.constexpr, live):
    at = part * WIDTH + tl.arange(0, WIDTH)
    return tl.load(source[None, :] + at[:, None], mask=live[None, :], other=0.0)


@triton.jit
def load_rows(cache, base, part: tl.constexpr, WIDTH: tl.constexpr, inside, PACKED: tl.constexpr):
    at = part * WIDTH + tl.arange(0, WIDTH)
    if PACKED:
        rows = tl.load(cache + base[:, None] + at[None, :], mask=inside[:, None], other=0)
        rows = rows.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        rows = tl.load(cache + base[:, None] + at[None, :], mask=inside[:, None], other=0.0)
    return rows


@triton.jit
def mla(
    q, cache, floats, halves, out, parts, sums, slots, counts, tile_first, tile_count,
    row_of_token, positions, table, slots_stride, table_stride, pairs, scale,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    ROPE: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr,
    SPLITS: tl.constexpr, SPARSE: tl.constexpr, DIRECT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of up to BQ tokens of a row, all heads, one split of the keys.

    floats and halves are the packed cache as float32 and bfloat16 (else unused). ROW counts the
    cache's own elements.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    N: tl.constexpr = BQ * HEADS_P
    n = tl.arange(0, N)
    if DIRECT:
        first = tile
        count = 1
    else:
        first = tl.load(tile_first + tile)
        count = tl.load(tile_count + tile)
    token = first + n // HEADS_P
    head = n % HEADS_P
    live = (n // HEADS_P < count) & (head < HEADS)
    if SPARSE:
        end = tl.load(counts + first)
        position = tl.where(live, end - 1, -1)
        places = slots + first.to(tl.int64) * slots_stride
    else:
        position = tl.load(positions + token, mask=live, other=-1).to(tl.int32)
        end = tl.max(position, 0) + 1
        places = table + tl.load(row_of_token + first) * table_stride
    span = tl.cdiv(tl.cdiv(end, SPLITS), BS) * BS
    begin = split * span
    stop = tl.minimum(begin + span, end)

    PARTS: tl.constexpr = RANK // BLOCK
    source = q + (token.to(tl.int64) * HEADS + head) * (RANK + ROPE)
    q0 = load_query(source, 0, BLOCK, live)
    qr = load_query(source + RANK, 0, ROPE, live)
    if PARTS > 1:
        q1 = load_query(source, 1, BLOCK, live)
    if PARTS > 2:
        q2 = load_query(source, 2, BLOCK, live)
        q3 = load_query(source, 3, BLOCK, live)
    if PACKED:
        largest = tl.max(tl.abs(q0.to(tl.float32)), 0)
        if PARTS > 1:
            largest = tl.maximum(largest, tl.max(tl.abs(q1.to(tl.float32)), 0))
        if PARTS > 2:
            largest = tl.maximum(largest, tl.max(tl.abs(q2.to(tl.float32)), 0))
            largest = tl.maximum(largest, tl.max(tl.abs(q3.to(tl.float32)), 0))
        unit = power_of_two(largest) * 0.000244140625  # 2**-12: float16 keeps 27 binary digits
        q0 = (q0.to(tl.float32) / unit[None, :]).to(tl.float16)
        if PARTS > 1:
            q1 = (q1.to(tl.float32) / unit[None, :]).to(tl.float16)
        if PARTS > 2:
            q2 = (q2.to(tl.float32) / unit[None, :]).to(tl.float16)
            q3 = (q3.to(tl.float32) / unit[None, :]).to(tl.float16)
        if PRECISION == "tf32":
            qr = qr.to(tl.bfloat16)
        else:
            qr = qr.to(tl.float32)
    kind: tl.constexpr = q0.dtype

    top = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    level = tl.full((N,), 1.1754943508222875e-38, tl.float32)
    a0 = tl.zeros((BLOCK, N), tl.float32)
    if PARTS > 1:
        a1 = tl.zeros((BLOCK, N), tl.float32)
    if PARTS > 2:
        a2 = tl.zeros((BLOCK, N), tl.float32)
        a3 = tl.zeros((BLOCK, N), tl.float32)
    for start in tl.range(begin, stop, BS, num_stages=STAGES):
        at = start + tl.arange(0, BS)
        inside = at < stop
        if SPARSE:
            slot = tl.load(places + at, mask=inside, other=0).to(tl.int64)
        else:
            slot = tl.load(places + at // PAGE, mask=inside, other=0).to(tl.int64) * PAGE
            slot += at % PAGE
        # Triton 3.6 credits a paged row with its page's alignment and would load too wide.
        base = tl.multiple_of(slot * ROW, ROW & -ROW)
        k0 = load_rows(cache, base, 0, BLOCK, inside, PACKED)
        scores = tl.dot(k0, q0, input_precision=PRECISION)
        if PACKED:
            f = slot * (ROW // 4) + RANK // 4
            s0 = tl.load(floats + f, mask=inside, other=0.0)
            scores = scores * s0[:, None]
            most = s0
        if PARTS > 1:
            k1 = load_rows(cache, base, 1, BLOCK, inside, PACKED)
            more = tl.dot(k1, q1, input_precision=PRECISION)
            if PACKED:
                s1 = tl.load(floats + f + 1, mask=inside, other=0.0)
                more = more * s1[:, None]
                most = tl.maximum(most, s1)
            scores += more
        if PARTS > 2:
            k2 = load_rows(cache, base, 2, BLOCK, inside, PACKED)
            more = tl.dot(k2, q2, input_precision=PRECISION)
            k3 = load_rows(cache, base, 3, BLOCK, inside, PACKED)
            rest = tl.dot(k3, q3, input_precision=PRECISION)
            if PACKED:
                s2 = tl.load(floats + f + 2, mask=inside, other=0.0)
                s3 = tl.load(floats + f + 3, mask=inside, other=0.0)
                more = more * s2[:, None]
                rest = rest * s3[:, None]
                most = tl.maximum(most, tl.maximum(s2, s3))
            scores += more + rest
        if PACKED:
            scores = scores * unit[None, :]
            h = slot * (ROW // 2) + (RANK + 4 * PARTS) // 2
            turned = tl.load(
                halves + h[:, None] + tl.arange(0, ROPE)[None, :], mask=inside[:, None], other=0.0
            ).to(qr.dtype)
        else:
            turned = load_rows(cache, base + RANK, 0, ROPE, inside, False)
        scores += tl.dot(turned, qr, input_precision=PRECISION)
        seen = inside[:, None] & (at[:, None] <= position[None, :])
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        calm = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - calm[None, :])
        fade = tl.exp2(top - calm)
        total = total * fade + tl.sum(weight, 0)
        top = higher
        if PACKED:
            raised = tl.maximum(level, tl.max(most, 0))
            fade = fade * (level / raised)
            level = raised
            weight = weight / raised[None, :]
            w = (weight * s0[:, None]).to(kind)
        else:
            w = weight.to(kind)
        a0 = tl.dot(tl.trans(k0), w, a0 * fade[None, :], input_precision=PRECISION)
        if PARTS > 1:
            if PACKED:
                w = (weight * s1[:, None]).to(kind)
            a1 = tl.dot(tl.trans(k1), w, a1 * fade[None, :], input_precision=PRECISION)
        if PARTS > 2:
            if PACKED:
                w = (weight * s2[:, None]).to(kind)
            a2 = tl.dot(tl.trans(k2), w, a2 * fade[None, :], input_precision=PRECISION)
            if PACKED:
                w = (weight * s3[:, None]).to(kind)
            a3 = tl.dot(tl.trans(k3), w, a3 * fade[None, :], input_precision=PRECISION)

    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    if PACKED:
        factor = factor * level
    pair = token.to(tl.int64) * HEADS + head
    if SPLITS == 1:
        target = out + pair * RANK
    else:
        pair = pair + split.to(tl.int64) * pairs
        target = parts + pair * RANK
        tl.store(sums + pair, top + tl.log2(total), mask=live)
    store(target, a0 * factor[None, :], 0, BLOCK, live)
    if PARTS > 1:
        store(target, a1 * factor[None, :], 1, BLOCK, live)
    if PARTS > 2:
        store(target, a2 * factor[None, :], 2, BLOCK, live)
        store(target, a3 * factor[None, :], 3, BLOCK, live)


@triton.jit
def store(target, value, part: tl.constexpr, BLOCK: tl.constexpr, live):
    at = part * BLOCK + tl.arange(0, BLOCK)
    kind = target.dtype.element_ty
    tl.store(target[None, :] + at[:, None], value.to(kind), mask=live[None, :])


@triton.jit
def widen(
    cache, floats, halves, rows, row_of_page, column_of_page, table, table_stride,
    RANK: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """rows[page] = the numbers of a packed page, 16 rows a program."""
    number = tl.program_id(0)
    row = tl.load(row_of_page + number)
    page = tl.load(table + row * table_stride + tl.load(column_of_page + number)).to(tl.int64)
    at = tl.program_id(1) * 16 + tl.arange(0, 16)
    live = (at < PAGE)[:, None]
    place = page * PAGE + at
    base = tl.multiple_of(place * ROW, ROW & -ROW)[:, None]  # as above
    slot = place[:, None]
    target = rows + (number.to(tl.int64) * PAGE + at)[:, None] * (RANK + ROPE)
    kind = rows.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    for part in tl.static_range(RANK // BLOCK):
        scale = tl.load(floats + slot * (ROW // 4) + RANK // 4 + part, mask=live, other=0.0)
        value = tl.load(cache + base + part * BLOCK + column, mask=live, other=0.0)
        value = value.to(tl.float32) * scale
        tl.store(target + part * BLOCK + column, value.to(kind), mask=live)
    r = tl.arange(0, ROPE)[None, :]
    first: tl.constexpr = (RANK + 4 * (RANK // BLOCK)) // 2
    turned = tl.load(halves + slot * (ROW // 2) + first + r, mask=live, other=0.0)
    tl.store(target + RANK + r, turned.to(kind), mask=live)
