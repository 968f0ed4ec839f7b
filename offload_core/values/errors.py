"""The one tree of errors that ``offload_core`` raises.

    CourierError
    ├── ConfigError (ValueError)         a budget or option that cannot be meant
    ├── CheckpointError                  the file is not what a checkpoint must be
    │   ├── CheckpointFormatError        broken, truncated, padded, or not safetensors at all
    │   ├── CheckpointChangedError       replaced, truncated or rewritten since it was opened
    │   └── MappingError                 the system would not map the file
    ├── BudgetError                      nothing that the budgets allow can run
    │   ├── DeviceBudgetError            names the smallest device budget that works
    │   └── HostBudgetError              names the smallest host budget that works
    ├── DeviceMemoryError                the device refused an allocation
    ├── TransferError                    a layer could not be brought; names layer and file
    │   └── CourierStoppedError          the courier thread ended before its orders did
    └── StateError                       the call does not fit the present state
        └── AsleepError                  the model sleeps; wake it first

Text of an error: what failed, with its numbers; what was needed; what to do.
"""

from __future__ import annotations


class CourierError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(CourierError, ValueError):
    """A budget or option that cannot be meant (negative bytes, text for a number)."""


class CheckpointError(CourierError):
    """A checkpoint file cannot be used; the text names the file and the remedy."""


class CheckpointFormatError(CheckpointError):
    """The file is broken, truncated, padded, or not a safetensors file."""


class CheckpointChangedError(CheckpointError):
    """The file on disk is no longer the file that was opened."""


class MappingError(CheckpointError):
    """The operating system refused to map the file."""


class BudgetError(CourierError):
    """No plan fits the budgets."""


class DeviceBudgetError(BudgetError):
    """The device budget is too small; ``smallest_bytes`` is the smallest that works."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class HostBudgetError(BudgetError):
    """The host budget is too small; ``smallest_bytes`` is the smallest that works."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class DeviceMemoryError(CourierError):
    """The device refused an allocation of ``requested_bytes``."""

    def __init__(self, message: str, requested_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes


class TransferError(CourierError):
    """One layer could not be brought to the device; the cause is chained."""


class CourierStoppedError(TransferError):
    """The courier thread ended before it had served this order."""


class StateError(CourierError):
    """The call does not fit the engine's present state."""


class AsleepError(StateError):
    """What was asked needs the model awake."""
