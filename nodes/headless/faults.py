"""One thing that is wrong with a workflow."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class FaultKind(enum.Enum):
    """What it is. The values are for programs and stay as they are."""

    MALFORMED = "malformed_node"
    MISSING_CLASS = "missing_class"
    MISSING_MODEL = "missing_model"
    MISSING_FILE = "missing_file"
    MISSING_INPUT = "missing_input"
    BAD_LINK = "bad_link"
    BAD_VALUE = "bad_value"
    CYCLE = "cycle"
    NO_OUTPUT = "no_output"


@dataclass(frozen=True)
class Fault:
    """``message`` says it in words, with what would do instead."""

    kind: FaultKind
    message: str
    node_id: str | None = None
    class_type: str | None = None
    title: str | None = None
    input: str | None = None
    nearest: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.node_id is None:
            return self.message
        return f"node {self.node_id} ({self.name}): {self.message}"

    @property
    def name(self) -> str:
        """The class, and the title where it is another."""
        kind = self.class_type or "no class"
        return kind if self.title in (None, "", kind) else f"{kind} {self.title!r}"

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "kind": self.kind.value,
            "message": self.message,
            "node": self.node_id,
            "class_type": self.class_type,
            "title": self.title,
            "input": self.input,
            "nearest": list(self.nearest),
        }
