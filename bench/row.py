"""One line of a benchmark table: what was measured, and what it is held against."""

from typing import NamedTuple


class Row(NamedTuple):
    name: str
    value: float
    unit: str
    anchor: str  # the best figure seen elsewhere, with its source; "" where none is known
    bar: float  # the value to stay at or below
