"""Strings to tokens and back, for a model folder or a `.gguf`.

The `tokenizers` library does the work. What is added here: where the files keep things, and exact
raw bytes for every token, from which text is put together. Knows nothing of messages or streams.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from detour.errors import BadRequest, CheckpointError
from detour.gguf_header import GgufHeader, end_of_text_ids, read_gguf_header
from detour.text.gguf_vocab import tokenizer_from_gguf
from detour.text.token_table import decoding_rule, token_bytes_table


class Tokenizer:
    """One model's vocabulary. Immutable once built, so any number of threads may use it."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int = -1,
        chat_template: str = "",
        name: str = "the tokenizer",
    ) -> None:
        """name: what errors call it. The rest: see the attributes. Raises CheckpointError when text
        cannot be put together from its tokens' bytes (WordPiece and the like)."""
        self._inner = inner
        rule = decoding_rule(inner, name)
        self._bytes = token_bytes_table(inner, rule)
        added = inner.get_added_tokens_decoder()
        self.vocab_size = len(self._bytes)  # one more than the largest token
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id  # -1 = none
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.chat_template = chat_template  # a Jinja template; "" = none
        # A text's first space is an artefact of SentencePiece, which writes every word with one.
        self.strips_first_space = rule.strips_first_space
        self._texts = [_whole_text(data) for data in self._bytes]
        self._shown_texts = [
            "" if i in self.special_ids else text for i, text in enumerate(self._texts)
        ]
        self._shown_bytes = [
            b"" if i in self.special_ids else data for i, data in enumerate(self._bytes)
        ]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, with what the model wants around a text (begin token…) if asked.

        Other threads run meanwhile. Raises BadRequest for text that is no valid Unicode.
        """
        try:
            # Unlike encode(), the batch call gives up the interpreter lock, and it skips the
            # offsets.
            done = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadRequest("The text holds a lone surrogate: it is not valid Unicode.") from error
        ids: list[int] = done[0].ids
        return ids

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, at_start: bool = True
    ) -> str:
        """The tokens' text; bytes that are no UTF-8 become U+FFFD.

        at_start: the tokens begin a text rather than continue one (matters to SentencePiece alone).
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skip)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if at_start and self.strips_first_space else text

    def token_bytes(self, token: int) -> bytes:
        """What the token contributes to a text; nothing for a padding row of the model's."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        """One token alone, as in logprobs: U+FFFD where it is part of a character."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int:
        """The token written exactly so in the vocabulary ("<|im_end|>"), -1 if there is none."""
        found = self._inner.token_to_id(text)
        return -1 if found is None else found

    def pieces(self, skip_special_tokens: bool) -> list[bytes]:
        """By token: its bytes. Do not change it."""
        return self._shown_bytes if skip_special_tokens else self._bytes

    def texts(self, skip_special_tokens: bool) -> list[str | None]:
        """By token: its text, or None where it holds part of a character. Do not change it."""
        return self._shown_texts if skip_special_tokens else self._texts


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder (tokenizer.json and its companions) or of a `.gguf` file.

    Raises CheckpointError naming the file for a missing or damaged one, or an unsupported kind.
    """
    return _from_gguf(read_gguf_header(path)) if path.suffix == ".gguf" else _from_folder(path)


def _from_gguf(header: GgufHeader) -> Tokenizer:
    metadata = header.metadata
    return Tokenizer(
        tokenizer_from_gguf(header),
        eos_ids=end_of_text_ids(metadata),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id", -1),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        name=str(header.path),
    )


# --- a folder -------------------------------------------------------------------------------------


_OBEY_ADD_BOS = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"}


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json, which the tokenizer is read from (other tokenizer "
            "files can be converted to it with transformers)."
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file} is damaged or not supported: {error}.") from error
    inner.no_padding()
    inner.no_truncation()
    config = {
        **_json(folder / "special_tokens_map.json"),
        **_json(folder / "tokenizer_config.json"),
    }
    _add_declared_tokens(inner, config)
    bos, eos = (_content(config.get(name)) for name in ("bos_token", "eos_token"))
    _set_ends(inner, config, bos, eos)
    bos_id = inner.token_to_id(bos) if bos else None
    return Tokenizer(
        inner,
        eos_ids=_folder_eos_ids(folder, inner.token_to_id(eos) if eos else None),
        bos_id=-1 if bos_id is None else bos_id,
        chat_template=_folder_chat_template(folder, config),
        name=str(file),
    )


def _json(file: Path) -> dict[str, Any]:
    """A JSON object from an optional file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return value


def _content(token: Any) -> str:
    """A special token's text, which files give as a string or as an object; "" = none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _add_declared_tokens(inner: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Special tokens that only tokenizer_config.json knows of."""
    named = [_content(config.get(f"{kind}_token")) for kind in ("bos", "eos", "unk", "pad")]
    named += [_content(token) for token in config.get("additional_special_tokens") or []]
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    fresh = [text for text in dict.fromkeys(named) if text and text not in known]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in fresh])


def _set_ends(inner: tokenizers.Tokenizer, config: dict[str, Any], bos: str, eos: str) -> None:
    """Honours add_bos_token and add_eos_token for the classes in transformers that do.

    There they overrule tokenizer.json; a file of any other class may carry them without effect.
    """
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    given = any(isinstance(config.get(f"add_{end}_token"), bool) for end in ("bos", "eos"))
    if kind not in _OBEY_ADD_BOS or not given:
        return
    first = [bos] if bos and config.get("add_bos_token") else []
    last = [eos] if eos and config.get("add_eos_token") else []
    inner.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[(text, inner.token_to_id(text)) for text in dict.fromkeys(first + last)],
    )


def _folder_eos_ids(folder: Path, named: int | None) -> tuple[int, ...]:
    """The tokenizer's own end of text first (what templates call eos_token), then the model's."""
    given = _json(folder / "generation_config.json").get("eos_token_id")
    if given is None:
        given = _json(folder / "config.json").get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(i for i in [named, *ids] if isinstance(i, int)))


def _folder_chat_template(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja, else the one in a JSON file; of several named ones "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    given = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(given, list):
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = named.get("default") or next(iter(named.values()), "")
    return given if isinstance(given, str) else ""
