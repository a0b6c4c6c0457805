"""Nested 4/8-bit checkpoints: one weight on disk, a 4-bit draft view and an 8-bit target view.

`load(path_or_repo_id)` opens a checkpoint for generation; `bitnest-format --help` lists the commands.
Importing this package loads neither torch nor a GPU driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bitnest_format.api import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> object:
    if name == "load":
        from bitnest_format.api import load

        return load
    raise AttributeError(f"module 'bitnest_format' has no attribute {name!r}")
