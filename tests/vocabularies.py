"""A tiny SentencePiece vocabulary as GGUF metadata, for tests."""

WORDS = ["▁the", "▁", "the", "th", "he", "t", "h", "e", "a", "b", "▁a", "ab", "ü", ".", "<", "s"]


def sentencepiece_metadata(**changes: object) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokens += ["<|turn|>", "<note>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 3, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(WORDS))] + [0.0, 0.0]
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
