"""A workflow out of a file, a picture or a video: bytes in, one of two forms out."""

from __future__ import annotations

import codecs
import enum
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import WorkflowFileError
from ..text import one_line, some_of, text_of
from .pictures import is_picture, metadata_of
from .videos import video_kind, video_metadata
from .wrappers import Found, wrapped

STANDARD_INPUT = "-"
MAX_JSON_BYTES = 64 << 20
MAX_PICTURE_BYTES = 1 << 30

# The longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ADVICE = (
    "a workflow is a .json that ComfyUI saved or exported (API), or a picture (PNG, WEBP) or a "
    "video (MP4, WEBM) with the workflow in it"
)


class Form(enum.Enum):
    """How a workflow is written down."""

    API = "api"
    """Nodes by their ids, with ``class_type`` and ``inputs``: what ComfyUI runs."""
    UI = "ui"
    """Nodes and links, as ComfyUI's page saves it."""


@dataclass(frozen=True)
class Workflow:
    """A workflow as it was read; nothing in it has been checked but its form.

    Attributes:
        name: of the file, without its ending; for people.
        ui: the saved-UI form, where it came along, for the pictures that a run writes.
    """

    form: Form
    data: dict[str, Any]
    name: str
    ui: dict[str, Any] | None = None


def load_workflow(source: str) -> Workflow:
    """From a path, or from standard input where it is "-".

    Raises: WorkflowFileError with what is wrong and what to do.
    """
    if source == STANDARD_INPUT:
        if sys.stdin is None:
            raise WorkflowFileError("standard input is closed")
        data = sys.stdin.buffer.read(MAX_PICTURE_BYTES + 1)
        return parse_workflow(data, "standard input")
    path = Path(source)
    return parse_workflow(_read(path), path.name)


def parse_workflow(data: bytes, file_name: str) -> Workflow:
    """From the bytes of a file.

    Raises: WorkflowFileError.
    """
    name = file_name.rpartition(".")[0] or file_name
    if is_picture(data):
        return _from_media(metadata_of(data, file_name), file_name, name, "picture")
    if video_kind(data) is not None:
        return _from_media(video_metadata(data, file_name), file_name, name, "video")
    if len(data) > MAX_JSON_BYTES:
        _refuse(file_name, f"has {len(data)} bytes, more than any workflow; {_ADVICE}")
    return _formed(parse_json(data, file_name), file_name, name)


def parse_json(data: bytes, file_name: str) -> Any:
    """JSON in UTF-8, or in what a mark at its beginning says. NaN is read as null, as the page
    does it.

    Raises: WorkflowFileError.
    """
    if not data.strip(b" \t\r\n\0"):
        what = "is empty" if not data else "has nothing but blanks or zeros"
        _refuse(file_name, f"{what} ({len(data)} bytes); {_ADVICE}")
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        return json.loads(data.decode(encoding), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        text = f"is no text in {encoding.removesuffix('-sig').upper()} (byte {error.start})"
        _refuse(file_name, f"{text}; {_ADVICE}")
    except RecursionError:
        _refuse(file_name, f"is nested too deeply to be a workflow; {_ADVICE}")
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        _refuse(file_name, f"is not JSON, or not all of it: {where}; save or download it again")
    except ValueError as error:
        _refuse(file_name, f"is not JSON that can be read: {error}")


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            _refuse(str(path), "is a folder; name a file in it")
        if not path.exists():
            _refuse(str(path), "does not exist")
        if not path.is_file():
            _refuse(str(path), "is no ordinary file; for a pipe, use - and standard input")
        if path.stat().st_size > MAX_PICTURE_BYTES:
            _refuse(str(path), f"has {path.stat().st_size} bytes, more than any workflow")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        _refuse(str(path), f"cannot be read: {reason}")


def _from_media(found: dict[str, bytes], file_name: str, name: str, what: str) -> Workflow:
    ui = parse_json(found["workflow"], file_name) if "workflow" in found else None
    ui = ui if isinstance(ui, dict) else None
    if "prompt" in found:
        # What ran is in both; this one needs no conversion. Where it is too old for a server, the
        # saved one may still fit.
        formed = _formed(parse_json(found["prompt"], file_name), file_name, name)
        return Workflow(formed.form, formed.data, name, ui)
    if ui is None:
        _refuse(file_name, f"is a {what} without a workflow in it; take one that ComfyUI wrote")
    return _formed(ui, file_name, name)


def _formed(value: Any, file_name: str, name: str) -> Workflow:
    if not isinstance(value, dict):
        if isinstance(value, list) and (found := _unwrapped(value, file_name, name)) is not None:
            return found
        kind = "a list" if isinstance(value, list) else "a single value"
        _refuse(file_name, f"is JSON, but {kind} and no workflow; {_ADVICE}")
    if _is_ui(value):
        return Workflow(Form.UI, value, name, value)
    for wrapper in ("prompt", "output"):  # a request to /prompt, or what the page makes of a graph
        inner = value.get(wrapper)
        if _is_prompt(inner) and "nodes" not in value:
            return Workflow(Form.API, inner, name, _ui_beside(value))
    inner = value.get("workflow")
    if isinstance(inner, dict) and _is_ui(inner):
        # Some write the API form beside it, under a name of their own.
        found = _unwrapped(value, file_name, name)
        return found or Workflow(Form.UI, inner, name, inner)
    if not value:
        _refuse(file_name, f"is an empty object: a workflow without nodes; {_ADVICE}")
    if not any(_is_like_node(node) for node in value.values()):
        if (found := _unwrapped(value, file_name, name)) is not None:
            return found
        _refuse(file_name, f"is JSON, but no workflow: nothing in it is a node; {_ADVICE}")
    return Workflow(Form.API, value, name)


def _unwrapped(value: Any, file_name: str, name: str) -> Workflow | None:
    """Out of what a program wrapped around it; None: there is none."""
    found = wrapped(value)
    api, saved = [f for f in found if f.is_api], [f for f in found if not f.is_api]
    several: list[Found] = []
    for item in api or saved:
        if all(item.data != other.data for other in several):
            several.append(item)
    if len(several) > 1:
        where = some_of([".".join(f.path) for f in several], 3)
        _refuse(file_name, f"has {len(several)} workflows in it (at {where}); give it one of them")
    if api:
        return Workflow(Form.API, api[0].data, name, saved[0].data if saved else None)
    return Workflow(Form.UI, saved[0].data, name, saved[0].data) if saved else None


def _is_ui(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("nodes"), list)


def _is_prompt(value: Any) -> bool:
    """Nodes by their ids; malformed ones too, which the check tells of. No wrapper, and no node."""
    if not isinstance(value, dict) or "class_type" in value:
        return False
    return not value or any(_is_like_node(node) for node in value.values())


def _is_like_node(node: Any) -> bool:
    return isinstance(node, dict) and ("class_type" in node or "inputs" in node or not node)


def _ui_beside(value: Mapping[str, Any]) -> dict[str, Any] | None:
    extra = value.get("extra_data")
    info = extra.get("extra_pnginfo") if isinstance(extra, dict) else None
    found = info.get("workflow") if isinstance(info, dict) else value.get("workflow")
    return found if isinstance(found, dict) else None


def _refuse(file_name: str, what: str) -> NoReturn:
    raise WorkflowFileError(f"{one_line(text_of(file_name))} {what}")
