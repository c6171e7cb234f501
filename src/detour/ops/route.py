"""Per op, the ordered backends that can serve here, best first, reference last.

A model is built with one `Routes` and asks it for each op it uses; what it gets is a `Route`, called
like the op itself.
"""

import logging
from collections.abc import Mapping
from typing import Any

from detour.errors import ConfigError
from detour.ops.device import Device
from detour.ops.op import Backend, Need, Op

log = logging.getLogger(__name__)


class Route:
    """An op as it is served here. Calling it runs the first backend."""

    def __init__(self, op: Op, backends: list[Backend], lost: dict[str, list[str]]) -> None:
        self.op = op
        self.backends = backends  # never empty: the reference is last
        self.lost = lost  # backend -> why it cannot serve
        self.current = backends[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.current.run(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        return self.current.plan(*args, **kwargs)

    def strike(self, name: str, reason: str) -> None:
        """Take a backend off the route. The reference cannot be struck off."""
        if name == self.op.reference.name:
            raise ValueError(f"the reference of {self.op.name} cannot be struck off")
        self.backends = [backend for backend in self.backends if backend.name != name]
        self.lost[name] = [reason]
        self.current = self.backends[0]


class Routes:
    """Builds one Route per (op, need) and remembers it.

    `wishes` maps an op's name to the backend a flag asks for. A wish that cannot be met is an error
    with its reason if `strict`, else one log line that names what is used instead.
    """

    def __init__(self, device: Device, wishes: Mapping[str, str], strict: bool) -> None:
        self.device = device
        self.wishes = wishes
        self.strict = strict
        self.chosen: dict[tuple[str, str], Route] = {}

    def route(self, op: Op, need: Need) -> Route:
        key = (op.name, repr(sorted(need.items(), key=lambda item: item[0])))
        if key not in self.chosen:
            self.chosen[key] = self._choose(op, need)
        return self.chosen[key]

    def _choose(self, op: Op, need: Need) -> Route:
        found = op.discover()
        # An op is its reference: what that does not take, no backend is asked for.
        if refused := op.reference.reasons(self.device, need):
            raise ConfigError(f"{op.name} cannot be computed as asked: {'; '.join(refused)}.")
        lost = {name: [reason] for name, reason in op.missing.items()}
        able = []
        for backend in found.values():
            reasons = backend.reasons(self.device, need)
            if reasons:
                lost[backend.name] = reasons
            else:
                able.append(backend)
        wish = self.wishes.get(op.name, "")
        able.sort(key=lambda backend: (backend.name == wish, backend.rank), reverse=True)
        route = Route(op, able, lost)
        if wish and route.current.name != wish:
            why = "; ".join(
                lost.get(
                    wish, [f"there is no backend of that name (there are: {', '.join(found)})"]
                )
            )
            if self.strict:
                raise ConfigError(f"{op.name} cannot use backend {wish}: {why}.")
            log.warning("%s uses %s instead of %s: %s", op.name, route.current.name, wish, why)
        return route
