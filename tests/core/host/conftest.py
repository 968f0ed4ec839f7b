"""Real and hostile checkpoint files, and a Python of their own for tests that may end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LONG_AGO_NS = 1_000_000_000 * 10**9


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint of four tensors that is older than anything a test writes."""
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    save_file(
        {
            "weight": torch.randn(64, 200),
            "bias": torch.randn(200).to(torch.bfloat16),
            "scale": torch.tensor(0.5),
            "nothing": torch.empty(0, 4),
        },
        path,
        {"format": "pt"},
    )
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path


@pytest.fixture
def write_raw(tmp_path: Path) -> Callable[..., Path]:
    """Write a file in the safetensors layout without any of its promises."""

    def write(
        header: Mapping[str, object] | bytes,
        body: bytes = b"",
        length: int | None = None,
        name: str = "raw.safetensors",
    ) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        count = len(text) if length is None else length
        path.write_bytes(count.to_bytes(8, "little") + text + body)
        return path

    return write


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run code in a process of its own, which a signal may end."""

    def run(
        code: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-c", code, *map(os.fspath, arguments)],
            env={**os.environ, **(env or {})},
            capture_output=True,
            timeout=120,
            check=False,
        )

    return run
