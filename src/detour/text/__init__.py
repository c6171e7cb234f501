"""Strings to tokens and back. Knows tokenizers and templates; knows no HTTP, no engine, no tensor."""
