"""Workflows out of whatever people have: files, encodings, wrappers, pictures; and what is none."""

from __future__ import annotations

import codecs
import io
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..conftest import Headless, prompt

UI: dict[str, Any] = {"nodes": [{"id": 1, "type": "SaveImage"}], "links": [], "version": 0.4}
CJK = {"1": {"class_type": "Text", "inputs": {"text": "一只猫 🐎 ä"}}}


@pytest.fixture
def load(headless: Headless) -> Any:
    return headless.module("workflow.load")


@pytest.mark.parametrize("encoding", [
    "utf-8", "utf-8-sig", "utf-16", "utf-32",
    pytest.param("utf-16-be", id="utf-16 of a big-endian machine"),
])  # fmt: skip
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_every_mark_and_every_line_end_is_read(load: Any, encoding: str, line_end: str) -> None:
    text = json.dumps(CJK, indent=1, ensure_ascii=False).replace("\n", line_end)
    data = text.encode(encoding)
    if encoding == "utf-16-be":
        data = codecs.BOM_UTF16_BE + data
    workflow = load.parse_workflow(data, "a.json")
    assert (workflow.form, workflow.data, workflow.name) == (load.Form.API, CJK, "a")


def test_nan_is_null_as_in_the_page(load: Any) -> None:
    data = b'{"1": {"class_type": "X", "inputs": {"a": NaN, "b": -Infinity}}}'
    assert load.parse_workflow(data, "a.json").data["1"]["inputs"] == {"a": None, "b": None}


@pytest.mark.parametrize(("value", "form", "has_ui"), [
    (prompt(), "API", False),
    ({"prompt": prompt(), "client_id": "x"}, "API", False),
    ({"prompt": prompt(), "extra_data": {"extra_pnginfo": {"workflow": UI}}}, "API", True),
    ({"output": prompt(), "workflow": UI}, "API", True),
    (UI, "UI", True),
    ({"workflow": UI}, "UI", True),
    ({"input": {"workflow": prompt(), "images": [{"name": "a.png"}]}}, "API", False),
    ({"input": {"workflow_json": json.dumps(prompt())}, "id": "job"}, "API", False),
    ({"input": {"prompt": UI}}, "UI", True),
    ({"client_id": "x", "prompt": json.dumps(prompt())}, "API", False),
    ({"workflow": UI, "workflow_api": prompt()}, "API", True),
    ({"5b0c": {"prompt": [3, "5b0c", prompt(), {"extra_pnginfo": {"workflow": UI}}, ["7"]],
               "outputs": {"7": {"images": []}}, "status": {}}}, "API", True),
    ([3, "5b0c", prompt(), {"client_id": "y"}, ["7"]], "API", False),
    ({"a": {"prompt": [1, "a", prompt(), {}, []]}, "b": {"prompt": [2, "b", prompt(), {}, []]}},
     "API", False),
])  # fmt: skip
def test_forms_and_their_wrappers(load: Any, value: Any, form: str, has_ui: bool) -> None:
    workflow = load.parse_workflow(json.dumps(value).encode(), "a.json")
    assert workflow.form.name == form
    assert workflow.data == (prompt() if form == "API" else UI)
    assert workflow.ui == (UI if has_ui else None)


# Pictures, written as ComfyUI writes them


def png(prompt_text: str | None, workflow: str | None, kind: str = "tEXt") -> bytes:
    metadata = PngInfo()
    for key, text in (("prompt", prompt_text), ("workflow", workflow)):
        if text is not None and kind == "iTXt":
            metadata.add_itxt(key, text, zip=True)
        elif text is not None:
            metadata.add_text(key, text, zip=kind == "zTXt")
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=metadata)
    return file.getvalue()


def webp(prompt_text: str | None, workflow: str | None) -> bytes:
    image = Image.new("RGB", (8, 8))
    exif = image.getexif()
    if prompt_text is not None:
        exif[0x0110] = f"prompt:{prompt_text}"
    if workflow is not None:
        exif[0x010F] = f"workflow:{workflow}"
    file = io.BytesIO()
    image.save(file, "WEBP", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["tEXt", "zTXt", "iTXt", "webp"])
def test_a_picture_gives_what_ran_and_keeps_the_saved_form(load: Any, kind: str) -> None:
    texts = json.dumps(CJK), json.dumps(UI)
    data = webp(*texts) if kind == "webp" else png(*texts, kind)
    workflow = load.parse_workflow(data, "a.png")
    assert (workflow.form, workflow.data, workflow.ui) == (load.Form.API, CJK, UI)


@pytest.mark.parametrize("write", [png, webp])
def test_a_picture_with_the_saved_form_alone(load: Any, write: Any) -> None:
    workflow = load.parse_workflow(write(None, json.dumps(UI)), "a.png")
    assert (workflow.form, workflow.data) == (load.Form.UI, UI)


def test_text_that_is_no_ascii_is_read_in_either_way(load: Any) -> None:
    text = json.dumps({"1": {"class_type": "Ä", "inputs": {}}}, ensure_ascii=False)
    for body in (text.encode("latin-1"), text.encode()):
        chunk = b"tEXt" + b"prompt\0" + body
        data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk) - 4) + chunk
        data += struct.pack(">I", zlib.crc32(chunk))
        assert load.parse_workflow(data, "a.png").data["1"]["class_type"] == "Ä"


# What is none: one sentence each, with the file's name and what to do


def picture_that_inflates() -> bytes:
    packed = zlib.compress(b"0" * (65 << 20))
    chunk = b"zTXtprompt\0\0" + packed
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk) - 4)
    return head + chunk + struct.pack(">I", zlib.crc32(chunk))


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "is empty (0 bytes)"),
    "blanks": (b" \n\t ", "has nothing but blanks or zeros (4 bytes)"),
    "zeros": (b"\0" * 100, "has nothing but blanks or zeros (100 bytes)"),
    "cut short": (json.dumps(prompt()).encode()[:-40], "is not JSON, or not all of it"),
    "two values": (b"{}{}", "is not JSON, or not all of it"),
    "latin-1": ('{"1": "\xe4"}'.encode("latin-1"), "is no text in UTF-8 (byte 7)"),
    "half a utf-16": ('{"1": 2}'.encode("utf-16")[:-1], "is no text in UTF-16"),
    "a program": (b"\x7fELF\x02\x01\x01" + bytes(range(256)), "is no text in UTF-8"),
    "a page": (b"<!DOCTYPE html><html></html>", "is not JSON"),
    "a list": (b"[1, 2]", "but a list and no workflow"),
    "null": (b"null", "but a single value"),
    "a number": (b"7", "but a single value"),
    "too deep": (b"[" * 100_000, "nested too deeply"),
    "a long number": (b'{"1": ' + b"9" * 5000 + b"}", "is not JSON that can be read"),
    "empty object": (b"{}", "a workflow without nodes"),
    "settings": (b'{"theme": "dark", "size": 3}', "nothing in it is a node"),
    "too long": (b" " * ((64 << 20) + 1) + b"x", "more than any workflow"),
    "jpeg": (b"\xff\xd8\xff\xe0" + b"0" * 100, "is a JPEG"),
    "gif": (b"GIF89a" + b"0" * 100, "is a GIF"),
    "picture without": (png(None, None), "a picture without a workflow"),
    "webp without": (webp(None, None), "a picture without a workflow"),
    "picture cut short": (png(json.dumps(CJK), None)[:60], "damaged picture"),
    "picture with a flipped bit": (
        png(json.dumps(CJK), None).replace(b"class_type", b"claSs_type"), "damaged picture",
    ),
    "picture with bad zip": (
        png(json.dumps(CJK), None, "zTXt").replace(b"prompt\0\0x", b"prompt\0\0y"),
        "damaged picture",
    ),
    "picture that inflates": (picture_that_inflates, "damaged picture"),
    "picture with half a workflow": (png('{"1": ', None), "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_workflow_is_said_in_one_sentence(
    headless: Headless, load: Any, name: str
) -> None:
    data, words = BAD[name]
    data = data() if callable(data) else data
    with pytest.raises(headless.courier.WorkflowFileError) as caught:
        load.parse_workflow(data, "模型 x.json")
    text = str(caught.value)
    assert text.startswith("模型 x.json "), text
    assert words in text
    assert "\n" not in text
    assert caught.value.exit_status == 3


def test_paths_that_cannot_be_read(headless: Headless, load: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    cases = {
        tmp_path: "is a folder",
        tmp_path / "no.json": "does not exist",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
        Path("a\0b\n"): "a b  does not exist",
        pipe: "use - and standard input",
    }
    for path, words in cases.items():
        with pytest.raises(headless.courier.WorkflowFileError, match=words):
            load.load_workflow(str(path))


def test_standard_input_and_a_file_with_any_name(load: Any, tmp_path: Path) -> None:
    folder = tmp_path / "模型 x" / "ä b"
    folder.mkdir(parents=True)
    file = folder / "tiny 🐎 (1).json"
    file.write_bytes(json.dumps(CJK).encode("utf-8-sig"))
    assert load.load_workflow(str(file)).name == "tiny 🐎 (1)"
    code = (
        "import importlib.util, sys; s = importlib.util.spec_from_file_location('c', sys.argv[1]);"
        "m = importlib.util.module_from_spec(s); s.loader.exec_module(m);"
        "from _comfyui_courier_files.nodes.headless.workflow.load import load_workflow;"
        "print(ascii(load_workflow('-').data))"
    )
    root = Path(__file__).parents[3] / "courier.py"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], input=file.read_bytes(), capture_output=True
    )
    assert done.stdout.decode().strip() == ascii(CJK), done.stderr


def test_what_is_no_workflow_is_not_unpacked(
    headless: Headless, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture may hold thousands of texts, each of which unpacks to much."""
    pictures = headless.module("workflow.pictures")
    unpacked: list[int] = []
    inflate = pictures._inflated
    monkeypatch.setattr(pictures, "_inflated", lambda *a: unpacked.append(1) or inflate(*a))
    junk = png_chunk(b"zTXt", b"junk\0\0" + zlib.compress(bytes(1 << 20)))
    wanted = png_chunk(b"zTXt", b"Prompt\0\0" + zlib.compress(b"{}"))
    data = b"\x89PNG\r\n\x1a\n" + junk * 50 + wanted + png_chunk(b"IEND", b"")
    assert pictures.metadata_of(data, "a.png") == {"prompt": b"{}"}
    assert unpacked == [1]


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", len(body), name) + body + struct.pack(">I", zlib.crc32(name + body))


def test_of_several_workflows_in_one_file_none_is_guessed(load: Any, headless: Headless) -> None:
    history = {
        str(i): {"prompt": [i, str(i), {"1": {"class_type": "X", "inputs": {"n": i}}}]}
        for i in range(5)
    }
    with pytest.raises(headless.courier.WorkflowFileError) as caught:
        load.parse_workflow(json.dumps(history).encode(), "history.json")
    assert "has 5 workflows in it (at 0.prompt.2, 1.prompt.2, 2.prompt.2 and 2 more)" in str(
        caught.value
    )
