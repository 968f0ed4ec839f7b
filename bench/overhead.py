"""What watching a run costs, and what planning costs.

``python3 -m bench.overhead MODEL``: the steady step with the status read ten times a second, as
the HTTP route reads it, and with the events that a panel is sent, against the step without; and the
seconds of ``engine.plan`` for a module of many small tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench import comfy_program
from bench.one_model import build_parser, loaded_model
from bench.records import steady
from bench.units import Latent

POLL_SECONDS = 0.1
PLAN_REPEATS = 5
BLOCKS = 200
TENSORS_A_BLOCK = 50
TENSOR_ITEMS = 64


@dataclass(frozen=True)
class Overhead:
    """Steady seconds by round, how often and how long the status was read, and how many events
    were made."""

    polled: Sequence[float]
    unpolled: Sequence[float]
    polls: int
    poll_seconds: float
    events: int = 0

    @property
    def ratio(self) -> float:
        """Of the medians; above 1 the reader slows the run."""
        return statistics.median(self.polled) / statistics.median(self.unpolled)


class StatusPoll:
    """Reads the whole status as JSON ten times a second, and has the feed of events look as often
    as it wants to, from a thread each. Events end as JSON, for a listener that is always there.

    Threads: the counts are read after ``polling`` has ended.
    """

    def __init__(self, pack: comfy_program.Pack) -> None:
        self.polls = 0
        self.seconds = 0.0
        self.events = 0
        self._pack = pack

    @contextmanager
    def polling(self) -> Iterator[None]:
        ended = threading.Event()
        threads = [
            threading.Thread(target=work, args=(ended,), name=f"bench-{work.__name__}")
            for work in (self._poll, self._feed)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def _poll(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_SECONDS):
            started = time.perf_counter()
            record = self._pack.service.get_service().status()
            json.dumps(self._pack.wire.status_json(record))
            self.seconds += time.perf_counter() - started
            self.polls += 1

    def _feed(self, ended: threading.Event) -> None:
        feed = self._pack.events.Feed(self._pack.event_source.read, lambda: True, self._send)
        seconds = 0.0
        while not ended.wait(seconds):
            seconds = feed.look(time.monotonic(), begins=True)

    def _send(self, body: dict[str, Any]) -> None:
        json.dumps(body)
        self.events += 1


def measure_polling(model: Any, latent: Latent, steps: int, rounds: int) -> Overhead:
    """Alternating, so that a drift of the clocks falls on both alike."""
    from bench.sampling import sample

    poll = StatusPoll(comfy_program.load_pack())
    sample(model, latent, steps)  # the first run loads, and measures the activations
    polled, unpolled = [], []
    for _ in range(rounds):
        unpolled.append(steady(sample(model, latent, steps).step_seconds))
        with poll.polling():
            polled.append(steady(sample(model, latent, steps).step_seconds))
    return Overhead(polled, unpolled, poll.polls, poll.seconds, poll.events)


def many_tensors(blocks: int, tensors: int) -> Any:
    """A module with a list of ``blocks``, each with ``tensors`` small parameters."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(tensors):
                weight = torch.nn.Parameter(torch.zeros(TENSOR_ITEMS), requires_grad=False)
                self.register_parameter(f"weight_{index}", weight)

    root = torch.nn.Module()
    root.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
    return root


def measure_plan(blocks: int = BLOCKS, tensors: int = TENSORS_A_BLOCK) -> float:
    """Best of five ``engine.plan`` with a third of the blocks resident, in seconds."""
    import torch

    pack = comfy_program.load_pack()
    root = many_tensors(blocks, tensors)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    engine = pack.run.attach(root, pack.device.backend_for(torch.device(kind)), name="many")
    try:
        resident = engine.plan(pack.values.Budget(None, 0)).device_bytes
        budget = pack.values.Budget(resident // 3, 0)
        return min(_seconds(lambda: engine.plan(budget)) for _ in range(PLAN_REPEATS))
    finally:
        engine.detach()


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report_lines(overhead: Overhead, plan_seconds: float) -> list[str]:
    each = overhead.poll_seconds / overhead.polls * 1000 if overhead.polls else 0.0
    rounds = zip(overhead.unpolled, overhead.polled, strict=True)
    return [
        "| round | s/step, not polled | s/step, polled |",
        "|---|---|---|",
        *(f"| {n} | {b:.4f} | {a:.4f} |" for n, (b, a) in enumerate(rounds, start=1)),
        "",
        f"Status read {overhead.polls} times ({each:.1f} ms each) and {overhead.events} events: "
        "the steady step is "
        f"{overhead.ratio:.3f} times the one without.",
        f"plan for {BLOCKS * TENSORS_A_BLOCK} tensors in {BLOCKS} layers: "
        f"{plan_seconds * 1000:.1f} ms, best of {PLAN_REPEATS}.",
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked."""
    return build_parser("bench.overhead", __doc__, steps=10, rounds=4).parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it and print the table."""
    options = parse(arguments)
    with loaded_model(options) as model:
        overhead = measure_polling(model, options.latent, options.steps, options.rounds)
        lines = report_lines(overhead, measure_plan())
    print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
