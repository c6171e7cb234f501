"""Ranks and what they say to each other."""
