"""Texts of others without the paths of this machine: runs can be read by strangers. Pure."""

from __future__ import annotations

import re
from typing import Any

_NAME = r"[^\s/\\'\"<>|:*?(),;]+"
_QUOTED = r"(?P<quote>['\"])(?:[A-Za-z]:[\\/]|\\\\|/)[^'\"\n]*?(?P<last>[^/\\'\"\n]*)(?P=quote)"
_POSIX = rf"(?<![\w/.:~-])/(?!(?:courier|api)/)(?:{_NAME}/)+(?P<posix>{_NAME})?"
_WINDOWS = rf"(?<!\w)(?:[A-Za-z]:[\\/]|\\\\)(?:[^/\\'\"<>|:*?\n]+[\\/])*(?P<windows>{_NAME})?"
_PATH = re.compile(f"{_QUOTED}|{_POSIX}|{_WINDOWS}")


def without_paths(text: str) -> str:
    """``text`` with of each absolute path its last name only: ``.../wan.safetensors``.

    Addresses (``http://...``) and our own routes stay.
    """
    return _PATH.sub(_shortened, text)


def all_without_paths(value: Any) -> Any:
    """The same for every string in lists and objects, their names too."""
    if isinstance(value, dict):
        return {all_without_paths(key): all_without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [all_without_paths(item) for item in value]
    return without_paths(value) if isinstance(value, str) else value


def _shortened(match: re.Match[str]) -> str:
    quote = match["quote"] or ""
    if quote and not re.search(r"[/\\].*[/\\]", match[0]):
        return match[0]  # one name, which may be a route: '/free'
    last = match["last"] or match["posix"] or match["windows"] or ""
    return f"{quote}.../{last}{quote}"
