"""Sleep Model and Wake Model: the card for somebody else, at their place in the workflow."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from comfy_api.latest import io, ui

from ..comfyui.orders import get_orders, id_of, refusal_of_prompt, show_progress
from ..requests.records import ControlError, OnUse, SleepOrder, WakeOrder, When
from .every_time import RunsEveryTime

LATER = (
    "All models are put to sleep when nothing runs any more. GET /courier/v1/models has the "
    "receipt then, as last_order."
)
_ORDERS = frozenset({"CourierSleepModel", "CourierWakeModel", "CourierStatus"})
_LOG = logging.getLogger("courier")
_MODEL_TOOLTIP = "A MODEL, CLIP, VAE or CONTROL_NET, of Courier or of ComfyUI's own loaders."


def _models(model: Any, node: str) -> tuple[str, ...] | None:
    """The ids that an order is for; None: all. Raises: ControlError."""
    if model is None:
        return None
    model_id = id_of(model)
    if model_id is None:
        raise ControlError(
            f"{node}: what is connected to 'model' is a {type(model).__name__}, which holds no "
            "model; connect a MODEL, CLIP, VAE or CONTROL_NET, or nothing for all"
        )
    return (model_id,)


def _inputs(without_link: str) -> list[io.Input]:
    return [
        io.AnyType.Input("model", optional=True, tooltip=f"{_MODEL_TOOLTIP} {without_link}"),
        io.AnyType.Input(
            "anything",
            optional=True,
            tooltip="Connect anything: the node runs once this has arrived, and passes it on.",
        ),
    ]


def _outputs() -> list[io.Output]:
    return [
        io.AnyType.Output("passed_on", display_name="anything", tooltip="What came in, unchanged."),
        io.AnyType.Output("passed_model", display_name="model", tooltip="The model, unchanged."),
        io.String.Output("text", display_name="text", tooltip="What was done, in a sentence."),
        io.String.Output("json", display_name="json", tooltip="The receipt, as HTTP gives it."),
    ]


def _output(receipt: dict[str, Any], model: Any, anything: Any) -> io.NodeOutput:
    text = "\n".join([receipt["message"], *_lines(receipt)])
    body = json.dumps(receipt, allow_nan=False)
    return io.NodeOutput(anything, model, text, body, ui=ui.PreviewText(text))


def _lines(receipt: dict[str, Any]) -> list[str]:
    lines = []
    for model in receipt["models"]:
        lines.append(f"- {model['name']} ({model['kind']}): {model['state']}")
        lines.extend(f"    kept: {reason}" for reason in model["kept"])
    return lines


def _does_more(prompt: Any) -> bool:
    """Whether a workflow has nodes besides ours that order and look."""
    if not isinstance(prompt, dict):
        return False
    return any(entry.get("class_type") not in _ORDERS for entry in prompt.values())


def _sleep_later(order: SleepOrder) -> None:
    def carry_out() -> None:
        try:
            receipt = get_orders().sleep(order)
        except ControlError as error:
            _LOG.error("Sleep Model: %s", error)
        else:
            _LOG.info("Sleep Model: %s", receipt["message"])

    # A daemon: it must not keep ComfyUI from ending.
    threading.Thread(target=carry_out, name="courier-sleep-later", daemon=True).start()


class CourierSleepModel(RunsEveryTime):
    """Puts one model, or all, to sleep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierSleepModel",
            display_name="Sleep Model",
            category="courier",
            description=(
                "Takes a model, or all of them, off the card until they are woken. Nothing is "
                "unloaded from the workflow: the loader does not run again. Without any link it "
                "comes last, when nothing runs any more."
            ),
            inputs=[
                *_inputs(
                    "Without a link: all. With one, connect 'anything' too, or the node runs "
                    "before the model is used."
                ),
                io.Int.Input(
                    "level",
                    default=1,
                    min=1,
                    max=2,
                    tooltip="1 keeps what the model holds in RAM, so that it wakes fastest. 2 "
                    "gives back everything that its file can give again.",
                ),
                io.Combo.Input(
                    "on_use",
                    options=[choice.value for choice in OnUse],
                    default=OnUse.REFUSE.value,
                    tooltip="What a node finds that needs the model while it sleeps: an error that "
                    "says so (refuse), or the model, woken first (wake).",
                ),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.prompt],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, on_use: str | None = None) -> bool | str:
        """Without links this node would be a workflow of its own to ComfyUI, and run although the
        rest was refused because a model sleeps."""
        choices = [choice.value for choice in OnUse]
        if on_use is not None and on_use not in choices:
            return f"on_use is {on_use!r}; choose one of {', '.join(choices)}"
        return refusal_of_prompt() or True

    @classmethod
    def execute(
        cls,
        level: int = 1,
        on_use: str = OnUse.REFUSE.value,
        model: Any = None,
        anything: Any = None,
    ) -> io.NodeOutput:
        chosen = OnUse(on_use)
        if model is None and anything is None and _does_more(cls.hidden.prompt):
            # ComfyUI runs an output node without links first of all, and what it is meant to do
            # here is to come last.
            _sleep_later(SleepOrder(None, level, When.IDLE, chosen))
            return _output({"message": LATER, "models": []}, model, anything)
        order = SleepOrder(_models(model, "Sleep Model"), level, on_use=chosen)
        return _output(get_orders().sleep_here(order, show_progress), model, anything)


class CourierWakeModel(RunsEveryTime):
    """Wakes one model, or all that sleep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CourierWakeModel",
            display_name="Wake Model",
            category="courier",
            description="Brings a model that sleeps, or all that do, back to the card. It has to "
            "be in the workflow whose loaders made them; without links it runs first.",
            inputs=_inputs("Without a link: all that sleep."),
            outputs=_outputs(),
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any = None, anything: Any = None) -> io.NodeOutput:
        order = WakeOrder(_models(model, "Wake Model"))
        return _output(get_orders().wake_here(order, show_progress), model, anything)


NODES: list[type[io.ComfyNode]] = [CourierSleepModel, CourierWakeModel]
