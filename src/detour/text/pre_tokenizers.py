"""How each family of byte-level vocabularies cuts text into words before merging.

A GGUF names its family in `tokenizer.ggml.pre`. The patterns are those of the families' published
tokenizer.json files; a wrong one would not fail but silently tokenise worse, so an unknown name is
an error.
"""

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from detour.errors import CheckpointError

# Alternatives that the patterns share.
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WIDE_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
# The cased letters as DeepSeek-LLM's own file lists them; no Unicode class names the same set.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


def _cased_words(ending: str) -> str:
    """Words that break where an upper-case letter follows a lower-case one."""
    return f"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}"


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACE}"
QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACE}"
QWEN35 = (
    rf"{_ENDINGS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
GPT4O = rf"{_cased_words(f'{_ENDINGS}?')}|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_SPACE}"
TEKKEN = rf"{_cased_words('')}|\p{{N}}|{_SIGNS_SLASH}|{_SPACE}"
SEED = rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_LEAD}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)


class Family(NamedTuple):
    """One way of cutting: each pattern cuts what the ones before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a whole word in the vocabulary is taken without merging
    add_bos: bool = False  # where the file does not say


_FAMILIES: dict[str, Family] = {
    "default": Family((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 mpt olmo phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": Family(
        (GPT2,)
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Family(
        (r"\p{N}", GPT2)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Family(
        (LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Family((LLAMA3,)),
    "glm4 glm5": Family((LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": Family((QWEN2,)),
    "qwen35": Family((QWEN35,)),
    "falcon": Family((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": Family(
        (
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?[{_WIDE_SIGNS}]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Family(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Family((r"\p{N}{1,3}", _CJK_KANA, DEEPSEEK3)),
    "gpt-4o llama4 kanana2 minimax-m2": Family((GPT4O,)),
    "tekken": Family((TEKKEN,), ignore_merges=True, add_bos=True),
    "seed-coder": Family((SEED,)),
    "bailingmoe bailingmoe2 llada-moe": Family((BAILING,)),
}
FAMILIES = {name: family for names, family in _FAMILIES.items() for name in names.split()}


def family_of(name: str, path: object) -> Family:
    """The family that a GGUF names. Raises CheckpointError for a name we do not know."""
    if name not in FAMILIES:
        raise CheckpointError(
            f"{path}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; known are "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[name]


def pre_tokenizer(family: Family) -> PreTokenizer:
    """The family's cuts, then bytes written as GPT-2's printable characters."""
    cuts: list[PreTokenizer] = [Split(Regex(p), behavior="isolated") for p in family.patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
