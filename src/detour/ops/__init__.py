"""Kernels behind contracts: one folder an op, its torch reference in `__init__`, a file per backend."""
