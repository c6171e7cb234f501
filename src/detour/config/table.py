"""The options as a Markdown document: docs/flags.md and `detour show flags`."""

from collections.abc import Iterator

from detour.config.accepted import ACCEPTED
from detour.config.option import Option
from detour.config.options import DEFAULTS, OPTIONS

_HEAD = """# Flags

Made by `detour show flags`; tests/test_docs.py holds that it is up to date.

Every flag may stand on the command line or, without its dashes, in the YAML file of `--config`; the
command line wins. Underscores may stand for dashes.

The environment: `DETOUR_CACHE` (folder for downloaded models), `DETOUR_API_KEY`, `HF_TOKEN`,
`HF_HUB_OFFLINE`."""

_ACCEPTED_HEAD = """## Accepted

Flags of SGLang and vLLM whose feature is not here. They are accepted, so that command lines can be
pasted, and answered with a line in the log that says what is used instead."""


def markdown() -> str:
    return "\n".join([_HEAD, *_served(), "", _ACCEPTED_HEAD, "", *_accepted()]) + "\n"


def _served() -> Iterator[str]:
    group = ""
    for name, option in OPTIONS.items():
        if option.group != group:
            group = option.group
            yield f"\n## {group[:1].upper()}{group[1:]}\n"
            yield "| flag | values | default | meaning |\n|---|---|---|---|"
        flags = ", ".join(f"`{flag}`" for flag in (*option.flags, *option.sets))
        yield f"| {flags} | {_values(option)} | {_default(name)} | {option.help} |"


def _values(option: Option) -> str:
    if option.switch:
        return ""
    return ", ".join(option.choices) or option.convert.__name__.replace("_", " ").replace(
        "str", "text"
    )


def _default(name: str) -> str:
    default = DEFAULTS[name]
    return "" if default in ("", {}, False) else f"`{default}`"


def _accepted() -> Iterator[str]:
    flags: dict[str, list[str]] = {}
    for row in ACCEPTED:
        flags.setdefault(row.instead, []).append(f"`{row.flag}`")
    for instead, spelled in flags.items():
        yield f"- {instead[:1].upper()}{instead[1:]}:\n  {', '.join(spelled)}"
