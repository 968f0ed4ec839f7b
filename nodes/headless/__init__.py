"""Workflows without a browser: load, convert, check, change, run, follow. The standard library."""

from .client.async_client import AsyncCourierClient
from .client.blocking import CourierClient
from .client.records import (
    KEEP,
    OutputFile,
    Run,
    RunCancelledError,
    RunEvent,
    RunFailedError,
    RunOptions,
)
from .errors import (
    CheckError,
    ConnectionLostError,
    HeadlessError,
    RefusedError,
    UsageError,
    WorkflowFileError,
)

__all__ = [
    "KEEP",
    "AsyncCourierClient",
    "CheckError",
    "ConnectionLostError",
    "CourierClient",
    "HeadlessError",
    "OutputFile",
    "RefusedError",
    "Run",
    "RunCancelledError",
    "RunEvent",
    "RunFailedError",
    "RunOptions",
    "UsageError",
    "WorkflowFileError",
]
