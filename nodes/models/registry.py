"""What nodes, routes and headless runs all call: the registry of models, and their status."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
import threading
import unicodedata
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ...offload_core.device import DeviceBackend, DeviceMemory
from ...offload_core.host import HostLimits, host_limits
from ...offload_core.run import LayerEngine, SharedBudget
from ...offload_core.values import Budget, EngineSnapshot, EngineState

VERSION = "0.1.0"
_SLUG_LENGTH = 40


@dataclass(frozen=True)
class DeviceRecord:
    """The device that models run on; the figures are the driver's and count every process.

    None is what nobody could say: before the first model there may be figures without a name.
    """

    name: str | None = None
    type: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


class AskedBy(enum.Enum):
    """Who asked for a model's budget."""

    NODE = "node"
    """Its loader: a Courier Budget, or none, which is automatic."""
    SETTINGS = "settings"
    """The default in ComfyUI's settings, for a loader without a Courier Budget."""
    ORDER = "order"
    """Somebody afterwards, in the panel or over HTTP; until the loader runs again."""


@dataclass(frozen=True)
class AskedBudget:
    """What the user asked for, as against what the model is loaded with at the moment."""

    budget: Budget
    by: AskedBy
    waits: bool
    """It is not in force yet; the next load, or the next run, has it."""
    remarks: tuple[str, ...] = ()
    """What there is to say about the figures themselves, for people."""


DIFFUSION_MODEL, TEXT_ENCODER, VAE = "diffusion model", "text encoder", "VAE"
"""Kinds of models, as people and the panel know them."""
LOADER_TITLES: Mapping[str, str] = {
    DIFFUSION_MODEL: "Load Diffusion Model (Courier)",
    TEXT_ENCODER: "Load CLIP (Courier)",
    VAE: "Load VAE (Courier)",
}
"""Our loader of each kind, as its node is called."""


@dataclass(frozen=True)
class Origin:
    """What made a model: of which kind it is, the loader's class and what that was given.

    ``inputs`` are those that choose the model, by name: file names as offered, dtypes, types.
    """

    kind: str = DIFFUSION_MODEL
    loader: str = ""
    inputs: tuple[tuple[str, str], ...] = ()

    def is_made_by(self, loader: object, inputs: Mapping[str, object]) -> bool:
        """Whether a node of that class with these inputs asks for this model, whichever separator
        its workflow was saved with. An input that the node leaves open is the default."""
        return (
            bool(self.loader)
            and loader == self.loader
            and all(_same_text(inputs.get(name, value), value) for name, value in self.inputs)
        )


def _same_text(given: object, known: str) -> bool:
    return isinstance(given, str) and given.replace("\\", "/") == known.replace("\\", "/")


@dataclass(frozen=True)
class ModelRecord:
    """One registered model as it is now. ``file`` is a base name, never a path."""

    id: str
    name: str
    file: str
    snapshot: EngineSnapshot
    asked: AskedBudget | None = None
    """None where nobody said."""
    origin: Origin = Origin()

    @property
    def state(self) -> EngineState:
        """What the model's device memory is doing."""
        return self.snapshot.state

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything that people should know of it."""
        return (*self.snapshot.notes, *(self.asked.remarks if self.asked is not None else ()))


@dataclass(frozen=True)
class StatusRecord:
    """Everything the status shows. ``boot_id`` changes when ComfyUI is started anew."""

    version: str
    boot_id: str
    device: DeviceRecord
    host: HostLimits
    models: tuple[ModelRecord, ...]
    notes: tuple[str, ...]

    def with_first(self, model_id: str) -> StatusRecord:
        """The same record with that model first; the others keep their order."""
        models = sorted(self.models, key=lambda model: model.id != model_id)
        return dataclasses.replace(self, models=tuple(models))


DeviceProbe = Callable[[], tuple[torch.device, DeviceMemory]]


@dataclass(frozen=True)
class _Entry:
    """One registration. Holds the model's parts weakly: a status must not keep a model alive."""

    id: str
    name: str
    file: str
    engine: weakref.ref[LayerEngine]
    backend: weakref.ref[DeviceBackend]
    asked: Callable[[], AskedBudget | None]
    origin: Origin

    def read(self) -> ModelRecord | None:
        """The model now; None once it is gone or detached for good."""
        engine = self.engine()
        if engine is None or engine.state is EngineState.DETACHED:
            return None
        asked = self.asked()
        return ModelRecord(self.id, self.name, self.file, engine.snapshot(), asked, self.origin)


class CourierService:
    """The models of this process by stable id, and what is known about them.

    Reading takes no lock of an engine, so a status never waits for a run. Whoever drops a model
    need not say so: it is gone from the next status.

    Threads: any.
    """

    def __init__(self, device_probe: DeviceProbe | None = None) -> None:
        self.boot_id = uuid.uuid4().hex
        self._device_probe = device_probe
        # Guards what is below. Dead models are looked for, not told of by weakref callbacks: those
        # run in any thread at any allocation, also in one that holds this lock, and would hang it.
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._registered = 0
        self._shares: dict[str, SharedBudget] = {}

    def use_device_probe(self, probe: DeviceProbe) -> None:
        """Ask ``probe`` about the device as long as there is no model whose own could be asked."""
        self._device_probe = probe

    def share_of(self, device: str, budget: Budget) -> SharedBudget:
        """The one shared budget of a device; the figures given last are the ones that count."""
        with self._lock:
            share = self._shares.setdefault(device, SharedBudget(budget))
            share.budget = budget
        return share

    def register(
        self,
        engine: LayerEngine,
        name: str,
        file: str,
        backend: DeviceBackend,
        asked: Callable[[], AskedBudget | None] = lambda: None,
        origin: Origin = Origin(),
    ) -> str:
        """Show a model in the status for as long as it lives. Idempotent for one engine.

        Args:
            name: as users know it, such as the entry that they chose in the loader.
            file: its checkpoint, a path or a name; only the base name is kept.
            backend: the engine's own.
            asked: the budget that the user asked for, at any time, from any thread. It is kept for
                as long as the model lives, so it must not hold the engine.
            origin: what kind of model it is, and the loader that made it.
        Returns: its id: ASCII, fit for a URL, never given twice in one process.
        """
        file_name = _clean(re.split(r"[\\/]", file)[-1])
        with self._lock:
            for entry in self._entries.values():
                if entry.engine() is engine:
                    return entry.id
            self._registered += 1
            model_id = f"{slug(file_name)}-{self._registered}"
            references = weakref.ref(engine), weakref.ref(backend)
            self._entries[model_id] = _Entry(
                model_id, _clean(name), file_name, *references, asked, origin
            )
        return model_id

    def status(self) -> StatusRecord:
        """Everything at this moment. A model that cannot be read is named in the notes."""
        models: list[ModelRecord] = []
        notes: list[str] = []
        entries = self._living()
        for entry in entries:
            try:
                model = entry.read()
            except Exception as error:
                # One model caught between two states must not hide the others.
                notes.append(f"{entry.name}: its status could not be read ({_text(error)})")
                continue
            if model is not None:
                models.append(model)
        device, device_notes = self._device(entries)
        return StatusRecord(
            version=VERSION,
            boot_id=self.boot_id,
            device=device,
            host=host_limits(driver_locked_bytes=_driver_locked_bytes(entries, models)),
            models=tuple(models),
            notes=(*device_notes, *notes),
        )

    def engines(self) -> list[tuple[str, str, LayerEngine]]:
        """(id, name, engine) of every model that lives, in the order of registration."""
        found = ((entry, entry.engine()) for entry in self._living())
        return [
            (entry.id, entry.name, engine)
            for entry, engine in found
            if engine is not None and engine.state is not EngineState.DETACHED
        ]

    def origin_of(self, model_id: str) -> Origin:
        """What made the model of that id; of an unknown one, nothing that could be named."""
        with self._lock:
            entry = self._entries.get(model_id)
        return entry.origin if entry is not None else Origin()

    def asked_of(self, model_id: str) -> AskedBudget | None:
        """The budget that was asked for; None where nobody said, or there is no such model."""
        with self._lock:
            entry = self._entries.get(model_id)
        return entry.asked() if entry is not None else None

    def status_of(self, model_id: str) -> ModelRecord | None:
        """The model of that id; None if there is none, or no longer."""
        with self._lock:
            entry = self._entries.get(model_id)
        return entry.read() if entry is not None else None

    def status_of_engine(self, engine: LayerEngine) -> ModelRecord | None:
        """The model that ``engine`` runs; None if it was never registered."""
        found = (entry for entry in self._living() if entry.engine() is engine)
        return next((entry.read() for entry in found), None)

    def _living(self) -> tuple[_Entry, ...]:
        """The entries whose engine lives, in the order of registration; forgets the others."""
        with self._lock:
            entries = tuple(self._entries.values())
        # Read once: an engine may die between two looks.
        alive = [entry.engine() is not None for entry in entries]
        with self._lock:
            for entry, lives in zip(entries, alive, strict=True):
                if not lives:
                    self._entries.pop(entry.id, None)
        return tuple(itertools.compress(entries, alive))

    def _device(self, entries: tuple[_Entry, ...]) -> tuple[DeviceRecord, tuple[str, ...]]:
        """The device, and a note where its driver does not answer."""
        backend = next(_backends(entries), None)
        try:
            if backend is not None:
                memory, device = backend.memory(), backend.device
                name, kind = str(device), device.type
                return DeviceRecord(name, kind, memory.total_bytes, memory.free_bytes), ()
            if self._device_probe is not None:
                device, memory = self._device_probe()
                name, kind = str(device), device.type
                return DeviceRecord(name, kind, memory.total_bytes, memory.free_bytes), ()
        except Exception as error:
            # A driver in trouble is when people look at the status.
            return DeviceRecord(), (f"the device's memory could not be read ({_text(error)})",)
        return DeviceRecord(), ()


_service: CourierService | None = None
_service_lock = threading.Lock()


def get_service() -> CourierService:
    """The one service of this process, made when first asked for. Threads: any."""
    global _service
    with _service_lock:
        if _service is None:
            _service = CourierService()
        return _service


def _backends(entries: tuple[_Entry, ...]) -> Iterator[DeviceBackend]:
    for entry in entries:
        backend = entry.backend()
        if backend is not None:
            yield backend


def _driver_locked_bytes(entries: tuple[_Entry, ...], models: list[ModelRecord]) -> int:
    """What the CUDA driver holds locked; the kernel itself counts what a CPU's models lock."""
    on_cuda = set()
    for entry in entries:
        backend = entry.backend()
        if backend is not None and backend.device.type == "cuda":
            on_cuda.add(entry.id)
    return sum(model.snapshot.memory.locked_bytes for model in models if model.id in on_cuda)


def slug(file_name: str) -> str:
    """The part of an id that people recognise: ASCII, fit for a URL."""
    stem = file_name.rpartition(".")[0] or file_name
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:_SLUG_LENGTH].strip("-") or "model"


def _clean(text: str) -> str:
    """Text that any encoder takes: bytes of a file name that are no UTF-8 arrive as surrogates."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
