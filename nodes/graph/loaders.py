"""Load Diffusion Model (Courier): the core's loader, with the weights left in the file."""

from __future__ import annotations

from comfy_api.latest import io

from ...offload_core.values import Budget, ConfigError
from ..comfyui.host import settings_text
from ..comfyui.loading import (
    WEIGHT_DTYPES,
    diffusion_model_names,
    file_fingerprint,
    load_diffusion_model,
    offered_name,
)
from ..comfyui.orders import refusal_of_prompt
from ..default_budget import default_budget
from ..models.registry import AskedBy
from .budget import BudgetType, CourierBudget


class CourierLoadDiffusionModel(io.ComfyNode):
    """A file name and a budget in, a MODEL out that any sampler takes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierLoadDiffusionModel",
            display_name="Load Diffusion Model (Courier)",
            category="courier",
            description="Loads a diffusion model whose layers come to the card one by one, within "
            "a budget. The file is mapped, not copied.",
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=diffusion_model_names(),
                    tooltip="A file of models/diffusion_models. safetensors files stay on the "
                    "disk and are mapped; other formats are read into memory.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    tooltip="default keeps the file's own type, which needs no copy. An fp8 type "
                    "of a wider file converts it in memory, against the host budget.",
                ),
                BudgetType.Input(
                    "budget",
                    optional=True,
                    tooltip="From Courier Budget. Without one, the default of ComfyUI's settings "
                    "counts, and that is automatic as long as you set none.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="For LoRA loaders, samplers and Courier Status.")],
        )

    @classmethod
    def validate_inputs(
        cls, unet_name: str | None = None, weight_dtype: str | None = None
    ) -> bool | str:
        """In place of the core's own comparison, which knows one system's separator only.

        None: the name comes from another node and is not known yet.
        """
        if unet_name is not None and (
            not isinstance(unet_name, str) or offered_name(unet_name) is None
        ):
            return f"{unet_name!r} is not a file of models/diffusion_models"
        if weight_dtype is not None and weight_dtype not in WEIGHT_DTYPES:
            return f"weight_dtype is {weight_dtype!r}; choose one of {', '.join(WEIGHT_DTYPES)}"
        return refusal_of_prompt() or True

    @classmethod
    def fingerprint_inputs(
        cls,
        unet_name: str | None = None,
        weight_dtype: str | None = None,
        budget: CourierBudget | None = None,
    ) -> str:
        """A file that was replaced or rewritten is loaded again, not refused from the cache."""
        return file_fingerprint(unet_name) if isinstance(unet_name, str) else ""

    @classmethod
    def execute(
        cls, unet_name: str, weight_dtype: str, budget: CourierBudget | None = None
    ) -> io.NodeOutput:
        if budget is not None and not isinstance(budget, CourierBudget):
            raise ConfigError(
                f"budget is {type(budget).__name__}; connect a Courier Budget node or leave it open"
            )
        if budget is not None:
            return io.NodeOutput(load_diffusion_model(unet_name, weight_dtype, budget.budget))
        chosen = default_budget(settings_text())
        by = AskedBy.NODE if chosen == Budget() else AskedBy.SETTINGS
        return io.NodeOutput(load_diffusion_model(unet_name, weight_dtype, chosen, by))


NODES: list[type[io.ComfyNode]] = [CourierLoadDiffusionModel]
