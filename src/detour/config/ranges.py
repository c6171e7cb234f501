"""Between what each number among the options must lie, by its field's name."""

_MANY = 2**31 - 1
RANGES: tuple[tuple[str, float, float], ...] = (
    ("context_length", 0, _MANY),
    ("random_seed", -1, 2**63 - 1),
    ("max_running_requests", 0, 2**20),
    ("max_queued_requests", 0, _MANY),
    ("max_total_tokens", 0, 2**40),
    ("mem_fraction_static", 0.0, 1.0),
    ("max_prefill_tokens", 1, _MANY),
    ("page_size", 1, 4096),
    ("schedule_conservativeness", 0.0, 1e3),
    ("request_timeout", 0.0, 1e9),
    ("threads", 0, 4096),
    ("cuda_graph_max_bs", 0, 2**20),
    ("port", 0, 65535),
    ("drain_timeout", 0.0, 1e9),
    ("watchdog_timeout", 0.0, 1e9),
)
