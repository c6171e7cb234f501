"""May a sequence enter: can it be served at all, are there pages for it and for all's growth.

Knows pages and counts; not the order of the queue.
"""

import numpy as np

from detour.engine.page_ledger import PageLedger
from detour.engine.plan import Geometry
from detour.engine.request import Finish, Request, unpack_ids
from detour.engine.sequence import Sequence, SlotTable, limit_of

FAR = 4096  # tokens of growth that are looked ahead at most
START_SHARE, LEAST_SHARE = 0.5, 0.1  # of the tokens a sequence may still grow by, kept in reserve
RELAX = 0.999  # factor of the share per step without preemption
TIGHTEN = 0.2  # added to the share by a preemption


def refusal(request: Request, geometry: Geometry) -> Finish | None:
    """The finish of a request that never runs; None where it may."""

    def error(message: str, status: int = 400) -> Finish:
        return Finish(request.sid, "error", message=message, status=status)

    if len(request.prompt_ids) % 4 or len(request.output_ids) % 4 or not request.prompt_ids:
        return error("The prompt is empty or not a list of token ids.")
    prompt, given = len(request.prompt_ids) // 4, len(request.output_ids) // 4
    params, context = request.params, geometry.context_length
    room = min(params.max_tokens, 1)
    if prompt + room > context:
        return error(
            f"The prompt has {prompt} tokens, which leaves no room for an answer in the "
            f"context length of {context} tokens; shorten the prompt."
        )
    ids = unpack_ids(request.prompt_ids + request.output_ids)
    if ids.view(np.uint32).max() >= geometry.vocab_size:
        return error(f"A token id is outside the vocabulary of {geometry.vocab_size} tokens.")
    if given >= params.max_tokens and not (params.prompt_logprobs >= 0 and not given):
        return Finish(request.sid, "length")
    if prompt + given >= context and params.max_tokens:
        return Finish(request.sid, "length")
    usable = (geometry.num_pages - 1) * geometry.page_size
    if prompt + given > usable:
        return error(
            f"The prompt has {prompt + given} tokens and the KV cache holds {usable}; "
            "shorten the prompt or serve with a larger cache."
        )
    return None


def outgrown(sequence: Sequence, geometry: Geometry) -> Finish:
    """The finish of a sequence that needs more pages than there are, with nothing else running."""
    usable = (geometry.num_pages - 1) * geometry.page_size
    return Finish(
        sequence.request.sid,
        "error",
        message=f"The sequence has grown beyond the {usable} tokens that the KV cache holds.",
        status=500,
    )


class Admission:
    """Gives pages to sequences that enter, as long as what is left covers the expected growth of
    those that run: a share of the tokens they may still generate. The share falls slowly, and rises
    with every preemption."""

    def __init__(self, table: SlotTable, ledger: PageLedger, conservativeness: float) -> None:
        self._table = table
        self._ledger = ledger
        self._least = min(1.0, LEAST_SHARE * conservativeness)
        self._share = min(1.0, START_SHARE * conservativeness)
        # With more pages to spare than this there is no need to count.
        self._most_reserve = (len(table.alive) + 1) * (FAR // table.page_size + 1)

    def relax(self) -> None:
        self._share = max(self._least, self._share * RELAX)

    def tighten(self) -> None:
        self._share = min(1.0, self._share + TIGHTEN)

    def reserve(self) -> int:
        """Pages that the running sequences are expected to need beyond those they have."""
        table = self._table
        now = np.maximum(table.planned, table.known)
        lack = now + np.minimum(table.target - now, FAR) * self._share - table.capacity
        lack = lack[lack > 0]
        return int(lack.sum() / table.page_size + len(lack) / 2)  # a page is half full on average

    def enter(self, sequence: Sequence, slot: int, budget: int) -> bool:
        """Give `sequence` the slot and pages for its known tokens, if the reserve remains and at
        most `budget` tokens are left to compute. With nothing running no reserve is kept."""
        table, ledger = self._table, self._ledger
        known = len(sequence.ids) // 4
        match = ledger.tree.match(sequence.namespace, sequence.ids, ledger.most_cached(sequence))
        ledger.tree.pin(match.node)
        cached = len(match.pages) * table.page_size
        need = table.pages_for(known) - len(match.pages)
        spare = ledger.available - need
        fits = spare >= 0 and known - cached <= budget
        if fits and table.sequences and spare < self._most_reserve:
            left = limit_of(sequence, table.context_length) - known
            growth = table.pages_for(known + int(min(left, FAR) * self._share))
            fits = spare >= self.reserve() + growth - table.pages_for(known)
        if not fits:
            ledger.tree.unpin(match.node)
            return False
        table.enter(sequence, slot, cached)
        ledger.enter(slot, match, known)
        return True
