"""The doctor's kernel: launched (here interpreted) and compared, with a wrong result noticed."""

from __future__ import annotations

import os

import pytest
import torch

from bitnest_format.kernels import plain_activation, self_test

DEVICE = torch.device("cuda" if os.environ.get("BITNEST_TEST_DEVICE") == "cuda" else "cpu")


def test_launch_and_compare() -> None:
    self_test.launch_one(DEVICE)


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_activation, "quantize", lambda x, acts, rows: acts.codes.fill_(1))
    with pytest.raises(RuntimeError, match=r"^a kernel's results differ from those of its definition$"):
        self_test.launch_one(DEVICE)
