"""What differs between the versions of ComfyUI's page. Pure.

A server says which page belongs to it, and a file means what that page makes of it. Where that is
not known, the newest rules hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOSTS_OWN_VALUES = (1, 41)
"""Since then a subgraph's node has values of its own for every widget that was taken out to it."""


@dataclass(frozen=True)
class Rules:
    """How a page reads what has changed its meaning.

    Attributes:
        takes_inner_values: whether a subgraph's node gives its values to widgets inside that it
            shows without an input for them. Older pages show the widget itself.
        muted_ends_links: whether nothing comes out of a muted node that passes links on, and an
            input that is linked to a muted node keeps its own value.
        runs_what_is_in_muted: whether the nodes in a subgraph run though the subgraph is muted or
            bypassed.
    """

    takes_inner_values: bool = True
    muted_ends_links: bool = True
    runs_what_is_in_muted: bool = False


def rules_of(version: str | None) -> Rules:
    """By the version of the page, such as ``1.49.6``."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None or tuple(map(int, found.groups())) >= _HOSTS_OWN_VALUES:
        return Rules()
    return Rules(takes_inner_values=False, muted_ends_links=False, runs_what_is_in_muted=True)
