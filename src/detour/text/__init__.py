"""Strings to tokens and back. Knows tokenizers and templates; no HTTP, no engine, no tensor."""
