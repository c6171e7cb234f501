"""Values of options as SGLang and vLLM spell them: other names of ours, and what is not here."""

DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
}
OTHER_FORMATS = (
    *("pt", "npcache", "sharded_state", "bitsandbytes", "layered", "flash_rl", "remote", "jax"),
    *("remote_instance", "fastsafetensors", "private", "runai_streamer", "runai_streamer_sharded"),
    *("tensorizer", "mistral"),
)
KV_TYPES = {**DTYPES, "fp8": "fp8_e4m3", "fp8_ds_mla": "fp8_e4m3"}
OTHER_KV_TYPES = ("fp8_e5m2", "fp8_inc", "mxfp8", "nvfp4", "fp4_e2m1", "fp4_mx_block16", "int8")
OTHER_DEVICES = ("xpu", "hpu", "npu", "musa", "tpu", "mps")
CACHE_AWARE = ("lpm", "it is the cache-aware order that is here")
NO_SUCH_ORDER = ("fcfs", "that order is not here yet")
