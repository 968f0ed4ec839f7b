"""What nodes share that act or look rather than compute."""

from __future__ import annotations

import uuid
from typing import Any

from comfy_api.latest import io


class RunsEveryTime(io.ComfyNode):
    """A node that runs in every execution, also when its inputs are those of the last."""

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        """Never the same twice, so that the node runs every time; what is before it does not.

        No NaN: ComfyUI writes this value into the prompt of saved pictures, where NaN is no JSON.
        """
        return uuid.uuid4().hex
