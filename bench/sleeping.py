"""What sleep and wake cost, and what they give back, for one model.

``python3 -m bench.sleeping MODEL``: samples, then puts the model to sleep and wakes it, at both
levels, several times; seconds, the driver's count of the card, RssAnon, whether a run was refused
meanwhile, and whether the next latent is the one of before. ``--core`` has ComfyUI's own loader
load it, ``--dynamic-vram`` with its dynamic VRAM.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import comfy_program
from bench.link import host_copy_rates
from bench.link import measure as measure_link
from bench.one_model import build_parser, loaded_model
from bench.units import GIB, MIB, Latent, gib

LEVELS = (1, 2)
MOST_COPIED_BYTES = 16 * GIB


@dataclass(frozen=True)
class Moment:
    """The machine at one moment, in bytes; None where nobody counts."""

    device_used_bytes: int | None
    anon_bytes: int | None


@dataclass(frozen=True)
class Cycle:
    """One sleep and one wake. ``held_bytes`` is what the model said that it held on the card."""

    level: int
    sleep_seconds: float
    wake_seconds: float
    held_bytes: int
    resident_bytes: int
    awake: Moment
    asleep: Moment
    is_equal: bool
    is_refused: bool

    @property
    def freed_share(self) -> float | None:
        """Of what the model held, by the driver's count."""
        before, after = self.awake.device_used_bytes, self.asleep.device_used_bytes
        if before is None or after is None or not self.held_bytes:
            return None
        return (before - after) / self.held_bytes


class CourierSubject:
    """A model of Courier's, by its engine alone."""

    def __init__(self, model: Any) -> None:
        self._engine = model.courier_engine

    def held_bytes(self) -> tuple[int, int]:
        """(all, resident) on the card."""
        memory = self._engine.snapshot().memory
        return memory.device_bytes, memory.resident_bytes

    def sleep(self, level: int) -> None:
        self._engine.sleep(keep_locks=level == 1)

    def wake(self) -> None:
        self._engine.wake()


class CoreSubject:
    """A model of ComfyUI's own, by an order as the nodes give it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._pack = comfy_program.load_pack()

    def held_bytes(self) -> tuple[int, int]:
        size = int(self._model.loaded_size())
        return size, size

    def sleep(self, level: int) -> None:
        order = self._pack.control.SleepOrder(None, level=level)
        self._check(self._pack.orders.get_orders().sleep_here(order))

    def wake(self) -> None:
        self._check(self._pack.orders.get_orders().wake_here(self._pack.control.WakeOrder(None)))

    def _check(self, receipt: Mapping[str, Any]) -> None:
        if not receipt["ok"]:
            raise comfy_program.ProgramError(str(receipt["message"]))


def measure(model: Any, latent: Latent, steps: int, rounds: int) -> tuple[bool, list[Cycle]]:
    """Whether two runs with no sleep between them are equal, and cycles of both levels in turns."""
    import torch

    from bench.sampling import sample

    want = sample(model, latent, steps).latent
    if not bool(torch.isfinite(want).all()):
        raise comfy_program.ProgramError("the latent is not finite: there is nothing to compare")
    is_repeatable = torch.equal(sample(model, latent, steps).latent, want)
    is_ours = hasattr(model, "courier_engine")
    subject = CourierSubject(model) if is_ours else CoreSubject(model)
    cycles = []
    for level in LEVELS * rounds:
        held, resident = subject.held_bytes()
        awake = moment()
        sleep_seconds = timed(lambda level=level: subject.sleep(level))
        asleep = moment()
        is_refused = refuses(lambda: sample(model, latent, 1))
        wake_seconds = timed(subject.wake)
        is_equal = torch.equal(sample(model, latent, steps).latent, want)
        cycles.append(
            Cycle(
                level,
                sleep_seconds,
                wake_seconds,
                held,
                resident,
                awake,
                asleep,
                is_equal,
                is_refused,
            )
        )
    return is_repeatable, cycles


def timed(work: Callable[[], None]) -> float:
    """Seconds, in what surrounds a node, until the card has done it."""
    started = time.perf_counter()
    with comfy_program.node():
        work()
    settle()
    return time.perf_counter() - started


def refuses(work: Callable[[], Any]) -> bool:
    """Whether it ends in the error of a model that sleeps."""
    try:
        work()
    except comfy_program.load_pack().values.AsleepError:
        return True
    return False


def settle() -> None:
    """Until the card has done all that it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def moment() -> Moment:
    """Now."""
    import torch

    pack = comfy_program.load_pack()
    used = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = total - free
    return Moment(used, pack.host.process_memory().rss_anon_bytes)


def report_lines(
    cycles: Sequence[Cycle],
    link_bytes_per_second: float | None,
    host_bytes_per_second: Mapping[int, float] | None = None,
) -> list[str]:
    """A table, and what to hold a wake against: resident bytes over the rate of page-locked memory,
    and over what the host's own threads copy out of the file's pages."""
    lines = [
        "| level | sleep s | wake s | held, GiB | given back, by driver | RssAnon asleep - awake, "
        "MiB | refused meanwhile | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cycle in cycles:
        share = "-" if cycle.freed_share is None else f"{cycle.freed_share:.1%}"
        anon = "-"
        if cycle.asleep.anon_bytes is not None and cycle.awake.anon_bytes is not None:
            anon = f"{(cycle.asleep.anon_bytes - cycle.awake.anon_bytes) / MIB:.0f}"
        refused, equal = ("yes" if good else "NO" for good in (cycle.is_refused, cycle.is_equal))
        lines.append(
            f"| {cycle.level} | {cycle.sleep_seconds:.3f} | {cycle.wake_seconds:.3f} "
            f"| {gib(cycle.held_bytes)} | {share} | {anon} | {refused} | {equal} |"
        )
    if link_bytes_per_second and cycles:
        floor = cycles[0].resident_bytes / link_bytes_per_second
        lines += [
            "",
            f"resident bytes over the link ({link_bytes_per_second / 1e9:.1f} GB/s): {floor:.3f} s",
        ]
    if host_bytes_per_second and cycles:
        lines += [
            f"resident bytes through memmove by {threads} threads ({rate / 1e9:.1f} GB/s): "
            f"{cycles[0].resident_bytes / rate:.3f} s"
            for threads, rate in host_bytes_per_second.items()
        ]
    return lines


def host_rates(model_file: Path) -> dict[int, float]:
    """Of copies out of the file's pages, by the number of threads; none of a file that cannot be
    mapped."""
    pack = comfy_program.load_pack()
    try:
        mapping = pack.host.open_mapping(model_file)
    except pack.values.CourierError:
        return {}
    size = min(mapping.header.identity.size_bytes, MOST_COPIED_BYTES)
    return host_copy_rates(mapping.base_address, size)


def left_lines(cycles: Sequence[Cycle], without: Moment) -> list[str]:
    """What RAM a model that sleeps at level 2 keeps: against the process once it is let go."""
    asleep = [cycle.asleep.anon_bytes for cycle in cycles if cycle.level == LEVELS[-1]]
    if not asleep or asleep[-1] is None or without.anon_bytes is None:
        return []
    more = (asleep[-1] - without.anon_bytes) / MIB
    return [f"RssAnon asleep at level 2, beyond that without the model: {more:.0f} MiB"]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked."""
    parser = build_parser("bench.sleeping", __doc__, steps=3, rounds=3)
    parser.add_argument("--core", action="store_true", help="ComfyUI's own loader")
    parser.add_argument(
        "--dynamic-vram",
        action="store_true",
        help="with its dynamic VRAM, in a ComfyUI that has it",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it and print the table."""
    options = parse(arguments)
    by_core = options.core or options.dynamic_vram
    with loaded_model(options, by_core, options.dynamic_vram) as model:
        print(f"{type(model).__name__}", flush=True)
        link = measure_link().get("link_bytes_per_second")
        host = host_rates(options.model)
        is_repeatable, cycles = measure(model, options.latent, options.steps, options.rounds)
        del model
        comfy_program.let_go()
        without = moment()
    lines = [*report_lines(cycles, link, host), *left_lines(cycles, without)]
    lines.append(
        f"two runs with no sleep between them: {'equal' if is_repeatable else 'NOT equal'}"
    )
    print("\n".join(lines), flush=True)
    return 0 if all(cycle.is_equal and cycle.is_refused for cycle in cycles) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
