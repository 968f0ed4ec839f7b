"""What a stranger may read of a run names no folder of this machine."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def paths(pack: Any) -> Any:
    return pack.module("nodes.runs.paths")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "[Errno 2] No such file or directory: '/home/me/My Models/a b.safetensors'",
            "[Errno 2] No such file or directory: '.../a b.safetensors'",
        ),
        ("cannot open /srv/comfy/models/x.pt.", "cannot open .../x.pt."),
        ('in "C:\\Users\\me\\models\\x.pt" at 3', 'in ".../x.pt" at 3'),
        ("C:\\Users\\Max Muster\\x.pt is broken", ".../x.pt is broken"),
        ("D:/ai/models/x.pt", ".../x.pt"),
        ("\\\\nas\\share\\x.pt is gone", ".../x.pt is gone"),
        ("(/opt/a/b.py, line 3)", "(.../b.py, line 3)"),
        ("path=/opt/a/b.py", "path=.../b.py"),
        ('File "/opt/a/b.py", line 3', 'File ".../b.py", line 3'),
        ("the folder /opt/a/ is full", "the folder .../ is full"),
    ],
)
def test_of_an_absolute_path_the_last_name_stays(paths: Any, text: str, want: str) -> None:
    assert paths.without_paths(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "GET /courier/v1/models lists them",
        "a and/or b, 1/2, 3 / 4, n/a",
        "see http://127.0.0.1:8188/view/a/b and https://example.com/a/b",
        "sub/model.safetensors, ./a/b",
        "ComfyUI's /free and '/free'",
        "expected 'a/b' of [1, 2]",
    ],
)
def test_what_is_no_path_of_this_machine_stays(paths: Any, text: str) -> None:
    assert paths.without_paths(text) == text


def test_every_string_of_an_answer_is_looked_at(paths: Any) -> None:
    value = {"/a/b/c.py": ["/a/b/d.py", 3, None, {"x": "/a/b/e.py"}]}
    assert paths.all_without_paths(value) == {".../c.py": [".../d.py", 3, None, {"x": ".../e.py"}]}
