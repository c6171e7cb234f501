"""What enters the engine and what comes out of it.

Token ids travel as the bytes of int32 arrays, so that a message of a thousand tokens costs one copy.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from detour.sampling_params import SamplingParams

Int32s = NDArray[np.int32]

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


def pack_ids(ids: "list[int] | Int32s") -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def unpack_ids(packed: bytes) -> Int32s:
    """int32 array, read-only view of `packed`."""
    return np.frombuffer(packed, dtype=np.int32)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence for the engine to run. A client's request with n > 1 enters as n of these.

    `sid` is chosen by the front and is unique for the life of the server. `output_ids` holds tokens
    that were emitted before (by a worker that is gone); generation continues after them, and they
    are not emitted again. Sampling noise depends on (params.seed, position) alone, so the
    continuation is what it would have been.
    """

    sid: int
    group: int  # the sid of the first sequence of the same client request; its own where n = 1
    request_id: str  # the client's or a generated one; for logs only
    prompt_ids: bytes  # int32 [prompt length]
    output_ids: bytes = b""  # int32 [already emitted]
    params: SamplingParams
    priority: int = 0  # larger runs earlier
    deadline: float = (
        0.0  # time.time() after which the sequence ends with reason "deadline"; 0 = none
    )
    cache_salt: str = ""  # sequences share cached prefixes only within one salt


class Finish(msgspec.Struct, frozen=True):
    """The last word on a sequence. Every submitted one gets exactly one, whatever happens."""

    sid: int
    reason: FinishReason
    matched: int = -1  # the token id that ended it, -1 where none did
    message: str = ""  # for "error": one sentence for the client
    status: int = 200  # for "error": its HTTP status


class Started(msgspec.Struct, frozen=True):
    """Sent once per sequence, with its first token (or its finish): how it was admitted."""

    sid: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one sampled token, for sequences that ask."""

    sid: int
    logprob: float
    top_ids: bytes  # int32 [k], best first
    top_logprobs: bytes  # float32 [k]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens [start, start + n): each given the tokens before it."""

    sid: int
    start: int
    logprobs: bytes  # float32 [n]
    top_ids: bytes  # int32 [n * k]
    top_logprobs: bytes  # float32 [n * k]

    def after(self, position: int) -> "PromptLogprobs":
        """Those from this position of the prompt on."""
        count = len(self.logprobs) // 4
        skip = min(max(position - self.start, 0), count)
        if not skip:
            return self
        top = skip * (len(self.top_ids) // count)
        return PromptLogprobs(
            self.sid,
            self.start + skip,
            self.logprobs[4 * skip :],
            self.top_ids[top:],
            self.top_logprobs[top:],
        )


class TokenEvents(msgspec.Struct, frozen=True, tag=True):
    """What one step gave, for all its sequences at once. `sids[i]` got `tokens[i]`, in order.

    A sequence whose Finish stands in the same message was ended by its token here (if it has one).
    """

    sids: bytes  # int64 [n]
    tokens: bytes  # int32 [n]
    started: list[Started] = []
    logprobs: list[TokenLogprobs] = []  # same order as the tokens of those sequences
    prompt_logprobs: list[PromptLogprobs] = []
    finished: list[Finish] = []
