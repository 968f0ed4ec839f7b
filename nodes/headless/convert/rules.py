"""What differs between the versions of ComfyUI's page. Pure.

A server says which page belongs to it, and a file means what that page makes of it. Where that is
not known, the newest rules hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOSTS_OWN_VALUES = (1, 41)
"""Since then a subgraph's node has values of its own for every widget that was taken out to it."""


_LISTS_LINKS = (1, 50)
"""Since then the list of links says what is linked, also to an input that says that it is not. The
last page that was seen to go by the inputs is 1.49.6, the first that goes by the list 1.58.1."""


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
        goes_by_list: whether a link counts that is in the list only, and not at its input.
    """

    takes_inner_values: bool = True
    muted_ends_links: bool = True
    runs_what_is_in_muted: bool = False
    goes_by_list: bool = True


def rules_of(version: str | None) -> Rules:
    """By the version of the page, such as ``1.49.6``."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None:
        return Rules()
    number = tuple(map(int, found.groups()))
    if number >= _HOSTS_OWN_VALUES:
        return Rules(goes_by_list=number >= _LISTS_LINKS)
    return Rules(
        takes_inner_values=False,
        muted_ends_links=False,
        runs_what_is_in_muted=True,
        goes_by_list=False,
    )
