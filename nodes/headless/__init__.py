"""Workflows without a browser: load, convert, check, change, run, follow. The standard library."""

from .async_client import AsyncCourierClient
from .client import CourierClient
from .errors import (
    CheckError,
    ConnectionLostError,
    ConverterMissingError,
    HeadlessError,
    RefusedError,
    RunCancelledError,
    RunFailedError,
    UsageError,
    WorkflowFileError,
)
from .records import KEEP, OutputFile, Run, RunEvent, RunOptions

__all__ = [
    "KEEP",
    "AsyncCourierClient",
    "CheckError",
    "ConnectionLostError",
    "ConverterMissingError",
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
