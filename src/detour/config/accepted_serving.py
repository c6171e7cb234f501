"""Accepted flags about serving: scheduling, cache, adapters, clients. See accepted.py."""

from detour.config.option import Accepted, rows

SERVING: tuple[Accepted, ...] = (
    # --- scheduling and memory
    *rows(
        "prompts are cut into chunks; --chunked-prefill-size -1 turns that off",
        switch="--no-enable-chunked-prefill",
    ),
    *rows(
        "the scheduler plans by tokens, with one budget for prompts and decodes",
        quiet="1 1.0",
        value="""
            --prefill-max-requests --max-num-partial-prefills
            --max-long-partial-prefills --long-prefill-token-threshold
             --num-continuous-decode-steps
            --scheduler-recv-interval --num-scheduler-steps
            --prefill-delayer-max-delay-passes
            --priority-scheduling-preemption-threshold --default-priority-value
        """,
        switch="""
            --enable-prefill-delayer --enable-dynamic-batch-tokenizer
            --disable-chunked-mm-input --abort-on-priority-when-disabled
        """,
    ),
    *rows(
        "requests with larger priority values run earlier",
        switch="--schedule-low-priority-values-first",
    ),
    *rows(
        "cached prefixes are evicted least recently used first",
        quiet="lru",
        value="--radix-eviction-policy",
    ),
    *rows(
        "cached prefixes are compared token by token",
        value="--prefix-caching-hash-algo --max-num-on-the-fly",
    ),
    *rows(
        "--max-total-tokens or --mem-fraction-static sizes the KV cache",
        value="--swa-full-tokens-ratio --num-gpu-blocks-override --kv-cache-memory-bytes",
    ),
    *rows(
        "all layers keep the whole context",
        switch="--disable-hybrid-swa-memory --disable-hybrid-kv-cache-manager",
    ),
    *rows(
        "the loop overlaps steps where the device works on its own",
        switch="--disable-overlap-schedule --async-scheduling --no-async-scheduling",
    ),
    *rows(
        "weights and cache stay on the device; sequences that lose their pages are computed again",
        quiet="0 0.0",
        value="--swap-space --cpu-offload-gb --offload-group-size --offload-num-in-group",
    ),
    *rows(
        "weights stay on the device",
        value="--offload-prefetch-step --offload-mode",
    ),
    *rows(
        "models with a recurrent state are not here yet",
        quiet="auto",
        value="""
            --max-mamba-cache-size --mamba-ssm-dtype --mamba-full-memory-ratio
            --mamba-scheduler-strategy --mamba-track-interval --mamba-cache-dtype
            --mamba-backend
        """,
    ),
    *rows(
        "every step's tokens are sent",
        quiet="1",
        value="--stream-interval",
    ),
    *rows(
        "the prefix cache keeps a conversation's pages",
        switch="--enable-streaming-session",
    ),
    *rows(
        "a prompt over the context length is refused with both numbers",
        switch="--allow-auto-truncate",
    ),
    *rows(
        "the engine always sleeps while it has nothing to do",
        switch="--sleep-on-idle",
    ),
    *rows(
        "the operating system places memory",
        values="--numa-node",
    ),
    *rows(
        "no traces or dumps are written: /metrics and the log are what there is",
        value="""
            --gc-warning-threshold-secs --crash-dump-folder --otlp-traces-endpoint
            --export-metrics-to-file-dir --trace-level --debug-tensor-dump-output-folder
            --debug-tensor-dump-input-file --profiler-config --observability-config
            --custom-sigquit-handler
        """,
        values="--debug-tensor-dump-layers --collect-detailed-traces",
        switch="""
            --enable-trace --export-metrics-to-file --enable-layerwise-nvtx-marker
            --enable-nan-detection
        """,
    ),
    # --- cache tiers and disaggregation
    *rows(
        "the prefix cache lives in the device's memory alone: there is no host or disk tier yet",
        value="""
            --hicache-ratio --hicache-size --hicache-write-policy --hicache-io-backend
            --hicache-mem-layout --hicache-storage-backend
            --hicache-storage-prefetch-policy --hicache-storage-backend-extra-config
            --kv-transfer-config --kv-events-config --kv-offloading-size
            --kv-offloading-backend --lmcache-config-file
        """,
        switch="""
            --enable-hierarchical-cache --enable-hicache --hicache-storage-prefetch
            --enable-lmcache
        """,
    ),
    *rows(
        "prefill and decode run in this one server: disaggregation is not here yet",
        quiet="none null",
        value="""
            --disaggregation-mode --disaggregation-transfer-backend
            --disaggregation-bootstrap-port --disaggregation-ib-device
            --disaggregation-decode-tp --disaggregation-decode-dp
            --disaggregation-prefill-pp --disaggregation-decode-polling-interval
            --num-reserved-decode-tokens --pdmux-config-path --sm-group-num
        """,
        switch="""
            --disaggregation-decode-enable-offload-kvcache
            --disaggregation-decode-enable-fake-auto
            --disaggregation-decode-enable-radix-cache --enable-pdmux
        """,
    ),
    # --- adapters and media
    *rows(
        "the base model is served: adapters are not here yet",
        value="""
            --max-lora-rank --max-loras-per-batch --max-loaded-loras --max-loras
            --max-cpu-loras --lora-eviction-policy --lora-backend --max-lora-chunk-size
            --lora-dtype
        """,
        values="--lora-paths --lora-modules --lora-target-modules",
        switch="--enable-lora --enable-lora-overlap-loading --fully-sharded-loras",
    ),
    *rows(
        "text is served: images, audio and video are not here yet",
        value="""
            --mm-max-concurrent-calls --mm-per-request-timeout --mm-processor-cache-gb
            --mm-encoder-tp-mode --allowed-local-media-path
        """,
        values="--encoder-urls",
        json="--mm-process-config --limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs",
        switch="""
            --keep-mm-feature-on-device --disable-fast-image-processor
            --mm-enable-dp-encoder --encoder-only --language-only --language-model-only
            --enable-prefix-mm-cache
        """,
    ),
    # --- what clients see
    *rows(
        "a request that brings tools may have them called, unless its tool_choice is none",
        quiet="on",
        switch="--enable-auto-tool-choice --exclude-tools-when-tool-choice-none",
    ),
    *rows("clients run their tools themselves", value="--tool-server"),
    *rows("--tool-call-parser names what is here", value="--tool-parser-plugin"),
    *rows(
        "there is no constrained output yet",
        quiet="auto",
        value="--grammar-backend --guided-decoding-backend --constrained-json-whitespace-pattern",
        json="--structured-outputs-config",
        switch="--constrained-json-disable-any-whitespace --disable-outlines-disk-cache",
    ),
    *rows(
        "the chat template comes from the model or from --chat-template",
        quiet="auto",
        value="--hf-chat-template-name --completion-template --chat-template-content-format",
    ),
    *rows(
        "--sampling-defaults says where defaults come from",
        json="--preferred-sampling-params --override-generation-config",
    ),
    *rows(
        "a request says chat_template_kwargs itself",
        json="--default-chat-template-kwargs",
    ),
    *rows(
        "usage always tells the cached tokens",
        switch="--enable-cache-report --enable-prompt-tokens-details --enable-force-include-usage",
    ),
    *rows(
        "answers hold text, tokens and log-probabilities",
        values="--logits-processors --multi-item-scoring-delimiter",
        switch="""
            --enable-custom-logit-processor --enable-return-hidden-states
            --enable-return-routed-experts
        """,
    ),
    *rows(
        "as the OpenAI API has it: at most 20 log-probabilities a token",
        value="--max-logprobs --logprobs-mode --response-role",
    ),
    *rows(
        "answers are as the OpenAI API has them",
        switch="--return-tokens-as-token-ids --enable-request-id-headers",
    ),
    *rows(
        "the engine warms itself up before it says that it is ready",
        value="--warmups",
        switch="--skip-server-warmup",
    ),
    *rows(
        "one front process serves HTTP and tokenises on threads",
        quiet="0 1",
        value="""
            --tokenizer-worker-num --detokenizer-worker-num --api-server-count -asc
            --tokenizer-pool-size
        """,
        switch="""
            --enable-tokenizer-batch-encode --disable-tokenizer-batch-decode --grpc-mode
            --smg-grpc-mode --disable-frontend-multiprocessing --enable-http2
        """,
    ),
    *rows(
        "browsers are allowed by --allowed-origins",
        value="--allowed-methods --allowed-headers",
        switch="--allow-credentials",
    ),
    *rows(
        "--ssl-keyfile and --ssl-certfile are what is used",
        value="--ssl-keyfile-password --ssl-ca-certs --ssl-cert-reqs --file-storage-path",
    ),
    # --- watching
    *rows(
        "/metrics is always there, with fixed labels and buckets",
        value="--tokenizer-metrics-custom-labels-header --decode-log-interval",
        values="""
            --tokenizer-metrics-allowed-custom-labels --bucket-time-to-first-token
            --bucket-inter-token-latency --bucket-e2e-request-latency
            --prompt-tokens-buckets --generation-tokens-buckets
        """,
        switch="""
            --enable-metrics --enable-metrics-for-all-schedulers
            --collect-tokens-histogram --disable-log-stats --enable-mfu-metrics
            --kv-cache-metrics --enable-server-load-tracking
        """,
    ),
    *rows(
        "an engine is looked at by --watchdog-timeout alone",
        value="--soft-watchdog-timeout",
    ),
    *rows(
        "requests are counted, their content is never logged",
        value="--log-requests-level --log-requests-format --max-log-len",
        values="--log-requests-target",
        switch="""
            --log-requests --enable-log-requests --enable-request-time-stats-logging
            --show-time-cost
        """,
    ),
)
