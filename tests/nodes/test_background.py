"""Threads that may not be had."""

from __future__ import annotations

import threading
from typing import Any

import pytest


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_no_thread_to_be_had_is_an_answer_and_no_error(
    pack: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    try_to_start = pack.module("nodes.background").try_to_start
    done = threading.Event()

    def refuse(thread: threading.Thread) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert try_to_start("courier-test", done.set) is None
    assert "courier-test could not be started" in caplog.text
    assert not done.is_set()
    thread = try_to_start("courier-test", done.set)
    assert thread.daemon
    assert done.wait(30)
