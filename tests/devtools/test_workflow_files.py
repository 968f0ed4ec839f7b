"""Workflow files as people have them: other editors, other systems, no UTF-8 locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.demo import read_workflow

PROMPT = {"1": {"class_type": "CLIPTextEncode", "inputs": {"text": "快递员 骑 🐎"}}}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_a_workflow_is_read_as_utf8_with_or_without_a_mark(
    tmp_path: Path, mark: bytes, line_end: str
) -> None:
    file = tmp_path / "流程 1.json"
    text = json.dumps(PROMPT, ensure_ascii=False, indent=1).replace("\n", line_end)
    file.write_bytes(mark + text.encode("utf-8"))
    assert read_workflow(file) == PROMPT


def test_a_workflow_is_read_as_utf8_where_the_locale_is_not(tmp_path: Path) -> None:
    file = tmp_path / "workflow.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(PROMPT, ensure_ascii=False).encode("utf-8"))
    code = (
        "import sys, pathlib; from devtools.demo import read_workflow; "
        "text = read_workflow(pathlib.Path(sys.argv[1]))['1']['inputs']['text']; "
        "print(ascii(text))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii(PROMPT["1"]["inputs"]["text"])
