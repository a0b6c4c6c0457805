"""Kernels are interpreted in the test process: the choice is made when they are decorated, so before any import."""

import os

os.environ["TRITON_INTERPRET"] = "1"
