"""Declare an op, register a backend.

An op is its torch reference: the decorated function's docstring is the contract (shapes, dtypes,
errors, source). A backend is one file beside it with the same signature. Backends are found by
listing the op's folder; a file whose import fails becomes a backend that says so.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from detour.ops.device import Device

# What a caller will ask of an op, as plain facts ("head_dim": 128, "dtype": torch.bfloat16, "layout": ...).
Need = Mapping[str, Any]
Reasons = Callable[[Device, Need], list[str]]


def always(device: Device, need: Need) -> list[str]:
    return []


def takes(*layouts: str) -> Reasons:
    """Reasons of what reads or writes cache rows of these layouts (KVLayout names) alone."""

    def reasons(device: Device, need: Need) -> list[str]:
        layout = need["layout"].name
        return [] if layout in layouts else [f"it takes {' and '.join(layouts)}, not {layout}"]

    return reasons


def no_plan(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute an op. `reasons(device, need)` says why it cannot serve; empty = it can."""

    name: str
    run: Callable[..., Any]
    reasons: Reasons = always
    plan: Callable[..., Any] = (
        no_plan  # host-side preparation once a step; its result is handed to run
    )
    rank: int = 0  # among those that can serve, a larger one is tried first; the reference has -1
    replays: bool = True  # recorded in a CUDA graph, it follows batches of other lengths


@dataclass
class Op:
    """A contract with its reference and the backends registered against it."""

    name: str
    package: str
    reference: Backend
    inputs: Callable[[torch.device], Iterator[tuple[Need, tuple[Any, ...]]]]
    tolerance: Mapping[torch.dtype, float]
    planned: int = (
        0  # the first so many arguments of an input go to `plan`; its result stands for them
    )
    writes: tuple[int, ...] = ()  # numbers of the arguments that the op writes to
    backends: dict[str, Backend] = field(default_factory=dict)
    missing: dict[str, str] = field(
        default_factory=dict
    )  # backend file -> why it could not be imported
    searched: bool = False

    def backend(
        self,
        name: str,
        *,
        reasons: Reasons = always,
        plan: Callable[..., Any] = no_plan,
        rank: int = 0,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function as backend `name`."""

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            if name in self.backends:
                raise ValueError(f"op {self.name} has two backends called {name}")
            self.backends[name] = Backend(name, run, reasons, plan, rank)
            return run

        return register

    def call(self, backend: Backend, arguments: tuple[Any, ...]) -> Any:
        """Run `backend` on one of `inputs`' argument lists, planning first where the op plans."""
        if not self.planned:
            return backend.run(*arguments)
        plan = backend.plan(*arguments[: self.planned])
        return backend.run(plan, *arguments[self.planned :])

    def discover(self) -> dict[str, Backend]:
        """All backends, the reference among them; imports the files of the op's folder once."""
        if not self.searched:
            self.searched = True
            for module in pkgutil.iter_modules(sys.modules[self.package].__path__):
                try:
                    importlib.import_module(f"{self.package}.{module.name}")
                except ImportError as error:
                    self.missing[module.name] = f"{error}"
        return {**self.backends, self.reference.name: self.reference}


def op(
    package: str,
    *,
    inputs: Callable[[torch.device], Iterator[tuple[Need, tuple[Any, ...]]]],
    tolerance: Mapping[torch.dtype, float],
    plan: Callable[..., Any] = no_plan,
    planned: int = 0,
    writes: tuple[int, ...] = (),
    replays: bool = True,
    reasons: Reasons = always,
) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated torch function an op named after itself.

    `inputs(device)` yields (need, arguments) pairs that cover the contract, for tests, numerics
    self-tests and benchmarks. `tolerance` is the largest ||out - reference|| / ||reference|| per
    dtype (the need's "dtype").

    An op that prepares (once a step, or once a weight) has planned = n: its first n inputs go to
    `plan`, and `run` takes what that returned in their place. `writes` numbers the arguments of an
    input that the op writes to; they are outputs like what it returns. `replays` and
    `reasons` are the reference's.
    """

    def declare(reference: Callable[..., Any]) -> Op:
        return Op(
            name=reference.__name__,
            package=package,
            reference=Backend("reference", reference, reasons, plan, rank=-1, replays=replays),
            inputs=inputs,
            tolerance=tolerance,
            planned=planned,
            writes=writes,
        )

    return declare
