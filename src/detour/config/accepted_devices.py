"""Accepted flags about devices: ranks, speculation, kernels, graphs, weights. See accepted.py."""

from detour.config.option import Accepted, rows

DEVICES: tuple[Accepted, ...] = (
    # --- parallelism
    *rows(
        "one device is used: tensor, pipeline, data and expert parallelism are not here yet",
        quiet="1",
        value="""
            --tp-size --tp --tensor-parallel-size -tp --pp-size --pp
            --pipeline-parallel-size -pp --dp-size --dp --data-parallel-size -dp
            --attn-dp-size --attn-cp-size --ep-size --ep --expert-parallel-size
            --moe-dp-size --moe-dense-tp-size --dcp-size --decode-context-parallel-size
            --prefill-context-parallel-size --pp-max-micro-batch-size
            --pp-async-batch-depth --tbo-token-distribution-threshold
            --load-balance-method --load-watch-interval --data-parallel-backend
            --nsa-prefill-cp-mode --dsa-prefill-cp-mode --elastic-ep-backend
            --deepep-mode --deepep-config --ep-num-redundant-experts
            --ep-dispatch-algorithm --init-expert-location --eplb-algorithm
            --eplb-rebalance-num-iterations --eplb-rebalance-layers-per-chunk
            --eplb-config --moe-a2a-backend --all2all-backend
            --expert-distribution-recorder-mode
            --expert-distribution-recorder-buffer-size --base-gpu-id --gpu-id-step
            --nccl-port --distributed-executor-backend
            --flashinfer-allreduce-fusion-backend
        """,
        switch="""
            --enable-expert-parallel --enable-dp-attention --enable-dp-lm-head
            --enable-eplb --enable-two-batch-overlap --enable-single-batch-overlap
            --enable-dbo --prefill-round-robin-balance --enable-attn-tp-input-scattered
            --enable-nsa-prefill-context-parallel --enable-dsa-prefill-context-parallel
            --enable-expert-distribution-metrics --disable-custom-all-reduce
            --enable-flashinfer-allreduce-fusion
            --enforce-disable-flashinfer-allreduce-fusion --enable-nccl-nvls
            --enable-symm-mem --enable-torch-symm-mem --enable-mscclpp
            --enable-p2p-check
        """,
    ),
    *rows(
        "no collective runs between ranks yet",
        value="--dist-timeout --disable-custom-all-reduce-timeout",
    ),
    *rows(
        "one machine is used: there is no multi-node serving yet",
        quiet="1",
        value="""
            --nnodes --node-rank --dist-init-addr --nccl-init-addr --master-addr
            --master-port --data-parallel-size-local --data-parallel-address
            --data-parallel-rpc-port
        """,
        switch="--headless --use-ray",
    ),
    # --- speculation
    *rows(
        "every token is sampled from the model itself: speculative decoding is not here yet",
        value="""
            --speculative-algorithm --speculative-algo --speculative-draft-model-path
            --speculative-draft-model --speculative-draft-model-revision
            --speculative-draft-load-format --speculative-draft-model-quantization
            --speculative-num-steps --speculative-eagle-topk
            --speculative-num-draft-tokens --speculative-accept-threshold-single
            --speculative-accept-threshold-acc --speculative-token-map
            --speculative-attention-mode --speculative-draft-attention-backend
            --speculative-moe-runner-backend --speculative-moe-a2a-backend
            --speculative-draft-window-size --speculative-ngram-min-match-window-size
            --speculative-ngram-max-match-window-size
            --speculative-ngram-min-bfs-breadth --speculative-ngram-max-bfs-breadth
            --speculative-ngram-match-type --speculative-ngram-branch-length
            --speculative-ngram-capacity
        """,
        json="--speculative-config",
        switch="--speculative-use-rejection-sampling --enable-multi-layer-eagle",
    ),
    # --- kernels
    *rows(
        "each op uses the best backend that can serve here; `detour show backends` lists them",
        quiet="auto default",
        value="""
            --prefill-attention-backend --decode-attention-backend
            --mm-attention-backend --nsa-prefill-backend --dsa-prefill-backend
            --nsa-decode-backend --dsa-decode-backend --dsa-paged-mqa-logits-backend
            --nsa-paged-mqa-logits-backend --dsa-topk-backend --nsa-topk-backend
            --sampling-backend --fp8-gemm-backend --fp8-gemm-runner-backend
            --fp4-gemm-backend --fp4-gemm-runner-backend --moe-runner-backend
            --flashinfer-mxfp4-moe-precision --moe-backend
            --triton-attention-num-kv-splits --triton-attention-split-tile-size
        """,
        switch="""
            --enable-flashinfer-cutlass-moe --enable-flashinfer-trtllm-moe
            --enable-flashinfer-mxfp4-moe --disable-flashinfer-cutlass-moe-fp4-allgather
            --flashinfer-mla-disable-ragged --disable-shared-experts-fusion
            --enforce-shared-experts-fusion --enable-fused-qk-norm-rope
            --enable-fused-moe-sum-all-reduce --disable-chunked-prefix-cache
            --disable-cascade-attn
        """,
    ),
    *rows(
        "no kernel is tuned at the start",
        values="--flashinfer-autotune-skip-ops",
        switch="--disable-flashinfer-autotune --enable-flashinfer-autotune",
    ),
    *rows(
        "this is always so",
        switch="""
            --triton-attention-reduce-in-fp32 --enable-mixed-chunk
            --enable-chunked-prefill --enable-dynamic-chunking
            --enable-priority-scheduling --priority-scheduling --disable-log-requests
            --no-enable-log-requests --disable-uvicorn-access-log
        """,
    ),
    *rows(
        "noise depends on a request's seed and position alone, and float32 gives the same "
        "tokens in any batch",
        value="--rl-on-policy-target",
        switch="--enable-deterministic-inference --enable-batch-invariant",
    ),
    # --- graphs and compilation
    *rows(
        "whole decode steps are kept as CUDA graphs, other steps never; --disable-cuda-graph "
        "turns them off",
        quiet="full",
        value="""
            --cuda-graph-max-bs-prefill
            --piecewise-cuda-graph-max-tokens --piecewise-cuda-graph-compiler
        """,
        values="""
            --cuda-graph-bs-prefill --cuda-graph-tokens-prefill --piecewise-cuda-graph-tokens
        """,
        json="--cuda-graph-config",
        switch="""
            --disable-cuda-graph-padding --enable-profile-cuda-graph
            --enable-cudagraph-gc --enable-piecewise-cuda-graph --enable-breakable-cuda-graph
        """,
    ),
    *rows(
        "this is always so",
        quiet="disabled",
        value="--cuda-graph-backend-prefill",
        switch="--disable-piecewise-cuda-graph",
    ),
    *rows(
        "nothing is compiled ahead: kernels are used as they are",
        value="""
            --torch-compile-max-bs --torchao-config --compilation-config -cc -O
            --optimization-level
        """,
        switch="--enable-torch-compile --enable-torch-compile-debug-mode",
    ),
    # --- weights
    *rows(
        "how weights are packed is read from the checkpoint",
        quiet="None auto none",
        value="""
            --quantization-param-path --modelopt-quant
            --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path
            --modelopt-export-path --quantization-config
        """,
        switch="--calculate-kv-scales --quantize-and-serve --enable-fp32-lm-head",
    ),
    *rows(
        "models are Detour's own code; code from a checkpoint is never run",
        quiet="auto hf sglang vllm",
        value="--model-impl --config-format --hf-config-path",
        values="--custom-weight-loader",
        switch="--trust-remote-code",
    ),
    *rows(
        "weights are streamed from the files by one thread, with bounded memory",
        quiet="{}",
        value="--max-parallel-loading-workers --weight-loader-prefetch-num-threads",
        values="--ignore-patterns",
        json="--model-loader-extra-config",
        switch="""
            --weight-loader-disable-mmap --weight-loader-prefetch-checkpoints
            --delete-ckpt-after-loading
        """,
    ),
    *rows(
        "the fast tokenizer is used",
        quiet="auto fast hf",
        value="--tokenizer-mode",
    ),
    *rows(
        "--revision names the one revision that is used",
        value="--tokenizer-revision --code-revision",
    ),
    *rows(
        "a tokenizer is always loaded: stop strings and text need one",
        switch="--skip-tokenizer-init",
    ),
    *rows(
        "the model generates text: other tasks are not here yet",
        quiet="auto generate none",
        value="--task --runner --convert",
        switch="--is-embedding --enable-multimodal",
    ),
    *rows(
        "weights are loaded once, at the start",
        quiet="default",
        value="--weight-version",
        switch="""
            --checkpoint-engine-wait-weights-before-ready --enable-memory-saver
            --enable-weights-cpu-backup --enable-sleep-mode
        """,
    ),
)
