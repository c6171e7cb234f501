"""The seam between deciding and computing. tests/fake_executor.py holds one without a model."""

from typing import Protocol

from detour.engine.plan import Geometry, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    @property
    def geometry(self) -> Geometry: ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. Returns at once where the device works on its own. Never more than two
        steps are out at a time."""

    def collect(self) -> StepResult:
        """The result of the oldest step that is out; waits for it. Raises what the step raised:
        then this step and those submitted after it have not happened."""

    def close(self) -> None:
        """End the processes and give back the memory behind it. May be called twice."""
