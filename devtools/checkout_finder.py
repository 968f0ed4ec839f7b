"""Make two packages of a checkout importable, and nothing else of it.

The repository root must stay off ``sys.path``: its ``nodes`` would hide ComfyUI's own. So the
installer copies this file into the environment and a ``.pth`` line names the checkout.
"""

import importlib.abc
import importlib.util
import os
import sys

NAMES = ("offload_core", "devtools")


class CheckoutFinder(importlib.abc.MetaPathFinder):
    """Finds the packages in NAMES in one folder; submodules follow from the package's path."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name not in NAMES:
            return None
        folder = os.path.join(self.root, name)
        init = os.path.join(folder, "__init__.py")
        if not os.path.isfile(init):
            return None
        return importlib.util.spec_from_file_location(
            name, init, submodule_search_locations=[folder]
        )


def install(root):
    sys.meta_path.append(CheckoutFinder(root))
