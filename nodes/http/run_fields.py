"""Fields of a body that are no choice: switches, numbers, names, documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bodies import is_text, kind_text, refuse_field


@dataclass(frozen=True)
class Flag:
    """``true`` or ``false``, and nothing that may be taken for one."""

    name: str
    default: bool
    doc: str
    required: bool = False

    def read(self, value: Any) -> bool:
        """Raises: RefusedError (400)."""
        if not isinstance(value, bool):
            refuse_field(self.name, f"has to be true or false, not {kind_text(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        return {"type": "boolean", "default": self.default, "description": self.doc}


@dataclass(frozen=True)
class Seconds:
    """A time above 0 and up to ``maximum``, or ``null``: none."""

    name: str
    maximum: float
    doc: str
    default: None = None
    required: bool = False

    def read(self, value: Any) -> float | None:
        """Raises: RefusedError (400)."""
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= self.maximum:
            wanted = f"has to be a number above 0 and up to {self.maximum:g}, or null"
            refuse_field(self.name, f"{wanted}, not {kind_text(value)}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        return {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "maximum": self.maximum,
            "default": None,
            "description": self.doc,
        }


@dataclass(frozen=True)
class Name:
    """A text for people, on one line; or ``null``: none."""

    name: str
    longest: int
    doc: str
    default: None = None
    required: bool = False

    def read(self, value: Any) -> str | None:
        """Raises: RefusedError (400)."""
        if value is None:
            return None
        if not isinstance(value, str):
            refuse_field(self.name, f"has to be a string or null, not {kind_text(value)}")
        if not 1 <= len(value) <= self.longest or not is_text(value):
            refuse_field(self.name, f"is not 1 to {self.longest} characters")
        return "".join(c if c.isprintable() else "?" for c in value)

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        return {
            "type": ["string", "null"],
            "minLength": 1,
            "maxLength": self.longest,
            "default": None,
            "description": self.doc,
        }


DEEPEST = 100
"""Levels of lists and objects within each other. ComfyUI copies what it queues, level by level, in
the one thread that runs prompts; far deeper, and that thread ends."""


@dataclass(frozen=True)
class Document:
    """A JSON object; what is in it is somebody else's to check, but for how deep it is. Where it is
    not required, ``null`` and left out are the same."""

    name: str
    doc: str
    default: None = None
    required: bool = False

    def read(self, value: Any) -> dict[str, Any] | None:
        """Raises: RefusedError (400)."""
        if value is None and not self.required:
            return None
        if not isinstance(value, dict):
            refuse_field(self.name, f"has to be an object, not {kind_text(value)}")
        if self.required and not value:
            refuse_field(self.name, "is empty")
        if is_deeper_than(value, DEEPEST):
            refuse_field(self.name, f"has more than {DEEPEST} levels of lists and objects")
        return value

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        if self.required:
            return {"type": "object", "minProperties": 1, "description": self.doc}
        return {"type": ["object", "null"], "default": None, "description": self.doc}


def is_deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and objects are within each other more than so often."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not layer:
            return False
    return True
