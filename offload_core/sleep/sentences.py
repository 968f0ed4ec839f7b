"""What came of an order, in a sentence, and whether it is "ok"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..values import size_text
from .records import Held, ModelReceipt, Receipt

_WORTH_COMPARING_BYTES = 64 << 20
"""Of less than this, the system's count of a process says nothing: others come and go in it."""


def with_result(receipt: Receipt, place: str, is_ram: bool) -> Receipt:
    """The same with its sentence, and no "ok" where nothing came of it.

    Args:
        place: what the sentence calls the device's memory.
        is_ram: it is the host's own.
    """
    changed = [model for model in receipt.models if model.changed]
    if receipt.action == "wake":
        return replace(receipt, ok=True, message=_woken_text(changed, receipt, place, is_ram))
    if not changed:
        asleep = _count([m for m in receipt.models if m.level], "sleeps", "sleep")
        text = f"Nothing was awake: nothing was given back. {asleep}."
        return replace(receipt, ok=True, message=text)
    given, but = _ram_given(changed, receipt) if is_ram else _card_given(changed, receipt, place)
    text = (
        f"{_count(changed, 'sleeps', 'sleep')}: {given} were given back in {receipt.seconds:.2f} s."
    )
    left = [model.name for model in changed if model.after.device_bytes]
    if left:
        but = f"Not all of {place} was: {', '.join(left)}."
    return replace(receipt, ok=not but, message=f"{text} {but}".rstrip())


def _card_given(changed: Sequence[ModelReceipt], receipt: Receipt, place: str) -> tuple[str, str]:
    """What was given back, and what is wrong with that."""
    device = _less(changed, lambda held: held.device_bytes)
    host = max(0, _less(changed, lambda held: held.host_bytes))
    measured = _difference(receipt.before.device_used_bytes, receipt.after.device_used_bytes)
    counted = "" if measured is None else f" (its driver counts {size_text(max(0, measured))})"
    given = f"{size_text(device)} of {place}{counted} and {size_text(host)} held in RAM"
    if measured is not None and device > 0 and measured <= 0:
        return given, "But its driver counts no more free than before."
    return given, ""


def _ram_given(changed: Sequence[ModelReceipt], receipt: Receipt) -> tuple[str, str]:
    """As ``_card_given``. Weights that only go from one place in RAM to another give nothing back,
    and pages of the file that are no longer locked were the system's before and after."""
    ram = max(0, _less(changed, _own_ram))
    unlocked = max(0, _less(changed, lambda held: held.locked_bytes))
    measured = _difference(receipt.before.anon_bytes, receipt.after.anon_bytes)
    given, but = f"{size_text(ram)} of RAM", ""
    if measured is not None and ram >= _WORTH_COMPARING_BYTES:
        given = f"{given} (the system counts {size_text(max(0, measured))})"
        if measured < ram // 2:
            but = "But the process still has most of it."
    return (f"{given} and {size_text(unlocked)} of page locks" if unlocked else given), but


def _woken_text(changed: Sequence[ModelReceipt], receipt: Receipt, place: str, is_ram: bool) -> str:
    if not changed:
        return "Nothing was asleep."
    more = -_less(changed, _own_ram if is_ram else lambda held: held.device_bytes)
    are = _count(changed, "is awake", "are awake")
    return f"{are}: {size_text(max(0, more))} of {place} in {receipt.seconds:.2f} s."


def _own_ram(held: Held) -> int:
    """Of a model whose device is RAM."""
    return held.device_bytes + held.copied_bytes + held.staging_bytes


def _less(changed: Sequence[ModelReceipt], size: Callable[[Held], int]) -> int:
    return sum(size(model.before) - size(model.after) for model in changed)


def _difference(before: int | None, after: int | None) -> int | None:
    """None where nobody counts."""
    return None if before is None or after is None else before - after


def _count(models: Sequence[ModelReceipt], one: str, several: str) -> str:
    return f"1 model {one}" if len(models) == 1 else f"{len(models)} models {several}"
