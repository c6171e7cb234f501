"""What the steps gave, gathered until the loop sends it: the arrays and lists of TokenEvents."""

from detour.engine.plan import Int32s, PromptRowLogprobs, StepResult
from detour.engine.request import Finish, PromptLogprobs, Started, TokenEvents, TokenLogprobs
from detour.engine.sequence import Int64s, Sequence


class Outbox:
    def __init__(self) -> None:
        self._sids: list[Int64s] = []
        self._tokens: list[Int32s] = []
        self._started: list[Started] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._finished: list[Finish] = []

    def tokens(self, sids: Int64s, tokens: Int32s) -> None:
        self._sids.append(sids)
        self._tokens.append(tokens)

    def started(self, sequence: Sequence) -> None:
        """Once for each sequence that was ever admitted, before its first token or its finish."""
        if not sequence.started and sequence.cached_tokens >= 0:
            sequence.started = True
            self._started.append(Started(sequence.request.sid, sequence.cached_tokens))

    def logprobs(
        self, sequences: dict[int, Sequence], slots: Int64s, rows: Int64s, result: StepResult
    ) -> None:
        """Of the tokens that these slots got, at these rows of the result."""
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            request = sequences[slot].request
            best = request.params.logprobs
            self._logprobs.append(
                TokenLogprobs(
                    request.sid,
                    float(result.logprobs[row]),
                    result.top_ids[row, :best].tobytes(),
                    result.top_logprobs[row, :best].tobytes(),
                )
            )

    def prompt_logprobs(self, sequence: Sequence, row: PromptRowLogprobs) -> None:
        """Without those said before (a sequence that was preempted computes them again)."""
        skip = max(0, sequence.logprobs_end - row.start)
        if skip < len(row.logprobs):
            self._prompt_logprobs.append(
                PromptLogprobs(
                    sequence.request.sid,
                    row.start + skip,
                    row.logprobs[skip:].tobytes(),
                    row.top_ids[skip:].tobytes(),
                    row.top_logprobs[skip:].tobytes(),
                )
            )
            sequence.logprobs_end = row.start + len(row.logprobs)

    def finished(self, finish: Finish) -> None:
        self._finished.append(finish)

    def take(self) -> TokenEvents | None:
        """All of it as one message; None where nothing happened."""
        if not (self._sids or self._finished or self._prompt_logprobs):
            return None
        events = TokenEvents(
            sids=b"".join([part.tobytes() for part in self._sids]),
            tokens=b"".join([part.tobytes() for part in self._tokens]),
            started=self._started,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finished=self._finished,
        )
        self._sids, self._tokens, self._started = [], [], []
        self._logprobs, self._prompt_logprobs, self._finished = [], [], []
        return events
