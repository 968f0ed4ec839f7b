"""For every test: no thread is left behind, and ``gpu`` tests say why they do not run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

# For threads that were told to end and are on their way; one that was not told fails the test.
THREAD_GRACE_SECONDS = 2.0


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(THREAD_GRACE_SECONDS)
    left = [thread for thread in threading.enumerate() if thread not in before]
    if left:
        pytest.fail(f"the test left threads behind: {left}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} finds none")
    for item in gpu_items:
        item.add_marker(skip)
