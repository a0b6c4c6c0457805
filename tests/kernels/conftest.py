"""Where these tests run kernels: in the interpreter on the CPU, or compiled, with `BITNEST_TEST_DEVICE=cuda`.

The interpreter is chosen when a kernel is decorated, so before any import. On a GPU the tests are the same: all tensors
that they or the twins make on the CPU are moved there as they are made, so that random numbers do not change.
"""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

ON_GPU = os.environ.get("BITNEST_TEST_DEVICE") == "cuda"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def patch_the_language_once() -> None:
    """Let the interpreter put its functions into `triton.language` now, for good.

    It does so at every launch and every call of a device function, which takes half of these tests' time.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    done = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: done


if not ON_GPU:
    patch_the_language_once()

FACTORIES = {
    torch.arange,
    torch.empty,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.tensor,
    torch.zeros,
}


class MadeOnGpu(TorchFunctionMode):
    """Moves what the functions above make to the GPU."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.cuda() if func in FACTORIES and made.device.type == "cpu" else made


@pytest.fixture(autouse=True)
def kernel_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """`"cpu"` in the interpreter and for the reference, which is defined there; `"cuda"` for compiled kernels."""
    if not ON_GPU or request.path.name.startswith("test_reference"):
        yield "cpu"
        return
    with MadeOnGpu():
        yield "cuda"
