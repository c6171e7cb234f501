"""What the papers say exists does exist."""

import re
import stat
from pathlib import Path

import pytest

from detour.cli import COMMANDS
from detour.config.options import OPTIONS
from detour.config.parse import ACCEPTED_BY_FLAG
from detour.config.table import markdown

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "detour"
PAPERS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
CODE = re.compile(r"`([^`\n]+)`")


def words_of(paper: str) -> list[str]:
    return CODE.findall((ROOT / paper).read_text())


@pytest.mark.parametrize("paper", PAPERS)
def test_paths_exist(paper):
    paths = [
        word
        for word in words_of(paper)
        if re.fullmatch(r"[\w./-]+(\.py|\.md|/)", word) or word.startswith("scripts/")
    ]
    missing = [
        path
        for path in (word.split(" ")[0] for word in paths)
        if not any((root / path).exists() for root in (ROOT, SRC))
    ]
    assert missing == []


@pytest.mark.parametrize("paper", PAPERS)
def test_links_lead_somewhere(paper):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / paper).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_names_in_the_architecture_exist():
    """CamelCase words and Class.method are ours, and are spelt as in the code."""
    source = "\n".join(path.read_text() for path in SRC.rglob("*.py"))
    for word in words_of("ARCHITECTURE.md"):
        if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", word):
            name, _, method = word.partition(".")
            assert re.search(rf"\bclass {name}\b", source), word
            assert not method or f"def {method}(" in source, word


@pytest.mark.parametrize("paper", PAPERS)
def test_flags_and_commands_exist(paper):
    text = (ROOT / paper).read_text()
    flags = {flag for option in OPTIONS.values() for flag in (*option.flags, *option.sets)}
    flags |= {*ACCEPTED_BY_FLAG, "--config", "--url", "--input", "--slow"}
    for own in ("bench/flags.py", "cli/quantize.py", "cli/target.py"):  # arguments of some commands
        flags |= set(re.findall(r'"(--[\w-]+)"', (SRC / own).read_text()))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= flags
    assert set(re.findall(r"(?:^|`)detour ([a-z]+)", text, re.MULTILINE)) <= {*COMMANDS}


def test_the_readmes_commands_are_there_and_run_as_they_stand():
    for script in ("install", "serve", "test", "check", "lint", "bench"):
        path = ROOT / "scripts" / script
        assert path.stat().st_mode & stat.S_IXUSR
        assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "scripts/serve" in (ROOT / "README.md").read_text()
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text()


def test_the_list_of_flags_is_up_to_date():
    """Run `detour show flags > docs/flags.md` after a change of options."""
    assert (ROOT / "docs" / "flags.md").read_text() == markdown()


def test_the_changelog_starts_with_what_is_not_released():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"


def test_every_gpu_backend_has_a_line_that_says_where_it_is_proven():
    lines = re.findall(
        r"^\| (`.*?`) \| (\w+) \|", (ROOT / "docs" / "backends.md").read_text(), re.MULTILINE
    )
    told = {(op, backend) for ops, backend in lines for op in CODE.findall(ops)}
    there = set()
    for file in (SRC / "ops").glob("*/*.py"):
        if file.stem in ("triton", "cuda"):
            ops = re.findall(r"^@(\w+)\.backend\(\s*\"(\w+)\"", file.read_text(), re.MULTILINE)
            there |= set(ops)
    assert told == there
