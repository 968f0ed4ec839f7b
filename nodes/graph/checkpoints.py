"""Load Checkpoint (Courier): the core's loader, with all weights left in the one file."""

from __future__ import annotations

from comfy_api.latest import io

from ..comfyui.files import fingerprint_of, names_in
from ..comfyui.loading import CHECKPOINT_FOLDER, load_checkpoint
from ..comfyui.orders import refusal_of_prompt
from .budget import CourierBudget
from .chosen import budget_input, chosen_budget, refusal_of_file


class CourierLoadCheckpoint(io.ComfyNode):
    """A file name and a budget in, MODEL, CLIP and VAE out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierLoadCheckpoint",
            display_name="Load Checkpoint (Courier)",
            category="courier",
            description="Loads a checkpoint whose layers come to the card one by one, within a "
            "budget. The file is mapped once for its three models, not copied.",
            inputs=[
                io.Combo.Input(
                    "ckpt_name",
                    options=names_in(CHECKPOINT_FOLDER),
                    tooltip="A file of models/checkpoints. safetensors files stay on the disk and "
                    "are mapped; other formats are read into memory.",
                ),
                budget_input(),
            ],
            outputs=[
                io.Model.Output(tooltip="For LoRA loaders, samplers and Courier Status."),
                io.Clip.Output(tooltip="For LoRA loaders and text encoding."),
                io.Vae.Output(tooltip="For decoding and encoding."),
            ],
        )

    @classmethod
    def validate_inputs(cls, ckpt_name: str | None = None) -> bool | str:
        """See ``refusal_of_file``. None: the name comes from another node, unknown so far."""
        return refusal_of_file(ckpt_name, CHECKPOINT_FOLDER) or refusal_of_prompt() or True

    @classmethod
    def fingerprint_inputs(
        cls, ckpt_name: str | None = None, budget: CourierBudget | None = None
    ) -> str:
        """A file that was replaced or rewritten is loaded again, not refused from the cache."""
        return fingerprint_of([ckpt_name], CHECKPOINT_FOLDER) if isinstance(ckpt_name, str) else ""

    @classmethod
    def execute(cls, ckpt_name: str, budget: CourierBudget | None = None) -> io.NodeOutput:
        return io.NodeOutput(*load_checkpoint(ckpt_name, *chosen_budget(budget)))


NODES: list[type[io.ComfyNode]] = [CourierLoadCheckpoint]
