"""Runs in the Python that has comfy-cli, as a program of its own: JSON in, JSON out.

In: {"object_info": {...}, "workflows": [...]}. Out, for each: {"prompt": {...}, "warnings": [...]}
or {"error": "..."}. Imports nothing of ours: its Python need not have it.
"""

import json
import logging
import sys
from typing import Any

_TOLD: list[str] = []


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        _TOLD.append(f"{text} ({type(error).__name__}: {error})" if error else text)


def convert(workflow: Any, object_info: Any, converter: Any) -> dict[str, Any]:
    """One workflow. What the converter only logs (a node that it leaves out) is in the answer."""
    _TOLD.clear()
    try:
        prompt = converter.convert_ui_to_api(workflow, object_info)
    except converter.WorkflowConversionError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"prompt": prompt, "warnings": list(_TOLD)}


def main() -> int:
    """Read, convert, write. 3: there is no comfy-cli, or one that cannot convert."""
    try:
        from comfy_cli import workflow_to_api as converter
    except ImportError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}")
        return 3
    logging.getLogger().handlers = [_Keep(logging.WARNING)]
    asked = json.loads(sys.stdin.buffer.read())
    answers = [convert(w, asked["object_info"], converter) for w in asked["workflows"]]
    sys.stdout.buffer.write(json.dumps(answers).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
