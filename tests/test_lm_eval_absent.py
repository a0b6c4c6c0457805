"""Without lm-evaluation-harness, importing its model type says what to install."""

from __future__ import annotations

import sys

import pytest


def test_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "bitnest_format.lm_eval", raising=False)
    monkeypatch.delitem(sys.modules, "bitnest_format.lm_eval_model", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError) as error:
        import bitnest_format.lm_eval  # noqa: F401
    assert str(error.value) == "lm_eval is not installed; 'pip install bitnest-format[eval]' brings it"
