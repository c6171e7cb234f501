"""A command line, and the YAML file it may name, to a Config and what there is to say about it."""

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from detour.config.accepted import ACCEPTED
from detour.config.option import KINDS, Accepted, Option
from detour.config.options import DEFAULTS, OPTIONS, Config
from detour.errors import ConfigError

ACCEPTED_BY_FLAG: Mapping[str, Accepted] = {row.flag: row for row in ACCEPTED}
_UNSET = object()


@dataclass(frozen=True)
class Parsed:
    """`notices` are sentences for the log: what is used instead of a feature that is not here."""

    config: Config
    notices: tuple[str, ...]
    rest: argparse.Namespace  # what the program's own arguments got


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:].rstrip('.')}.")


def parse(argv: Sequence[str], parser: argparse.ArgumentParser | None = None) -> Parsed:
    """Raises ConfigError, one sentence, for anything that cannot be understood or served.

    `parser` brings a program's own arguments; the options are added to it. Where one is said twice,
    the last wins; the command line wins over the file of --config.
    """
    parser = parser or make_parser("detour serve")
    add_options(parser)
    words = _normal(argv)
    words = [*_words_of_files(words), *words]
    found, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(_unknown(unknown[0], parser))
    values, notices = _served(found)
    if found.model_name:
        values["model"] = found.model_name
    notices += _accepted(found.accepted or [])
    return Parsed(Config(**values), tuple(dict.fromkeys(notices)), found)


def make_parser(program: str, description: str = "") -> argparse.ArgumentParser:
    return Parser(
        prog=program,
        description=description,
        allow_abbrev=False,
        formatter_class=_Help,
        exit_on_error=True,
    )


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every flag: those of Config with their help, the accepted ones without."""
    parser.add_argument(
        "model_name", nargs="?", default="", metavar="MODEL", help="the same as --model"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML file of options"
    )
    groups: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], name, option)
    for flag, row in ACCEPTED_BY_FLAG.items():
        nargs: Any = {"switch": 0, "values": "+"}.get(row.takes)
        parser.add_argument(
            flag, dest="accepted", action=_Remember, nargs=nargs, help=argparse.SUPPRESS
        )


def _add(group: Any, name: str, option: Option) -> None:
    metavar = "|".join(option.choices) or ("N" if option.convert is not str else "TEXT")
    default = DEFAULTS[name]
    shown = f" Default: {default}." if default not in ("", 0, {}, False) else ""
    text = (option.help + shown).replace("%", "%%")
    common: dict[str, Any] = {"dest": name, "default": _UNSET, "help": text}
    if option.switch:
        group.add_argument(*option.flags, action="store_true", **common)
    else:
        common |= {"metavar": metavar, "nargs": "+" if option.repeated else None}
        group.add_argument(*option.flags, **common)
    for flag, value in option.sets.items():
        group.add_argument(
            flag,
            dest=name,
            action="store_const",
            const=value,
            default=_UNSET,
            help=argparse.SUPPRESS,
        )


class _Remember(argparse.Action):
    """Collects (flag, value) pairs of accepted flags."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        pairs = [*(vars(namespace)[self.dest] or []), (option_string, values)]
        setattr(namespace, self.dest, pairs)


def _normal(argv: Iterable[str]) -> list[str]:
    """--max_model_len=8 as --max-model-len=8; -tp=8 as -tp 8."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            word = name.replace("_", "-") + equals + value
        elif equals and name in ACCEPTED_BY_FLAG:
            words += [name]
            word = value
        words.append(word)
    return words


def _words_of_files(words: Sequence[str]) -> list[str]:
    """What the files named with --config would say on the command line."""
    paths = []
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            paths.append(words[i + 1])
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
    # The path again behind its words: it ends an option that takes several values.
    return [
        word
        for path in paths
        for word in (*_words_of_file(Path(path).expanduser()), f"--config={path}")
    ]


def _words_of_file(path: Path) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error.strerror}."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"The configuration file {path} is not YAML: {reason}.") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"The configuration file {path} must hold a mapping of option names to values."
        )
    words: list[str] = []
    for key, value in content.items():
        # Names of Config's fields are understood too: `detour show config` prints those.
        option = OPTIONS.get(str(key).replace("-", "_"))
        flag = option.flags[0] if option else "--" + str(key).replace("_", "-")
        if flag not in _all_flags():
            raise ConfigError(f"{path}: {_unknown_option(flag)}")
        words += _words_of_value(flag, value)
    return words


def _words_of_value(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []  # a switch that is off, a value that is not set
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)] if value else []
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _all_flags() -> list[str]:
    served = [flag for option in OPTIONS.values() for flag in (*option.flags, *option.sets)]
    return [*served, *ACCEPTED_BY_FLAG]


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{parser.prog} does not know what to do with {word!r}."
    return _unknown_option(word.partition("=")[0], parser._option_string_actions)


def _unknown_option(flag: str, known: Iterable[str] = ()) -> str:
    near = difflib.get_close_matches(flag, [*known, *_all_flags()], n=1, cutoff=0.65)
    hint = f"Did you mean {near[0]}?" if near else "--help lists those there are."
    return f"There is no option {flag}. {hint}"


def _served(found: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    notices: list[str] = []
    for name, option in OPTIONS.items():
        raw = vars(found)[name]
        if raw is _UNSET:
            continue
        values[name] = (
            raw if option.switch or isinstance(raw, bool) else _value(option, raw, notices)
        )
    return values, notices


def _value(option: Option, raw: Any, notices: list[str]) -> Any:
    flag = option.flags[0]
    if option.repeated:
        return ",".join(raw) if isinstance(raw, list) else raw
    raw = option.synonyms.get(raw, raw)
    if raw in option.stand_ins:
        used, why = option.stand_ins[raw]
        notices.append(f"{flag} {raw}: {used} is used instead: {why}.")
        return used
    if option.choices and raw not in option.choices:
        near = difflib.get_close_matches(raw, option.choices, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{flag} takes one of {', '.join(option.choices)}, not {raw!r}.{hint}")
    try:
        return option.convert(raw)
    except ValueError as error:
        raise ConfigError(f"{flag} takes {KINDS[option.convert]}, not {raw!r}.") from error


def _accepted(given: Iterable[tuple[str, Any]]) -> list[str]:
    notices = []
    for flag, value in given:
        row = ACCEPTED_BY_FLAG[flag]
        words = value if isinstance(value, list) else [value]
        if row.takes == "json":
            _check_json(flag, words[0])
        if all(word in row.quiet for word in (["on"] if row.takes == "switch" else words)):
            continue
        said = " ".join([flag, *(str(word) for word in words)])
        notices.append(f"{said}: {row.instead}.")
    return notices


def _check_json(flag: str, text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes JSON, not {text!r}.") from error
