"""Triton kernels run through its CPU interpreter here, unless there is a GPU to run them on.

Triton reads this when a kernel is decorated, so it has to be set before any backend is imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
