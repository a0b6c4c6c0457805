"""Generates text from a nested checkpoint: one weight, two views, one speculative loop."""
