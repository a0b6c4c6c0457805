"""Decoding from a nested checkpoint. `generate.NestedModel` is the entry.

A request goes: `tokenizer` (text to ids) -> `generate` (limits, stops, streaming) -> `speculative` (draft, verify,
accept, rewind; `sampling` decides) -> `model` (one forward pass of a view, over `linear`, `rope`) -> `kv_cache`.
"""
