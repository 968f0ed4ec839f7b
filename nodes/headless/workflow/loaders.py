"""Which of the core's loaders Courier has one for, and what else loads models in a workflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .graph import Node
from .schema import Catalog, NodeSchema, is_link

LOADERS: Mapping[str, str] = {
    "UNETLoader": "CourierLoadDiffusionModel",
    "CLIPLoader": "CourierLoadCLIP",
    "DualCLIPLoader": "CourierLoadDualCLIP",
    "TripleCLIPLoader": "CourierLoadTripleCLIP",
    "QuadrupleCLIPLoader": "CourierLoadQuadrupleCLIP",
    "VAELoader": "CourierLoadVAE",
    "CheckpointLoaderSimple": "CourierLoadCheckpoint",
}
"""The core's loaders and ours that take their place: the same inputs and the same outputs."""
_MODELS = {"MODEL", "CLIP", "VAE", "CONTROL_NET", "CLIP_VISION", "MODEL_PATCH"}


def knows_courier(catalog: Catalog) -> bool:
    """Whether that ComfyUI has any loader of Courier's."""
    return any(catalog.get(ours) is not None for ours in LOADERS.values())


def left_alone(nodes: Iterable[Node], catalog: Catalog) -> Iterator[str]:
    """A sentence for each loader that stays ComfyUI's own (or another pack's), with the reason."""
    for node in nodes:
        schema = catalog.get(node.class_type)
        if node.class_type in LOADERS.values() or schema is None:
            continue
        if node.class_type in LOADERS:
            ours = LOADERS[node.class_type]
            yield f"node {node.name} stays as it is: Courier on this ComfyUI has no {ours}"
        elif _loads(node, schema):
            yield f"node {node.name} stays as it is: Courier has no loader like {node.class_type}"


def _loads(node: Node, schema: NodeSchema) -> bool:
    """It gives a model and is given none, as a LoRA's loader is."""
    if _MODELS.isdisjoint(schema.outputs):
        return False
    takes = {schema.inputs[name].type for name in schema.inputs}
    return _MODELS.isdisjoint(takes) and not any(
        is_link(value) and schema.inputs[name].type == "*"
        for name, value in node.inputs.items()
        if name in schema.inputs
    )
