"""Which of thousands of names was probably meant. Pure.

A list of files may have thousands of names, and a workflow dozens that are not among them. Names
are looked up by the groups of three letters that few of them have; only the most promising ones are
compared letter by letter.
"""

from __future__ import annotations

import difflib
import functools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SHOWN = 3
_COMPARED = 24
_NEIGHBOURS = 8
_COMMON = 0.2
"""A group of letters that more names have than this share says nothing of one of them."""
_LISTS = 64


@dataclass(frozen=True)
class _Index:
    names: tuple[str, ...]
    plain: tuple[str, ...]
    by_base: dict[str, list[int]]
    by_letters: dict[str, list[int]]
    bases: list[tuple[str, int]]


def nearest_choices(value: Any, choices: Iterable[Any], likeness: float = 0.5) -> list[str]:
    """The same file in another folder, then names that look alike, the nearest first."""
    names = tuple(choice for choice in choices if isinstance(choice, str))
    return list(_nearest(str(value), names, likeness))


@functools.lru_cache(maxsize=4096)
def _nearest(value: str, names: tuple[str, ...], likeness: float) -> tuple[str, ...]:
    index = _index(names)
    text = _plain(value)
    base = text.rpartition("/")[2]
    same = index.by_base.get(base, [])
    rated = []
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(text)
    for place in _promising(index, text, base):
        matcher.set_seq1(index.plain[place])
        if matcher.quick_ratio() >= likeness and (ratio := matcher.ratio()) >= likeness:
            rated.append((-ratio, place))
    found = [*same, *(place for _, place in sorted(rated))]
    return tuple(dict.fromkeys(index.names[place] for place in found))[:SHOWN]


def _promising(index: _Index, text: str, base: str) -> list[int]:
    if len(index.names) <= _COMPARED:
        return list(range(len(index.names)))
    shared: Counter[int] = Counter()
    for letters in _letters(text):
        shared.update(index.by_letters.get(letters, ()))
    found = [place for place, _ in shared.most_common(_COMPARED)]
    # Where all names have the same letters, those that begin alike.
    here = bisect_left(index.bases, (base, -1))
    neighbours = index.bases[max(0, here - _NEIGHBOURS) : here + _NEIGHBOURS]
    return list(dict.fromkeys([*found, *(place for _, place in neighbours)]))


@functools.lru_cache(maxsize=_LISTS)
def _index(names: tuple[str, ...]) -> _Index:
    plain = tuple(map(_plain, names))
    by_base: dict[str, list[int]] = defaultdict(list)
    by_letters: dict[str, list[int]] = defaultdict(list)
    bases = []
    for place, name in enumerate(plain):
        base = name.rpartition("/")[2]
        by_base[base].append(place)
        bases.append((base, place))
        for letters in _letters(name):
            by_letters[letters].append(place)
    most = max(_COMPARED, int(len(names) * _COMMON))
    rare = {letters: places for letters, places in by_letters.items() if len(places) <= most}
    return _Index(names, plain, dict(by_base), rare, sorted(bases))


def _letters(text: str) -> set[str]:
    return {text[place : place + 3] for place in range(len(text) - 2)}


def _plain(name: str) -> str:
    return name.replace("\\", "/").lower()
