"""What all loaders have in common: an optional budget, and names of files."""

from __future__ import annotations

from comfy_api.latest import io

from ...offload_core.values import Budget, ConfigError
from ..comfyui.files import offered_name
from ..comfyui.host import settings_text
from ..default_budget import default_budget
from ..models.registry import AskedBy
from .budget import BudgetType, CourierBudget


def budget_input() -> io.Input:
    """The last input of every loader."""
    return BudgetType.Input(
        "budget",
        optional=True,
        tooltip="From Courier Budget. Without one, the default of ComfyUI's settings "
        "counts, and that is automatic as long as you set none.",
    )


def chosen_budget(budget: CourierBudget | None) -> tuple[Budget, AskedBy]:
    """The budget that was connected, or that of the settings. Raises: ConfigError."""
    if budget is not None and not isinstance(budget, CourierBudget):
        raise ConfigError(
            f"budget is {type(budget).__name__}; connect a Courier Budget node or leave it open"
        )
    if budget is not None:
        return budget.budget, AskedBy.NODE
    chosen = default_budget(settings_text())
    return chosen, AskedBy.NODE if chosen == Budget() else AskedBy.SETTINGS


def refusal_of_file(name: object, folder: str) -> str | None:
    """Why ``name`` cannot be loaded out of ``folder``; None if it can, or is not known yet.

    In place of the core's own comparison, which knows one system's separator only.
    """
    if name is None or (isinstance(name, str) and offered_name(name, folder) is not None):
        return None
    return f"{name!r} is not a file of models/{folder}"


def refusal_of_choice(name: str, value: object, choices: tuple[str, ...]) -> str | None:
    """The same of a value that has to be one of ``choices``."""
    if value is None or value in choices:
        return None
    return f"{name} is {value!r}; choose one of {', '.join(choices)}"
