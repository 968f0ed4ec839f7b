"""Load Diffusion Model (Courier): the core's loader, with the weights left in the file."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.files import fingerprint_of, names_in
from ..comfyui.loading import WEIGHT_DTYPES, load_diffusion_model
from ..comfyui.orders import refusal_of_prompt
from .budget import CourierBudget
from .chosen import budget_input, chosen_budget, refusal_of_choice, refusal_of_file

_FOLDER = "diffusion_models"


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
                    options=names_in(_FOLDER),
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
                budget_input(),
            ],
            outputs=[io.Model.Output(tooltip="For LoRA loaders, samplers and Courier Status.")],
        )

    @classmethod
    def validate_inputs(
        cls, unet_name: str | None = None, weight_dtype: str | None = None
    ) -> bool | str:
        """See ``refusal_of_file``. None: the name comes from another node, unknown so far."""
        return (
            refusal_of_file(unet_name, _FOLDER)
            or refusal_of_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
            or refusal_of_prompt()
            or True
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        unet_name: str | None = None,
        weight_dtype: str | None = None,
        budget: CourierBudget | None = None,
    ) -> str:
        """A file that was replaced or rewritten is loaded again, not refused from the cache."""
        return fingerprint_of([unet_name], _FOLDER) if isinstance(unet_name, str) else ""

    @classmethod
    def execute(
        cls, unet_name: str, weight_dtype: str, budget: CourierBudget | None = None
    ) -> io.NodeOutput:
        return io.NodeOutput(load_diffusion_model(unet_name, weight_dtype, *chosen_budget(budget)))


NODES: list[type[io.ComfyNode]] = [CourierLoadDiffusionModel]
