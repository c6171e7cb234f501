"""Drives servers and measures them."""
