"""What one engine holds on the device and locks on the host, and how it gets from plan to plan."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ..host import Reservation
from ..plan import ALIGNMENT, Held, Plan
from ..values import align_down, align_up
from .parts import NO_LIMIT_BYTES, EngineParts
from .patches import PatchedWeight
from .residency import Resident, move_buffers
from .source import LayerSource
from .weights import Weight, WeightGroup

_RENEWED_AHEAD = 2
"""Layers of which what stays is on its way while another runs. More would hold up what streams."""
_WORTH_STAGING_BYTES = 192 << 20
"""From here on, lanes made for the load alone take less time than the driver's own staging."""


class Occupancy:
    """Base weights, resident layers and parts of layers, slots and page locks of one engine.

    ``settle_into`` may fail half-way; whoever calls it then calls ``release``, which leaves the
    device and the locks empty from any state.

    Threads: the compute thread. The byte counts may be read by any.
    """

    def __init__(self, root: nn.Module, parts: EngineParts) -> None:
        self._root = weakref.ref(root)
        self._parts = parts
        self._base: Resident | None = None
        self._residents: dict[int, list[Resident]] = {}
        self._staging: Reservation | None = None
        self.resident_bytes = 0
        self.layer_bytes: tuple[int, ...] = (0,) * len(parts.inventory.layers)
        """Bytes of each layer's weights that are on the device all the time."""
        self._stale: deque[int] = deque()
        self._borrowed_from_bytes: int | None = None
        """The plan's own staging, while a renewal has more."""
        self.peak_bytes = 0
        """The most that a plan held since ``restart_peak``."""

    @property
    def device_bytes(self) -> int:
        """Resident weights, buffers, slots and what patches hold."""
        parts = self._parts
        return self.resident_bytes + parts.stream.slot_bytes + parts.patches.held_bytes

    @property
    def staging_bytes(self) -> int:
        """Page-locked staging held now."""
        return self._staging.size_bytes if self._staging is not None else 0

    def restart_peak(self) -> None:
        """What was held before is no measure of what comes."""
        self.peak_bytes = self.device_bytes

    def settle_into(self, plan: Plan, host_limit_bytes: int | None) -> None:
        """Bring device and locks to ``plan``; what is there already stays. Raises: CourierError."""
        parts = self._parts
        parts.stream.close()
        self.settle_renewal()
        self._borrowed_from_bytes = None  # the new plan's staging replaces what was borrowed
        # Give back before taking: the old plan and the new one need not fit side by side.
        missing = self._give_back(plan)
        parts.backend.trim()
        streamed = {
            index: parts.inventory.layers[index].part(range(window.first, window.last))
            for index, window in enumerate(layer.streamed for layer in plan.layers)
            if not window.is_empty
        }
        parts.ledger.limit_bytes = (
            NO_LIMIT_BYTES
            if host_limit_bytes is None
            else max(0, host_limit_bytes - plan.copied_bytes)
        )
        self._hold_locks(plan, streamed)
        slots = [parts.backend.allocate(plan.slot_bytes) for _ in range(plan.slots)]
        self._onload(plan, missing)
        self._stage(plan.staging_bytes)
        self._publish()
        parts.stream.open(streamed, slots)
        self.peak_bytes = max(self.peak_bytes, self.device_bytes)

    def held(self, plan: Plan) -> tuple[Held, ...]:
        """What of each layer is on the device under ``plan``, which is in force."""
        of = self._parts.backend.footprint.of
        return tuple(
            Held(layer.streamed, sum(of(r.size_bytes) for r in self._residents.get(index, ())))
            for index, layer in enumerate(plan.layers)
        )

    def patch(self, by_weight: Mapping[Weight, PatchedWeight]) -> None:
        """Patch by these from now on. What is on the device is as before: see ``renew_stale``."""
        residents = list(self._all_residents())
        for resident in residents:
            resident.take_off()
        try:
            self._parts.patches.replace(by_weight)
        finally:
            for resident in residents:
                resident.put_on()

    def prepare_renewal(self) -> None:
        """Renew what belongs to no layer, and have what the rest is to be renewed with: see
        ``renew``. Nothing may be shipping."""
        stale = [resident for resident in self._all_residents() if resident.is_stale]
        more_bytes = self._staging_for(stale)
        if more_bytes > self.staging_bytes:
            self._borrowed_from_bytes = self.staging_bytes
            self._stage(more_bytes)
        if self._base is not None and self._base.is_stale:
            self._base.end_renewal()
        self._stale = deque(
            index
            for index, layer in sorted(self._residents.items())
            if any(resident.is_stale for resident in layer)
        )

    @property
    def is_renewing(self) -> bool:
        """Whether a layer has yet to be renewed by its next turn."""
        return bool(self._stale)

    def renew(self, index: int) -> None:
        """Layer ``index`` is about to run: bring what of it is patched otherwise than it should be
        once more, from its home, and begin with the next layers. So a first pass after a change
        brings everything, and the link is never idle."""
        if index in self._stale:
            for resident in self._residents.get(index, ()):
                if resident.is_stale:
                    resident.end_renewal()
            self._stale.remove(index)
        for ahead in itertools.islice(self._stale, _RENEWED_AHEAD):
            for resident in self._residents.get(ahead, ()):
                if resident.is_stale:
                    resident.begin_renewal()

    def _all_residents(self) -> Iterator[Resident]:
        if self._base is not None:
            yield self._base
        for layer in self._residents.values():
            yield from layer

    def release(self, keep_locks: bool = False) -> None:
        """Leave the device, the staging and, unless they are to be kept, the page locks."""
        parts = self._parts
        parts.stream.close()
        self._stale.clear()
        self._borrowed_from_bytes = None
        for index in list(self._residents):
            for resident in self._residents[index]:
                resident.offload()
            del self._residents[index]  # not before: after an error a next call goes on with it
        if self._base is not None:
            self._base.offload()
            self._base = None
        parts.patches.release()
        self._publish()
        if not keep_locks:
            self.release_locks()
        self._stage(0)
        self._move_buffers(torch.device("cpu"))
        parts.backend.trim()

    def release_locks(self) -> None:
        """Unlock every page. Nothing may be shipping."""
        for source in self._parts.sources:
            source.release_locks()

    @property
    def has_borrowed_staging(self) -> bool:
        """Whether there is more staging than the plan has, for a renewal that is over."""
        return self._borrowed_from_bytes is not None and not self._stale

    def end_renewal(self) -> None:
        """Have the plan's own staging again. Nothing may be shipping."""
        if self._borrowed_from_bytes is not None:
            self._stage(self._borrowed_from_bytes)
        self._borrowed_from_bytes = None

    def settle_renewal(self) -> None:
        """Wait for what is on its way for ``renew``."""
        for resident in self._all_residents():
            resident.let_shipment_end()

    @property
    def lacks_staging(self) -> bool:
        """Whether layers whose locks the system refused have none to stream through."""
        refused = any(source.lock_refusal is not None for source in self._parts.sources)
        return refused and not self.staging_bytes

    def stage_what_was_refused(self) -> None:
        """Have staging for such layers, as far as the budget allows. Nothing may be shipping."""
        backend = self._parts.backend
        room = min(backend.staging_bytes, self._parts.ledger.free_bytes)
        self._stage(align_down(room, backend.staging_unit_bytes))

    def _hold_locks(self, plan: Plan, streamed: Mapping[int, WeightGroup]) -> None:
        parts = self._parts
        wanted = [
            (
                parts.sources[index],
                None if layer.lock_bytes is None else streamed[index],
                layer.lock_bytes,
            )
            for index, layer in enumerate(plan.layers)
        ]
        # Windows shrink when a plan grows. Unlocking what lies outside means locking the rest anew,
        # which takes as long as a step: not where the host budget has room for all of it.
        ours = sum(source.locked_bytes for source in parts.sources) + self.staging_bytes
        needed = sum(source.file_bytes_kept(part, limit) for source, part, limit in wanted)
        others = parts.ledger.used_bytes - ours
        roomy = others + needed + plan.staging_bytes <= parts.ledger.limit_bytes
        for source, part, limit in wanted:
            source.hold(part, keep_larger=roomy, file_limit_bytes=limit)

    def _give_back(self, plan: Plan) -> dict[int, list[int]]:
        """Offload what the plan does not keep; the weights by layer that are still to come."""
        missing = {}
        for index, layer in enumerate(plan.layers):
            group, window = self._parts.inventory.layers[index], layer.streamed
            kept = {id(w): i for i, w in enumerate(group.weights) if i not in window}
            staying, leaving = [], []
            for resident in self._residents.get(index, []):
                if all(id(weight) in kept for weight in resident.group.weights):
                    staying.append(resident)
                    for weight in resident.group.weights:
                        del kept[id(weight)]
                else:
                    leaving.append(resident)
            if not plan.is_added_to and self._is_wasteful(staying, group, kept.values()):
                leaving += staying
                staying = []
                kept = {id(w): i for i, w in enumerate(group.weights) if i not in window}
            for resident in leaving:
                resident.offload()
            if staying:
                self._residents[index] = staying
            else:
                self._residents.pop(index, None)
            missing[index] = sorted(kept.values())
        self._publish()
        return missing

    def _is_wasteful(
        self, staying: Sequence[Resident], group: WeightGroup, coming: Iterable[int]
    ) -> bool:
        """Whether the layer in pieces takes more of the device than it would in one: the plan has
        reckoned with one."""
        of = self._parts.backend.footprint.of
        more = sum(align_up(group.weights[i].extent.size_bytes, ALIGNMENT) for i in coming)
        pieces = [resident.size_bytes for resident in staying]
        return bool(more) and sum(map(of, pieces)) + of(more) > of(sum(pieces) + more)

    def _onload(self, plan: Plan, missing: dict[int, list[int]]) -> None:
        parts = self._parts
        self._move_buffers(parts.backend.device)
        coming = []
        if self._base is None:
            self._base = self._resident(parts.inventory.base, parts.base_source)
            coming.append(self._base)
        for index, indices in missing.items():
            if indices:
                part = parts.inventory.layers[index].part(indices)
                resident = self._resident(part, parts.sources[index])
                self._residents.setdefault(index, []).append(resident)
                coming.append(resident)
        self._stage(max(plan.staging_bytes, self._staging_for(coming)))
        for resident in coming:
            resident.onload()
        for resident in coming:
            resident.bind()

    def _resident(self, group: WeightGroup, source: LayerSource) -> Resident:
        self_check = self._parts.config.switches.self_check
        return Resident(group, source, self._parts.backend, self._parts.patches, self_check)

    def _staging_for(self, coming: Sequence[Resident]) -> int:
        """Staging worth having for this load alone; locks that will need its room come later."""
        if sum(resident.unlocked_bytes for resident in coming) < _WORTH_STAGING_BYTES:
            return 0
        room = self._parts.ledger.free_bytes + self.staging_bytes
        room = max(0, min(self._parts.backend.staging_bytes, room))
        return align_down(room, self._parts.backend.staging_unit_bytes)

    def _stage(self, size_bytes: int) -> None:
        if size_bytes == self.staging_bytes:
            return
        self._parts.backend.reserve_staging(0)
        if self._staging is not None:
            self._staging.release()
            self._staging = None
        if size_bytes:
            self._staging = self._parts.ledger.reserve(size_bytes, "staging")
            self._parts.backend.reserve_staging(size_bytes)

    def _move_buffers(self, device: torch.device) -> None:
        root = self._root()
        if root is not None:
            move_buffers(root, device)

    def _publish(self) -> None:
        base = 0
        if self._base is not None:
            base = self._base.size_bytes + self._parts.inventory.buffer_bytes
        layers = [
            self._residents.get(index, []) for index in range(len(self._parts.inventory.layers))
        ]
        self.layer_bytes = tuple(sum(r.group.size_bytes for r in layer) for layer in layers)
        self.resident_bytes = base + sum(r.size_bytes for layer in layers for r in layer)
