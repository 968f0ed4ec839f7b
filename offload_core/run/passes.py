"""What the passes of a run take beside the weights: measured, and when it is worth asking."""

from __future__ import annotations

from ..device import DeviceBackend

_FIRST, _LATER = 1, 4
"""After the first pass nothing is a guess any more; the later one sees the plan that came of it
under way, without what only a first pass takes."""

_WORTH_GROWING_BYTES = 192 << 20
"""A later pass that takes less than was left by this much shows that the first took more. Smaller
differences are an allocator's, and would come back under the larger plan."""


class PassMeter:
    """The passes of one run after the other.

    Threads: the compute thread; ``peak_bytes`` may be read by any.
    """

    def __init__(self, backend: DeviceBackend, margin_bytes: int) -> None:
        self.peak_bytes: int | None = None
        """The most that a pass of the last run took; None if it was not measured."""
        self._backend = backend
        self._margin_bytes = margin_bytes
        self._recent_bytes: int | None = None
        self._passes = 0
        self._passes_of_plan = 0

    @property
    def need_bytes(self) -> int | None:
        """What to leave for a run like the last, under the plan that it ended with."""
        measured = self._recent_bytes if self._recent_bytes is not None else self.peak_bytes
        if measured is None:
            return None
        return measured + self._margin_bytes

    def may_grow(self, left_bytes: int) -> bool:
        """Whether the plan, which leaves ``left_bytes`` for passes, may take more of the device."""
        if self._passes == _LATER:
            need = self.need_bytes
            return need is not None and need + _WORTH_GROWING_BYTES <= left_bytes
        return self._passes == _FIRST

    def begin(self) -> None:
        """A run begins."""
        # What others left in an allocator's cache would hide what this run takes.
        self._backend.trim()
        self._backend.start_activation_peak()
        self.peak_bytes = self._recent_bytes = None
        self._passes = self._passes_of_plan = 0

    def end_pass(self) -> bool:
        """Count a pass; whether to look at the measurement after it.

        1, 2, 4, 8, ...: what a pass takes changes seldom, and asking costs a little.
        """
        self._passes += 1
        self._passes_of_plan += 1
        return not self._passes & (self._passes - 1)

    def measure(self) -> None:
        """Take the peak since the run or the plan began."""
        peak = self._backend.activation_peak_bytes()
        if peak is not None:
            self._recent_bytes = max(peak, self._recent_bytes or 0)
            self.peak_bytes = max(peak, self.peak_bytes or 0)

    def end(self) -> None:
        """A run ends. Under a plan that no pass has seen yet there is nothing to measure."""
        if self._passes_of_plan or not self._passes:
            self.measure()

    def restart(self) -> None:
        """Another plan is in place: its passes are measured by themselves."""
        self._backend.start_activation_peak()
        self._recent_bytes = None
        self._passes_of_plan = 0
