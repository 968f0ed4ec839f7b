"""What a user or a test may set. Values only; nothing here acts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ConfigError
from .units import MIB, gib_to_bytes


@dataclass(frozen=True)
class Budget:
    """The two figures that bound a model, in bytes.

    ``device_bytes`` covers resident weights, slots and the activations measured while the model
    runs; None leaves it to whoever loads. ``host_bytes`` covers what is page-locked or copied in
    host memory; None is automatic and 0 locks nothing.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    shared: bool = False
    """The figures are for all models together that are loaded with such a budget."""

    def __post_init__(self) -> None:
        for name, value in (("device", self.device_bytes), ("host", self.host_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"the {name} budget must be whole bytes, not {value!r}")
            if value is not None and value < 0:
                raise ConfigError(f"the {name} budget is {value} bytes; it must be 0 or more")


@dataclass(frozen=True)
class Switches:
    """Environment switches for tests and support, read once by whoever builds an engine."""

    courier: bool = True
    in_place: bool = True
    poison: bool = False
    self_check: bool = False
    pretend_device_bytes: int | None = None
    pretend_host_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())
    """What the status has to show about them, in words."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine streams. The defaults suit everyone; tests vary them."""

    slots: int = 2
    """Reusable device buffers. One is enough to run; the second is what makes copies overlap."""
    margin_bytes: int = 64 * MIB
    """Kept free of the device budget beside the activations as measured: what a driver takes for
    kernels and workspaces without saying so, and how far one pass differs from another."""
    growth_margin_bytes: int = 96 * MIB
    """Kept free beside that by a plan that grows in the middle of a run: on a fuller device the
    same pass takes more (84 MiB more of a 4 GiB budget on an H200), until that was measured."""
    interrupt_poll_seconds: float = 0.05
    """How often a wait for the courier asks whether the user cancelled. For people, not safety."""
    patience_seconds: float = 60.0
    """How long unload and detach wait for a courier that is stuck on a drive before they refuse."""
    switches: Switches = field(default_factory=Switches)

    def __post_init__(self) -> None:
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 1:
            raise ConfigError(f"slots is {self.slots!r}; at least 1 is needed to stream a layer")
        for name in ("interrupt_poll_seconds", "patience_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")


EXIT_SECONDS = 1.0
"""How long the end of the interpreter waits for a thread's copy under way. A thread that comes back
from torch into a dead interpreter aborts the process, so it is worth a wait, but not a hang."""

CHUNK_BYTES = 8 * MIB
"""One page-locked staging chunk (docs/engine.md, "Staging")."""


def read_switches(environ: Mapping[str, str]) -> Switches:
    """The switches set in ``environ``.

    The pretend figures change what a user is told about the machine, so they count only together
    with COURIER_TESTING=1, and then ``notes`` says so.

    Raises: ConfigError for a figure that is not a number.
    """
    testing = environ.get("COURIER_TESTING") == "1"
    notes: list[str] = []
    pretend: dict[str, int | None] = {}
    for kind in ("DEVICE", "HOST"):
        name = f"COURIER_PRETEND_{kind}_GIB"
        text = environ.get(name)
        pretend[kind] = None
        if text is None:
            continue
        if not testing:
            notes.append(f"{name} is ignored: it needs COURIER_TESTING=1")
            continue
        pretend[kind] = gib_to_bytes(_number(text, name), name)
        notes.append(f"{name}={text}: the {kind.lower()} is treated as that large (a test setting)")
    courier = _flag(environ, "COURIER_THREAD", True, notes)
    in_place = _flag(environ, "COURIER_IN_PLACE", True, notes)
    self_check = _flag(environ, "COURIER_SELF_CHECK", False, notes)
    if not courier:
        notes.append("COURIER_THREAD=0: layers are copied by the compute thread, without overlap")
    if not in_place:
        notes.append("COURIER_IN_PLACE=0: no page of a checkpoint is locked")
    if self_check:
        notes.append(
            "COURIER_SELF_CHECK=1: a sample of every weight is compared after each copy; slow"
        )
    return Switches(
        courier=courier,
        self_check=self_check,
        in_place=in_place,
        poison=testing and environ.get("COURIER_POISON") == "1",
        pretend_device_bytes=pretend["DEVICE"],
        pretend_host_bytes=pretend["HOST"],
        notes=tuple(notes),
    )


def _flag(environ: Mapping[str, str], name: str, default: bool, notes: list[str]) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    if text:
        notes.append(f"{name}={environ[name]} is not understood and has no effect; use 1 or 0")
    return default


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number of GiB") from None
