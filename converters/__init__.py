"""Turns models of other formats into nested checkpoints, one decoder layer at a time."""
