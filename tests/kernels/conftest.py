"""What every test of a kernel needs: triton, and its interpreter where there is no GPU."""

import os

import pytest
from fences import DEVICE
from interpreted import index_by_scalars, round_bf16


@pytest.fixture(autouse=True)
def _executed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: no kernel can be executed")
    if DEVICE == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1"
        round_bf16(monkeypatch)
        index_by_scalars(monkeypatch)
