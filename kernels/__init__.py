"""The arithmetic of one decoder step. `reference*` define every operation in plain torch, on any device; Triton modules
compute it on a GPU over static buffers (`operands`), each beside a twin `plain_*` of the same functions (`ops`)."""
