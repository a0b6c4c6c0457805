"""The arithmetic of one decoder step. `reference*` define every operation in plain torch, on any device."""
