"""A GGUF's vocabulary as a `tokenizers` tokenizer. Reads the header only.

Two kinds: byte-level BPE ("gpt2") with its merges, and SentencePiece BPE ("llama"), whose merges
are recovered from the scores.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from detour.errors import CheckpointError
from detour.gguf_header import GgufHeader
from detour.text.pre_tokenizers import Family, family_of, pre_tokenizer

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """The tokenizer that the file describes.

    Raises CheckpointError when the file holds no vocabulary, one of another kind, or one that does
    not fit together.
    """
    path, metadata = header.path, header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path} holds no vocabulary (tokenizer.ggml.tokens).")
    kind = metadata.get("tokenizer.ggml.model", "")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(types)} token types.")
    try:
        if kind == "gpt2":
            family = family_of(metadata.get("tokenizer.ggml.pre") or "default", path)
            tokenizer = _byte_level(metadata, tokens, family)
            add_bos = family.add_bos
        elif kind == "llama":
            tokenizer, add_bos = _sentencepiece(metadata, tokens, types), True
        else:
            raise CheckpointError(
                f"{path}: the tokenizer model {kind!r} is not supported; gpt2 and llama are."
            )
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{path}: the vocabulary does not fit together ({error}).") from error
    _add_special(tokenizer, tokens, types)
    _add_ends(tokenizer, metadata, tokens, add_bos)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], family: Family) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {text: i for i, text in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=family.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    """SentencePiece BPE: spaces are U+2581, unknown characters fall to byte tokens."""
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    vocab = {text: i for i, text in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = sentencepiece_merges(tokens, scores, types)
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*undo, *strip])
    return tokenizer


def sentencepiece_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's rule (join the neighbours whose union scores best) amounts
    to."""
    words = {text: i for i, text in enumerate(tokens) if types[i] in {NORMAL, USER_DEFINED, UNUSED}}
    found = []
    for text, i in words.items():
        for cut in range(1, len(text)):
            left, right = words.get(text[:cut]), words.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, left, right in found]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are cut out of the text whole, before anything else."""
    control = [tokens[i] for i, kind in enumerate(types) if kind == CONTROL]
    shown = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in shown])


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], add_bos: bool
) -> None:
    """The begin and end tokens that the file wants around a text."""

    def end(name: str, default: bool) -> list[tuple[str, int]]:
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        wanted = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        return [(tokens[token], token)] if wanted and isinstance(token, int) else []

    bos, eos = end("bos", add_bos), end("eos", False)
    if bos or eos:
        tokenizer.post_processor = TemplateProcessing(
            single=[*(t for t, _ in bos), "$A", *(t for t, _ in eos)], special_tokens=bos + eos
        )
