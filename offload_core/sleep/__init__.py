"""Models that leave the device for a while: orders over several of them, with receipts."""

from .controller import OrderError, Progress, SleepController, asleep_text
from .records import Held, MachineRecord, ModelReceipt, Receipt, SleepState
from .sleepers import GIVES_HOST_BACK, KEEPS_HOST, LEVELS, EngineSleeper, Sleeper

__all__ = [
    "GIVES_HOST_BACK",
    "KEEPS_HOST",
    "LEVELS",
    "EngineSleeper",
    "Held",
    "MachineRecord",
    "ModelReceipt",
    "OrderError",
    "Progress",
    "Receipt",
    "SleepController",
    "SleepState",
    "Sleeper",
    "asleep_text",
]
