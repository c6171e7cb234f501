"""What bench/kernels.py times: the ops at the shapes of one GLM-5 rank (TP 8) and of Llama 8B."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from choice_cases import sampling_cases, topk_cases
from kernel_case import BF16, GPU, Calls, Case, backend, sets, source

from detour.ops.attention import AttentionShape, attention, make_batch
from detour.ops.attention import triton as attention_triton
from detour.ops.gemm_scaled import gemm_scaled, random_scaled
from detour.ops.index_key import index_key, index_query
from detour.ops.index_scores import index_scores
from detour.ops.index_scores import make_inputs as score_inputs
from detour.ops.index_scores import triton as scores_triton
from detour.ops.kv_layout import grouped_query, index_keys_fp8, latent, latent_fp8_packed
from detour.ops.latent_write import latent_write
from detour.ops.mla import LatentShape, dense_mla, make_cache, sparse_mla
from detour.ops.mla import cuda as mla_cuda
from detour.ops.mla import triton as mla_triton
from detour.ops.moe import triton as plain_triton
from detour.ops.moe_nvfp4 import make_inputs as moe_inputs
from detour.ops.moe_nvfp4 import triton as moe_triton
from detour.ops.norm import add_rms_norm, rms_norm
from detour.ops.rope import rope
from detour.ops.routing import RoutingRule, routing
from detour.ops.silu_mul import silu_mul


def experts_cases(variants: bool) -> Iterator[Case]:
    hidden, width, experts, top_k = 6144, 256, 256, 8
    made: dict[int, Any] = {}

    def inputs(tokens: int) -> Any:
        if tokens not in made:
            made.clear()
            made[tokens] = moe_inputs(tokens, hidden, width, experts, top_k, BF16, GPU)
        return made[tokens]

    per_expert = 3 * hidden * width * (0.5 + 1 / 16)
    for tokens in (1, 8, 64, 256, 512, 8192):
        draws = torch.rand(tokens, experts, generator=source(), device=GPU).topk(top_k).indices
        covered = len(draws.unique())
        size = covered * per_expert + 4 * tokens * hidden
        work = tokens * top_k * 6 * hidden * width
        label = f"T={tokens} {covered}/256 experts"
        chosen = moe_triton.choose_blocks(tokens * top_k, experts)
        tried = {"triton": chosen} | (moe_variants(tokens, chosen) if variants else {})
        for name, blocks in tried.items():

            def make(tokens: int = tokens, blocks: Any = blocks) -> Calls:
                arguments = inputs(tokens)
                return [lambda: moe_triton.launch(blocks, True, *arguments)]

            yield Case("moe_nvfp4", name, label, size, work, make)


def plain_experts_cases(variants: bool) -> Iterator[Case]:
    """Experts of Qwen3-30B-A3B's shape in bfloat16."""
    hidden, width, experts, top_k = 2048, 768, 128, 8
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    for tokens in (1, 64, 512, 8192):
        draws = torch.rand(tokens, experts, generator=source(), device=GPU).topk(top_k)
        covered = len(draws.indices.unique())
        size = covered * 3 * hidden * width * 2 + 4 * tokens * hidden
        chosen = plain_triton.choose_blocks(tokens * top_k, experts)
        tried = {"triton": chosen}
        if variants:
            for shape in ((8, 64, 64, 4, 4), (16, 32, 128, 4, 3), (32, 128, 64, 8, 3)):
                tried["{}x{}x{}w{}s{}".format(*shape)] = plain_triton.Blocks(*shape)
            tried["64x128x64w8s3"] = plain_triton.Blocks(64, 128, 64, 8, 3)
        for name, blocks in tried.items():

            def make(tokens: int = tokens, blocks: Any = blocks, draws: Any = draws) -> Calls:
                x = torch.randn(tokens, hidden, device=GPU, dtype=BF16)
                many = [
                    [torch.randn(shape, device=GPU, dtype=BF16) * 0.02 for shape in shapes]
                    for _ in range(1 if tokens > 8 else 2)
                ]
                return [
                    lambda m=m: plain_triton.launch(blocks, x, *m, draws.values, draws.indices)
                    for m in many
                ]

            label = f"T={tokens} {covered}/{experts} experts bf16"
            yield Case("moe", name, label, size, tokens * top_k * 6 * hidden * width, make)


def moe_variants(tokens: int, chosen: Any) -> dict[str, Any]:
    Blocks = moe_triton.Blocks
    shapes = {
        8: [(8, 64, 128, 4, 3), (8, 64, 128, 4, 4), (8, 32, 128, 2, 3), (8, 128, 128, 4, 3)],
        16: [(16, 32, 128, 2, 3), (16, 64, 128, 4, 3), (16, 64, 128, 2, 3)],
        32: [(32, 64, 128, 4, 3), (32, 32, 128, 2, 3)],
        64: [(64, 64, 128, 4, 3), (64, 64, 64, 4, 4)],
        128: [(128, 64, 64, 4, 3), (128, 64, 128, 8, 3), (128, 128, 64, 8, 3)],
    }
    wanted = {1: [8], 8: [8], 64: [8, 16], 256: [8, 16, 32], 512: [16, 32, 64], 8192: [64, 128]}
    found = {}
    for size in wanted[tokens]:
        for shape in shapes[size]:
            blocks = replace(Blocks(*shape, 64, 8, 4, 3), down_columns=chosen.down_columns)
            if blocks != chosen:
                found["{}x{}x{}w{}s{}".format(*shape)] = blocks
    down = [(64, 4, 4, 3), (64, 8, 4, 4), (64, 16, 4, 3), (128, 4, 4, 3), (128, 8, 8, 3)]
    for columns, loops, warps, stages in down:
        name = f"down {columns}x{loops}w{warps}s{stages}"
        found[name] = replace(
            chosen, down_columns=columns, down_loops=loops, down_warps=warps, down_stages=stages
        )
    return found


def latent_shape(packed: bool) -> LatentShape:
    layout = latent_fp8_packed(512, 64) if packed else latent(BF16, 512, 64)
    return LatentShape(8, 512, 64, 256**-0.5, layout)


def sparse_cases(variants: bool) -> Iterator[Case]:
    for packed in (True, False):
        shape = latent_shape(packed)
        row = shape.layout.bytes_per_token
        for tokens, rows in ((1, 2048), (8, 2048), (64, 1536), (64, 2048), (512, 2048)):
            size = tokens * (rows * row + 8 * (576 + 512) * 2)
            work = tokens * rows * 8 * (576 + 512) * 2
            label = f"{'fp8' if packed else 'bf16'} T={tokens} rows={rows}"
            hows: dict[str, Any] = {"triton": ()}
            if packed:
                hows["cuda"] = mla_cuda.Warps()
            if variants and packed and tokens in (8, 64) and rows == 2048:
                tried = [
                    (4, 2, 2),
                    (4, 2, 4),
                    (4, 2, 8),
                    (8, 2, 2),
                    (8, 2, 4),
                    (4, 3, 2),
                    (2, 2, 8),
                ]
                hows |= {f"cuda {w}w{s}s/{n}": (mla_cuda.Warps(w, s), n) for w, s, n in tried}
            if variants and not packed and tokens == 64 and rows == 2048:
                tried = [(64, 4, 2), (32, 4, 2), (32, 4, 3), (64, 8, 2), (32, 2, 2), (128, 8, 2)]
                hows |= {f"{k}w{w}s{s}/{n}": (k, w, s, n) for k, w, s in tried for n in (4, 8)}
            for name, how in hows.items():

                def make(shape=shape, tokens=tokens, rows=rows, how=how, size=size) -> Calls:  # type: ignore[no-untyped-def]
                    count = sets(size)
                    cache = make_cache(max(count * tokens * rows, 65536), 64, shape, GPU, source())
                    total = cache.shape[0] * 64
                    q = torch.randn(tokens, 8, 576, device=GPU, dtype=BF16)
                    counts = torch.full((tokens,), rows, dtype=torch.int32, device=GPU)
                    order = torch.randperm(total, device=GPU, dtype=torch.int32)
                    calls: Calls = []
                    for number in range(count):
                        slots = torch.full((tokens, 2048), -1, dtype=torch.int32, device=GPU)
                        part = order[number * tokens * rows :][: tokens * rows]
                        slots[:, :rows] = part.view(tokens, rows).sort(dim=-1).values
                        calls.append(sparse_call(q, cache, slots, counts, shape, how))
                    return calls

                yield Case("sparse_mla", name, label, size, work, make)


def sparse_call(q, cache, slots, counts, shape, how):  # type: ignore[no-untyped-def]
    if not how or isinstance(how, mla_cuda.Warps):
        run = backend(sparse_mla, "cuda" if how else "triton")
        return lambda: run(q, cache, slots, counts, shape)
    if isinstance(how[0], mla_cuda.Warps):

        def compiled() -> torch.Tensor:
            out = mla_triton.new_output(q, shape)
            places = (counts, counts, slots)
            mla_cuda.launch(how[0], how[1], shape, q, cache, out, slots, counts, places, 0)
            return out

        return compiled
    empty = torch.empty(0, dtype=torch.int32, device=GPU)
    table = torch.empty(0, 1, dtype=torch.int32, device=GPU)
    tiles = attention_triton.Tiles(empty, empty, len(q), 1, how[3])
    launch = mla_triton.Launch(*how[:3])
    places = (empty, empty, table)

    def call() -> torch.Tensor:
        out = mla_triton.new_output(q, shape)
        mla_triton.launch(launch, shape, q, cache, out, tiles, places, slots, counts, 1)
        return out

    return call


def dense_cases(variants: bool) -> Iterator[Case]:
    for packed in (True, False):
        shape = latent_shape(packed)
        row = shape.layout.bytes_per_token
        for label, rows in (
            ("64 x 1 at 1536", [(1535, 1)] * 64),
            ("5 prompts of 1536", [(0, 1536)] * 5),
        ):
            batch = make_batch(rows, 64, GPU, torch.Generator().manual_seed(0))
            tokens = len(batch.positions)
            seen = int((batch.positions + 1).sum())
            size = int(batch.lengths.sum()) * row + tokens * 8 * (576 + 512) * 2
            work = seen * 8 * (576 + 512) * 2

            for name in ("triton", "cuda") if packed else ("triton",):

                def make(shape=shape, batch=batch, tokens=tokens, name=name) -> Calls:  # type: ignore[no-untyped-def]
                    pages = int(batch.page_table.max()) + 1
                    q = torch.randn(tokens, 8, 576, device=GPU, dtype=BF16)
                    caches = [make_cache(pages * 64, 64, shape, GPU, source(n)) for n in range(2)]
                    run = backend(dense_mla, name)
                    plan = dense_mla.backends[name].plan(batch, shape)
                    return [lambda cache=cache: run(plan, q, cache) for cache in caches]

                kind = "fp8" if packed else "bf16"
                yield Case("dense_mla", name, f"{kind} {label}", size, work, make)


def indexer_cases(variants: bool) -> Iterator[Case]:
    layout = index_keys_fp8(128)
    for tokens, length in ((64, 1536), (64, 8192), (64, 65536)):
        size = tokens * length * (132 + 4)
        work = tokens * length * 32 * 128 * 2 / 2  # fp8 runs at twice the bf16 rate
        tried: dict[str, Any] = {"triton": ()}
        if variants and length > 2048:
            some = [(128, 4, 3), (128, 4, 4), (64, 4, 4), (256, 8, 3), (256, 4, 3), (128, 8, 4)]
            tried |= {f"{k}w{w}s{s}/{n}": (k, w, s, n) for k, w, s in some for n in (4, 8)}
        made: list[Any] = []
        for name, how in tried.items():

            def make(tokens=tokens, length=length, how=how, made=made, size=size) -> Calls:  # type: ignore[no-untyped-def]
                count = min(2, sets(size))
                if not made:
                    for number in range(count):
                        made.append(
                            score_inputs([(length - 1, 1)] * tokens, 32, 128, 64, layout, BF16,
                                         GPU, torch.Generator().manual_seed(number))
                        )  # fmt: skip
                return [score_call(how, *arguments) for arguments in made]

            yield Case("index_scores", name, f"T={tokens} x {length}", size, work, make)
        made.clear()


def score_call(how, batch, layout, q, weight, cache):  # type: ignore[no-untyped-def]
    index_scores.discover()
    plan = index_scores.backends["triton"].plan(batch, layout)
    if not how:
        run = backend(index_scores)
        return lambda: run(plan, q, weight, cache)
    out = torch.empty(len(q), batch.page_table.shape[1] * 64, device=GPU)
    tiles = replace(plan.tiles.decodes, splits=how[3])
    launch = scores_triton.Launch(*how[:3])
    return lambda: scores_triton.launch(launch, tiles, batch, layout, q, weight, cache, out)


def small_cases(variants: bool) -> Iterator[Case]:
    for tokens in (64, 8192):
        row = tokens * 6144 * 2
        weight = torch.ones(6144, device=GPU, dtype=BF16)

        def wide(columns: int = 6144, tokens: int = tokens) -> torch.Tensor:
            return torch.randn(tokens, columns, device=GPU, dtype=BF16)

        def both(
            run: Any, weight: torch.Tensor = weight, wide: Any = wide, row: int = row
        ) -> Calls:
            pairs = [(wide(), wide()) for _ in range(min(8, sets(2 * row)))]
            return [lambda p=p: run(p[0], p[1], weight, 1e-5) for p in pairs]

        def one(run: Any, columns: int, wide: Any = wide, row: int = row) -> Calls:
            many = [wide(columns) for _ in range(min(8, sets(row)))]
            return [lambda x=x: run(x) for x in many]

        for name in ("triton", "reference"):
            add, norm, gate = (backend(o, name) for o in (add_rms_norm, rms_norm, silu_mul))
            yield Case(
                "add_rms_norm", name, f"T={tokens} x 6144", 4 * row, 0, lambda r=add, b=both: b(r)
            )
            yield Case("rms_norm", name, f"T={tokens} x 6144", 2 * row, 0,
                       lambda r=norm, o=one, w=weight: o(lambda x: r(x, w, 1e-5), 6144))  # fmt: skip
            yield Case(
                "silu_mul",
                name,
                f"T={tokens} x 2 x 3072",
                1.5 * row,
                0,
                lambda r=gate, o=one: o(r, 6144),
            )
            choose = backend(routing, name)
            rule = RoutingRule(8, "sigmoid", True, 2.5)
            logits = torch.randn(tokens, 256, device=GPU)
            bias = torch.zeros(256, device=GPU)
            yield Case("routing", name, f"T={tokens} 8 of 256", tokens * 1120, 0,
                       lambda r=choose, a=(logits, bias, rule): [lambda: r(*a)])  # fmt: skip
            turns = torch.randn(2, tokens, 32, device=GPU)
            heads = torch.randn(tokens, 8, 64, device=GPU, dtype=BF16)
            turn = backend(rope, name)
            yield Case("rope", name, f"T={tokens} 8 x 64", tokens * 2304, 0,
                       lambda r=turn, a=(heads, turns[0], turns[1]): [lambda: r(*a)])  # fmt: skip
        yield from indexer_writers(tokens)


def indexer_writers(tokens: int) -> Iterator[Case]:
    turns = torch.randn(2, tokens, 32, device=GPU)
    slots = torch.randperm(4 * tokens, device=GPU)[:tokens]
    shape, layout = latent_shape(True), index_keys_fp8(128)
    kv = torch.randn(tokens, 576, device=GPU, dtype=BF16)
    weight = torch.ones(512, device=GPU, dtype=BF16)
    rows = torch.zeros(tokens // 16, 64, 656, dtype=torch.uint8, device=GPU)
    keys = torch.zeros(tokens // 16, 64, 132, dtype=torch.uint8, device=GPU)
    k = torch.randn(tokens, 128, device=GPU, dtype=BF16)
    q = torch.randn(tokens, 32, 128, device=GPU, dtype=BF16)
    gate = torch.randn(tokens, 32, device=GPU)
    write, store, ask = (backend(o) for o in (latent_write, index_key, index_query))
    first = (kv, weight, 1e-5, turns[0], turns[1], True, rows, slots, shape)
    second = (k, k[0], k[0], 1e-6, turns[0], turns[1], True, keys, slots, layout)
    third = (q, gate, turns[0], turns[1], True, layout)
    yield Case(
        "latent_write", "triton", f"T={tokens}", tokens * 2064, 0, lambda: [lambda: write(*first)]
    )
    yield Case(
        "index_key", "triton", f"T={tokens}", tokens * 644, 0, lambda: [lambda: store(*second)]
    )
    yield Case(
        "index_query", "triton", f"T={tokens}", tokens * 12800, 0, lambda: [lambda: ask(*third)]
    )


def attention_cases(variants: bool) -> Iterator[Case]:
    shape = AttentionShape(32, 8, 128, 128**-0.5, grouped_query(BF16, 8, 128))
    mixes = {
        "1 x 1 at 4096": [(4095, 1)],
        "64 x 1 at 1024": [(1023, 1)] * 64,
        "prompt of 4096": [(0, 4096)],
        "8 prompts of 1024": [(0, 1024)] * 8,
    }
    for label, rows in mixes.items():
        batch = make_batch(rows, 64, GPU, torch.Generator().manual_seed(0))
        tokens = len(batch.positions)
        size = int(batch.lengths.sum()) * 4096 + tokens * 2 * 8192
        work = int((batch.positions + 1).sum()) * 32 * 128 * 4

        def make(batch=batch, tokens=tokens, size=size) -> Calls:  # type: ignore[no-untyped-def]
            pages = int(batch.page_table.max()) + 1
            q = torch.randn(tokens, 32, 128, device=GPU, dtype=BF16)
            caches = [
                torch.randn(2, pages, 64, 8, 128, device=GPU, dtype=BF16)
                for _ in range(min(8, sets(size)))
            ]
            plan = attention.backends["triton"].plan(batch, shape)
            run = backend(attention)
            return [lambda c=c: run(plan, q, c[0], c[1]) for c in caches]

        backend(attention)
        yield Case("attention", "triton", f"32/8 x 128, {label}", size, work, make)


def gemm_cases(variants: bool) -> Iterator[Case]:
    """What cuBLAS reaches on the projections of a layer."""
    shapes = {"q_a+kv_a+index": (6144, 2784), "q_b+index q": (2048, 6144), "o": (2048, 6144)}
    shapes |= {"shared up": (6144, 512), "router": (6144, 256)}
    shapes |= {"8B qkv": (4096, 6144), "8B o": (4096, 4096), "8B gate+up": (4096, 28672)}
    shapes |= {"8B down": (14336, 4096), "8B head": (4096, 128256)}
    for name, (k, n) in shapes.items():
        for tokens in (1, 64, 512):

            def make(k: int = k, n: int = n, tokens: int = tokens) -> Calls:
                x = torch.randn(tokens, k, device=GPU, dtype=BF16)
                count = min(16, sets(2 * k * n))
                weights = [torch.randn(n, k, device=GPU, dtype=BF16) for _ in range(count)]
                return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]

            size = 2 * (k * n + tokens * (k + n))
            yield Case("gemm", "cublas", f"{name} T={tokens}", size, 2 * tokens * k * n, make)


def scaled_cases(variants: bool) -> Iterator[Case]:
    """Dense products on packed weights: GLM-5's projections, Llama 8B's gate and up."""
    shapes = {"q_b+index q": (2048, 6144), "q_a+kv_a+index": (6144, 2784), "gate+up": (4096, 28672)}
    for packing, size in (("FP8_BLOCK", 1.0), ("NVFP4", 0.5625)):
        for label, (columns, rows) in shapes.items():
            for tokens in (1, 64, 512):
                for name in ("triton", "reference"):

                    def make(
                        packing=packing, columns=columns, rows=rows, tokens=tokens, name=name
                    ) -> Calls:  # type: ignore[no-untyped-def]
                        run = backend(gemm_scaled, name)
                        x = torch.randn(tokens, columns, device=GPU, dtype=BF16)
                        none = torch.empty(0, device=GPU, dtype=BF16)
                        weights = [
                            random_scaled(packing, rows, columns, source(seed))
                            for seed in range(min(8, sets(columns * rows)))
                        ]
                        return [lambda w=w: run(w, x, none) for w in weights]

                    moved = size * columns * rows + 2 * tokens * (columns + rows)
                    work = 2 * tokens * columns * rows
                    where = f"{packing} {label} T={tokens}"
                    yield Case("gemm_scaled", name, where, moved, work, make)


def copy_case(variants: bool) -> Iterator[Case]:
    def make() -> Calls:
        one, two = torch.randn(2, 2**29, device=GPU)
        return [lambda: torch.neg(one, out=two)]

    yield Case("copy", "torch.neg", "2 GB to 2 GB", 2**32, 0, make)


def cases(variants: bool) -> Iterator[Case]:
    for part in (
        copy_case, experts_cases, plain_experts_cases, sparse_cases, dense_cases, indexer_cases, topk_cases,
        attention_cases, small_cases, gemm_cases, scaled_cases, sampling_cases,
    ):  # fmt: skip
        yield from part(variants)
