"""comfy-cli's converter, in whichever Python has it. It is no part of ours and runs by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConverterMissingError, WorkflowFileError
from ..text import text_of

PATIENCE_SECONDS = 300.0
PYTHON_VARIABLE = "COURIER_COMFY_CLI_PYTHON"
MISSING_TEXT = (
    "this workflow is as ComfyUI's page saves it, and converting that needs comfy-cli, which is "
    "not installed here: pip install comfy-cli (any environment whose 'comfy' is on the PATH will "
    f"do, or name its Python in {PYTHON_VARIABLE}); or export the workflow from the page with "
    "File > Export (API), which needs nothing"
)
_NO_CONVERTER_STATUS = 3
_LEFT_OUT = "Failed to convert node"
_KNOWS_NO_WIDGETS = "Could not map widget_values for unknown node type"
"""Also of nodes that the server has, and that have none, such as Courier Status: idle then."""
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Converted:
    """One workflow in API form, and what the converter had to say."""

    prompt: dict[str, Any]
    warnings: tuple[str, ...]


def convert_all(
    workflows: Sequence[Mapping[str, Any]], object_info: Mapping[str, Any]
) -> list[Converted | WorkflowFileError]:
    """Each workflow of the saved-UI form, in one process of comfy-cli's.

    Raises: ConverterMissingError; WorkflowFileError where the converter itself breaks.
    """
    request = json.dumps({"object_info": object_info, "workflows": list(workflows)}).encode()
    return [_read(answer, object_info) for answer in json.loads(_run_worker(request))]


def _read(
    answer: Mapping[str, Any], object_info: Mapping[str, Any]
) -> Converted | WorkflowFileError:
    if "error" in answer:
        return WorkflowFileError(f"the workflow cannot be converted: {answer['error']}")
    # A node that it cannot convert is left out, and only logged.
    lost = [text for text in answer["warnings"] if text.startswith(_LEFT_OUT)]
    if lost:
        return WorkflowFileError(f"the workflow cannot be converted: {'; '.join(lost)}")
    told = (text for text in answer["warnings"] if not _is_idle(text, object_info))
    return Converted(answer["prompt"], tuple(told))


def _is_idle(text: str, object_info: Mapping[str, Any]) -> bool:
    named = text.partition(_KNOWS_NO_WIDGETS)[2].partition("'")[2].partition("'")[0]
    return named in object_info


def pythons() -> Iterator[str]:
    """Interpreters that may have comfy-cli, the likeliest first."""
    named = os.environ.get(PYTHON_VARIABLE, "").strip()
    if named:
        yield named
        return  # whoever names one wants that one
    if importlib.util.find_spec("comfy_cli") is not None:
        yield sys.executable
    command = shutil.which("comfy")
    if command is not None:
        # pipx and uv put links on the PATH; the file itself lies beside its Python.
        for folder in (Path(command).resolve().parent, Path(command).parent):
            for name in ("python", "python3", "python.exe"):
                if (folder / name).is_file():
                    yield str(folder / name)


def _run_worker(request: bytes) -> bytes:
    for python in dict.fromkeys(pythons()):
        try:
            done = subprocess.run(
                # -I: neither this folder nor the user's may stand before comfy-cli's own modules.
                [python, "-I", str(_WORKER)],
                input=request,
                capture_output=True,
                timeout=PATIENCE_SECONDS,
                env={**os.environ, "DO_NOT_TRACK": "1"},
            )
        except OSError:
            continue
        except subprocess.TimeoutExpired:
            text = f"comfy-cli's converter did not end within {PATIENCE_SECONDS:.0f} s"
            raise WorkflowFileError(text) from None
        if done.returncode == 0:
            return done.stdout
        if done.returncode != _NO_CONVERTER_STATUS:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise WorkflowFileError(f"comfy-cli's converter failed: {''.join(last)}")
    named = os.environ.get(PYTHON_VARIABLE, "").strip()
    if named:
        text = f"{PYTHON_VARIABLE} is {text_of(named)}, which is no Python that has comfy-cli"
        raise ConverterMissingError(f"{text}; name another, or unset it to have one looked for")
    raise ConverterMissingError(MISSING_TEXT)
