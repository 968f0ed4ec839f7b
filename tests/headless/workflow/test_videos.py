"""Workflows out of videos, as ComfyUI's muxer writes them; and what is damaged."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest

from ..conftest import Headless, prompt

UI: dict[str, Any] = {"nodes": [{"id": 1, "type": "SaveImage"}], "links": [], "version": 0.4}


@pytest.fixture
def load(headless: Headless) -> Any:
    return headless.module("workflow.load")


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def mp4(is_full: bool = True, prefix: str = "", **texts: Any) -> bytes:
    """ftyp, mdat, and moov/udta/meta with keys and values."""
    keys = [box(b"mdta", (prefix + name).encode()) for name in texts]
    values = [
        box(struct.pack(">I", i), box(b"data", struct.pack(">II", 1, 0), json.dumps(v).encode()))
        for i, v in enumerate(texts.values(), 1)
    ]
    handler = box(b"hdlr", bytes(4), bytes(4), b"mdta", bytes(13))
    listed = box(b"keys", struct.pack(">II", 0, len(keys)), *keys)
    meta = box(b"meta", bytes(4) if is_full else b"", handler, listed, box(b"ilst", *values))
    moov = box(b"moov", box(b"mvhd", bytes(100)), box(b"udta", meta))
    return box(b"ftyp", b"isom", bytes(4)) + box(b"mdat", bytes(999)) + moov


def element(number: int, *parts: bytes, unknown: bool = False) -> bytes:
    body = b"".join(parts)
    name = number.to_bytes((number.bit_length() + 7) // 8, "big")
    size = b"\x01" + b"\xff" * 7 if unknown else ((1 << 56) | len(body)).to_bytes(8, "big")
    return name + size + body


def webm(unknown: bool = False, **texts: Any) -> bytes:
    tags = [
        element(
            0x67C8, element(0x45A3, name.upper().encode()), element(0x4487, json.dumps(v).encode())
        )
        for name, v in texts.items()
    ]
    tag = element(0x7373, element(0x63C0), *tags)
    segment = element(
        0x18538067, element(0xEC, bytes(50)), element(0x1254C367, tag), unknown=unknown
    )
    return element(0x1A45DFA3, element(0x4282, b"webm")) + segment


@pytest.mark.parametrize("make", [
    mp4, lambda **t: mp4(is_full=False, **t), lambda **t: mp4(prefix="com.x.", **t),
    webm, lambda **t: webm(unknown=True, **t),
], ids=["mp4", "mov", "long keys", "webm", "a stream of webm"])  # fmt: skip
def test_both_forms_are_read(load: Any, make: Any) -> None:
    workflow = load.parse_workflow(make(prompt=prompt(), workflow=UI), "film.any")
    assert (workflow.form, workflow.data, workflow.ui) == (load.Form.API, prompt(), UI)
    saved = load.parse_workflow(make(workflow=UI), "film.any")
    assert (saved.form, saved.data) == (load.Form.UI, UI)


def test_a_comment_with_both_in_it_is_read(load: Any) -> None:
    data = mp4(comment={"prompt": json.dumps(prompt()), "workflow": UI})
    assert load.parse_workflow(data, "film.mp4").data == prompt()


@pytest.mark.parametrize("data", [mp4(), webm(), mp4(comment="hello")])
def test_a_video_without_one_says_so(load: Any, headless: Headless, data: bytes) -> None:
    with pytest.raises(headless.courier.WorkflowFileError, match="is a video without a workflow"):
        load.parse_workflow(data, "film.mp4")


def test_half_a_video_ends_in_one_sentence(load: Any, headless: Headless) -> None:
    for whole in (mp4(prompt=prompt()), webm(prompt=prompt())):
        texts = [told(load, headless, whole[:end]) for end in range(8, len(whole), 7)]
        assert any(texts)
        assert all("\n" not in text for text in texts)


def told(load: Any, headless: Headless, data: bytes) -> str:
    try:
        load.parse_workflow(data, "film.mp4")
    except headless.courier.WorkflowFileError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_what_pyav_writes_is_read(load: Any, kind: str) -> None:
    """The library that ComfyUI saves videos with."""
    av = pytest.importorskip("av", reason="ComfyUI's environment has it")
    file = io.BytesIO()
    options = {"movflags": "use_metadata_tags"}
    with av.open(file, "w", format=kind, options=options) as video:
        video.metadata["prompt"] = json.dumps(prompt())
        video.metadata["workflow"] = json.dumps(UI)
        stream = video.add_stream("mpeg4" if kind == "mp4" else "libvpx-vp9", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(2):
            video.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        video.mux(stream.encode())
    workflow = load.parse_workflow(file.getvalue(), f"film.{kind}")
    assert (workflow.data, workflow.ui) == (prompt(), UI)
