"""The numbers that keep the package small enough to read, and its borders where they are said to be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "detour"
FILES = sorted(SRC.rglob("*.py"))

FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 8
PACKAGE_LINES = 26_000  # without the backends under ops/*/

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions_of(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, Function)]


def own_lines(function: Function) -> int:
    """Of the function without the functions inside it: a router's handlers count each by itself."""
    inner = [
        node
        for node in ast.walk(function)
        if isinstance(node, Function) and node is not function and node.end_lineno
    ]
    lines = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    for node in inner:
        lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_backend(path: Path) -> bool:
    """A kernel and its launchers: ops/<op>/<backend>.py."""
    parts = path.relative_to(SRC).parts
    return parts[0] == "ops" and len(parts) > 2 and path.name != "__init__.py"


def parameters_of(function: Function) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_on_a_screen(path):
    long = [
        f"{function.name}: {own_lines(function)} lines"
        for function in functions_of(path)
        if own_lines(function) > FUNCTION_LINES and not is_kernel(function)
    ]
    wide = [
        f"{function.name}: {len(parameters_of(function))} parameters"
        for function in functions_of(path)
        if len(parameters_of(function)) > PARAMETERS and not is_kernel(function)
    ]
    assert long == []
    assert wide == [] or is_backend(path) or is_reference(path)


def is_kernel(function: Function) -> bool:
    """Triton compiles one function: what it inlines must stand in it, and all its pointers come in."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_reference(path: Path) -> bool:
    """ops/<op>/__init__.py: its backends' launchers share its signature."""
    return path.relative_to(SRC).parts[0] == "ops" and path.name == "__init__.py"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_says_what_it_knows(path):
    assert ast.get_docstring(tree_of(path))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_attribute_is_probed_for(path):
    """hasattr and getattr with a literal name ask whether a field exists; ours always do."""
    probes = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ]
    assert probes == [] or path.relative_to(SRC).parts[0] == "loading"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_environment_has_one_reader(path):
    reads = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("environ", "getenv", "environb")
    ]
    assert reads == [] or name_of(path) == "config/environment.py"


def test_the_package_stays_within_its_budget():
    lines = sum(len(path.read_text().splitlines()) for path in FILES if not is_backend(path))
    assert lines <= PACKAGE_LINES


FORBIDDEN = ("torch", "transformers", "triton")


@pytest.mark.parametrize(
    ("module", "own"),
    [("detour.engine.scheduler", 16), ("detour.launch", 120), ("detour.cli", 8)],
)
def test_what_needs_no_torch_loads_none(module, own):
    """A scheduler that loads a tensor library cannot be tested in a second, nor a front be small."""
    program = (
        f"import sys, {module}\n"
        "print(*(name for name in sys.modules if name.startswith('detour.')))\n"
        f"print(*(name for name in {FORBIDDEN!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    ours, heavy = done.stdout.split("\n")[:2]
    assert heavy == ""
    assert len(ours.split()) <= own
