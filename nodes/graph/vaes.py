"""Load VAE (Courier): the core's loader, with the weights left in the file."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.files import fingerprint_of_paths
from ..comfyui.loading import load_vae
from ..comfyui.orders import refusal_of_prompt
from ..comfyui.vaes import offered_vae, vae_names, vae_paths
from .budget import CourierBudget
from .chosen import budget_input, chosen_budget


class CourierLoadVAE(io.ComfyNode):
    """A file name and a budget in, a VAE out that any node takes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierLoadVAE",
            display_name="Load VAE (Courier)",
            category="courier",
            description="Loads a VAE within a budget: all of it on the card while it works, where "
            "the budget holds it. The file is mapped, not copied.",
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=vae_names(),
                    tooltip="A file of models/vae, or one of the small ones of models/vae_approx. "
                    "safetensors files stay on the disk and are mapped; others are read into "
                    "memory.",
                ),
                budget_input(),
            ],
            outputs=[io.Vae.Output(tooltip="For decoding, encoding and Courier Status.")],
        )

    @classmethod
    def validate_inputs(cls, vae_name: str | None = None) -> bool | str:
        """None: the name comes from another node, unknown so far."""
        if vae_name is not None and (
            not isinstance(vae_name, str) or offered_vae(vae_name) is None
        ):
            return f"{vae_name!r} is not a file of models/vae"
        return refusal_of_prompt() or True

    @classmethod
    def fingerprint_inputs(
        cls, vae_name: str | None = None, budget: CourierBudget | None = None
    ) -> str:
        """A file that was replaced or rewritten is loaded again, not refused from the cache."""
        known = offered_vae(vae_name) if isinstance(vae_name, str) else None
        return "" if known is None else fingerprint_of_paths(vae_paths(known))

    @classmethod
    def execute(cls, vae_name: str, budget: CourierBudget | None = None) -> io.NodeOutput:
        return io.NodeOutput(load_vae(vae_name, *chosen_budget(budget)))


NODES: list[type[io.ComfyNode]] = [CourierLoadVAE]
