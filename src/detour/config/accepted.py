"""Flags of SGLang and vLLM whose feature is not here (yet): accepted, answered with one line.

A command line that works elsewhere must start here too, and say honestly what it gets. A feature
that arrives moves its flags from these tables to options.py.
"""

from detour.config.accepted_devices import DEVICES
from detour.config.accepted_serving import SERVING

ACCEPTED = (*DEVICES, *SERVING)
