"""Courier Budget: the two GiB figures, as a preset or typed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from comfy_api.latest import io

from ...offload_core.values import Budget, ConfigError, gib_to_bytes
from ..default_budget import CARD_HEADROOM_GIB

BudgetType = io.Custom("COURIER_BUDGET")

CUSTOM = "custom"
AUTO = "auto"
_PAIRS = ((6, 16), (8, 16), (8, 32), (12, 32), (16, 32), (16, 64), (24, 64))
PRESETS = {f"{card} GiB card / {ram} GiB RAM": (card, ram) for card, ram in _PAIRS}
CHOICES = (AUTO, *PRESETS, CUSTOM)
EACH, TOGETHER = "each model", "all models together"

_RAM_SHARE = 0.5
"""Of the machine's RAM; the rest is for text encoders, the file cache, and everybody else."""


@dataclass(frozen=True)
class CourierBudget:
    """The value of a COURIER_BUDGET link."""

    budget: Budget
    label: str


def budget_from(
    preset: str, vram_gib: float, host_gib: float, applies_to: str = EACH
) -> CourierBudget:
    """The budget a user chose. Raises: ConfigError naming the field that cannot be meant."""
    refusal = _refusal(preset, applies_to)
    if refusal is not None:
        raise ConfigError(refusal)
    chosen = _figures(preset, vram_gib, host_gib)
    shared = applies_to == TOGETHER and preset != AUTO
    return replace(chosen, budget=replace(chosen.budget, shared=shared))


def _refusal(preset: str | None, applies_to: str | None) -> str | None:
    """Why a choice cannot be meant; None stands for one that is not known yet."""
    if applies_to not in (None, EACH, TOGETHER):
        return f"applies_to is {applies_to!r}; choose {EACH!r} or {TOGETHER!r}"
    if preset is not None and preset not in CHOICES:
        return f"preset is {preset!r}; choose one of {', '.join(CHOICES)}"
    return None


def _figures(preset: str, vram_gib: float, host_gib: float) -> CourierBudget:
    if preset == AUTO:
        return CourierBudget(Budget(), AUTO)
    if preset == CUSTOM:
        device = gib_to_bytes(vram_gib, "vram_gib") or None
        if device is None and vram_gib > 0:
            device = 1  # less than a byte is no budget, and not a budget without a limit
        if isinstance(host_gib, (int, float)) and host_gib < 0 and host_gib != -1:
            raise ConfigError(f"host_gib is {host_gib}; it must be -1 (automatic), 0 or more")
        host = None if host_gib == -1 else gib_to_bytes(host_gib, "host_gib")
        return CourierBudget(Budget(device, host), CUSTOM)
    card, ram = PRESETS[preset]
    return CourierBudget(
        Budget(
            gib_to_bytes(card - CARD_HEADROOM_GIB, "preset"),
            gib_to_bytes(ram * _RAM_SHARE, "preset"),
        ),
        preset,
    )


class CourierBudgetNode(io.ComfyNode):
    """Two figures in, a budget out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierBudget",
            display_name="Courier Budget",
            category="courier",
            description="How much graphics memory and host memory a model may take.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=list(CHOICES),
                    default=AUTO,
                    tooltip="auto lets ComfyUI decide for the card and takes 60 % of the free RAM. "
                    "A machine preset leaves room for the desktop and for other models. "
                    "custom uses the two figures below; the other choices ignore them.",
                ),
                io.Float.Input(
                    "vram_gib",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.001,
                    round=False,
                    tooltip="custom only. GiB of graphics memory for weights, streaming buffers "
                    "and activations together. 0 is automatic.",
                ),
                io.Float.Input(
                    "host_gib",
                    default=-1.0,
                    min=-1.0,
                    max=4096.0,
                    step=0.001,
                    round=False,
                    tooltip="custom only. GiB of host memory that may be page-locked or copied. "
                    "0 locks nothing and streams from the file (what has to be converted is copied "
                    "all the same); -1 is automatic.",
                ),
                io.Combo.Input(
                    "applies_to",
                    options=[EACH, TOGETHER],
                    default=EACH,
                    optional=True,
                    tooltip="Whether each model may take that much, or all models that are loaded "
                    "with such a budget together. Then the least recently used gives way. "
                    "With auto, ComfyUI decides anyway.",
                ),
            ],
            outputs=[BudgetType.Output("budget", tooltip="For a Courier loader.")],
        )

    @classmethod
    def validate_inputs(
        cls, preset: str | None = None, applies_to: str | None = None
    ) -> bool | str:
        """The core compares no choice of a node like this one with its list."""
        return _refusal(preset, applies_to) or True

    @classmethod
    def execute(
        cls, preset: str, vram_gib: float, host_gib: float, applies_to: str = EACH
    ) -> io.NodeOutput:
        return io.NodeOutput(budget_from(preset, vram_gib, host_gib, applies_to))


NODES: list[type[io.ComfyNode]] = [CourierBudgetNode]
