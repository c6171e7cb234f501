"""What a worker is told: plain values, each with the meaning of its default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of one model on one device."""

    model: Path  # a folder or a .gguf file; with load_format "dummy" a config.json suffices
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto = the first GPU, else the CPU
    dtype: str = "auto"  # "float32", "bfloat16", "float16"; auto: see worker.build.choose_dtype
    kv_dtype: str = "auto"  # of the KV cache: as dtype, or fp8_e4m3; auto = dtype
    load_format: str = "auto"  # "dummy" = random weights from the configuration alone
    quantization: str = "auto"  # what the checkpoint must be quantised with; auto = whatever it is
    overrides: Mapping[str, Any] = field(default_factory=dict)  # laid over the configuration
    context_length: int = 0  # most tokens of one sequence; 0 = what the model is made for
    page_size: int = 16  # tokens
    max_slots: int = 64  # sequences at once
    max_step_tokens: int = 2048  # the largest step that will be planned
    max_total_tokens: int = 0  # tokens of KV; 0 = what memory allows
    # GPU: share of its memory for weights, transients and KV; CPU: of free memory, for KV alone
    memory_fraction: float = 0.5
    threads: int = 0  # CPU: compute threads; 0 = the fastest number, measured at start
    backends: Mapping[str, str] = field(default_factory=dict)  # op -> backend wished for
    strict_backends: bool = False  # a wish that cannot be met is an error
    seed: int = 0  # of dummy weights
    even_routing: bool = False  # tokens go to experts drawn evenly: answers mean nothing
    graph_sizes: tuple[int, ...] = ()  # GPU: rows of the decode steps kept as CUDA graphs
    progress: bool = True  # a bar while weights are read, on a terminal
