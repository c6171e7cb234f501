"""Options that do not go together, or of which one does nothing: a sentence each. Knows no model."""

from detour.config.options import DEFAULTS, Config


def conflicts(config: Config) -> list[str]:
    """What Config itself does not refuse."""
    rules = (
        (
            config.schedule_policy == "lpm" and config.disable_radix_cache,
            "--schedule-policy lpm orders requests by their cached prefixes, but with "
            "--disable-radix-cache there are none: leave one of them out.",
        ),
        (
            config.disable_cuda_graph and bool(config.cuda_graph_max_bs or config.cuda_graph_bs),
            "--disable-cuda-graph leaves nothing to --cuda-graph-max-bs and --cuda-graph-bs: leave "
            "either out.",
        ),
        (
            0 < config.max_running_requests < config.cuda_graph_max_bs,
            f"--cuda-graph-max-bs {config.cuda_graph_max_bs} is more than --max-running-requests "
            f"{config.max_running_requests} lets run: larger graphs would never be used.",
        ),
        (
            0 < config.max_total_tokens < config.context_length,
            f"--max-total-tokens {config.max_total_tokens} holds less than one sequence of "
            f"--context-length {config.context_length}: raise the one or lower the other.",
        ),
        (
            config.max_prefill_tokens != DEFAULTS["max_prefill_tokens"]
            and config.chunked_prefill_size >= 0,
            "--max-prefill-tokens is for prompts that are not cut into chunks: without "
            "--chunked-prefill-size -1 it does nothing.",
        ),
        (
            config.device == "cpu" and bool(config.cuda_graph_max_bs or config.cuda_graph_bs),
            "--device cpu has no CUDA graphs: --cuda-graph-max-bs and --cuda-graph-bs do nothing.",
        ),
        (
            config.device == "cuda" and config.threads > 0,
            "--threads says how a CPU computes: with --device cuda it does nothing.",
        ),
    )
    return [sentence for broken, sentence in rules if broken]
