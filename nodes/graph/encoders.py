"""Load CLIP (Courier), and the same for two to four files: the core's loaders, on mapped files."""

from __future__ import annotations

from typing import Any, ClassVar

from comfy_api.latest import io

from ..comfyui.files import fingerprint_of, names_in
from ..comfyui.host import choices_of
from ..comfyui.loading import DEVICES, ENCODER_FOLDER, ENCODER_LOADERS, load_text_encoder
from ..comfyui.orders import refusal_of_prompt
from .chosen import budget_input, chosen_budget, refusal_of_choice, refusal_of_file

_DEFAULT_TYPE = "stable_diffusion"


class CourierLoadCLIP(io.ComfyNode):
    """A file name, a type and a budget in, a CLIP out that any encoder node takes."""

    FILES: ClassVar[tuple[str, ...]] = ("clip_name",)
    TITLE: ClassVar[str] = "Load CLIP (Courier)"
    CORE: ClassVar[str | None] = "CLIPLoader"
    """The core's loader that offers the types; None for one without."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files: list[io.Input] = [
            io.Combo.Input(
                name,
                options=names_in(ENCODER_FOLDER),
                tooltip="A file of models/text_encoders. safetensors files stay on the disk and "
                "are mapped; other formats are read into memory.",
            )
            for name in cls.FILES
        ]
        return io.Schema(
            node_id=ENCODER_LOADERS[len(cls.FILES)],
            display_name=cls.TITLE,
            category="courier",
            description="Loads a text encoder whose layers come to the card one by one, within a "
            "budget. The files are mapped, not copied.",
            inputs=[*files, *cls._choices(), budget_input()],
            outputs=[io.Clip.Output(tooltip="For LoRA loaders, text encoding and Courier Status.")],
        )

    @classmethod
    def _choices(cls) -> list[io.Input]:
        if cls.CORE is None:
            return []
        return [
            io.Combo.Input(
                "type",
                options=list(choices_of(cls.CORE, "type")),
                tooltip="The model that the text is encoded for, as in ComfyUI's own loader.",
            ),
            io.Combo.Input(
                "device",
                options=list(DEVICES),
                optional=True,
                tooltip="cpu encodes on the processor, and takes nothing of the card.",
            ),
        ]

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> bool | str:
        """See ``refusal_of_file``. An input that comes from another node is not known yet."""
        refusals = [refusal_of_file(inputs.get(name), ENCODER_FOLDER) for name in cls.FILES]
        if cls.CORE is not None:
            types = choices_of(cls.CORE, "type")
            refusals += [
                refusal_of_choice("type", inputs.get("type"), types),
                refusal_of_choice("device", inputs.get("device"), DEVICES),
            ]
        return next(filter(None, refusals), None) or refusal_of_prompt() or True

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """A file that was replaced or rewritten is loaded again, not refused from the cache."""
        names = [inputs.get(name) for name in cls.FILES]
        return fingerprint_of((n for n in names if isinstance(n, str)), ENCODER_FOLDER)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        names = [inputs[name] for name in cls.FILES]
        kind, device = inputs.get("type", _DEFAULT_TYPE), inputs.get("device", DEVICES[0])
        budget, by = chosen_budget(inputs.get("budget"))
        return io.NodeOutput(load_text_encoder(names, kind, device, budget, by))


class CourierLoadDualCLIP(CourierLoadCLIP):
    """The same of two files that make one encoder."""

    FILES = ("clip_name1", "clip_name2")
    TITLE = "Load CLIP (Dual, Courier)"
    CORE = "DualCLIPLoader"


class CourierLoadTripleCLIP(CourierLoadCLIP):
    """The same of three."""

    FILES = ("clip_name1", "clip_name2", "clip_name3")
    TITLE = "Load CLIP (Triple, Courier)"
    CORE = None


class CourierLoadQuadrupleCLIP(CourierLoadCLIP):
    """The same of four."""

    FILES = ("clip_name1", "clip_name2", "clip_name3", "clip_name4")
    TITLE = "Load CLIP (Quadruple, Courier)"
    CORE = None


NODES: list[type[io.ComfyNode]] = [
    CourierLoadCLIP,
    CourierLoadDualCLIP,
    CourierLoadTripleCLIP,
    CourierLoadQuadrupleCLIP,
]
