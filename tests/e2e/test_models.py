# SPDX-License-Identifier: Apache-2.0
"""A model that a machine cannot run is said to be one."""

import pytest

from . import deepseek
from .models import CannotRunError


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek, "_COMPILED", ("of_another_processor_cpu",))
    with pytest.raises(CannotRunError, match="of_another_processor_cpu"):
        deepseek.register.__wrapped__()
