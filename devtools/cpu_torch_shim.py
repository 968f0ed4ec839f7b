"""Let torchvision and torchaudio from PyPI import beside a CPU-only torch.

Their PyPI builds link to CUDA libraries. Without those, torchvision stops on an operator that was
never declared and torchaudio on a library that does not load; neither is needed by ComfyUI on a
CPU. The installer copies this file into the environment's site-packages and starts it from a
``.pth`` file, so that it also serves processes that know nothing of it. Other people's files stay
as they are. Goes away when both packages bring CPU builds to PyPI.
"""

import importlib.abc
import importlib.machinery
import sys

NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept_libraries = []  # torch.library.Library undoes its declarations when it is collected


def _torch_is_cpu_only():
    import torch

    return torch.version.cuda is None


def _library_loads(spec):
    """Whether torchvision's own library loads here; if so it declares the operators itself."""
    import pathlib

    import torch

    folder = pathlib.Path(spec.origin).parent
    for library in [*folder.glob("_C*.so"), *folder.glob("_C*.pyd"), *folder.glob("_C*.dylib")]:
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


def _declare_nms():
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms" + NMS_SCHEMA)
    library.define("qnms" + NMS_SCHEMA)
    _kept_libraries.append(library)


def _tolerate_missing_library(module):
    original = module._load_lib

    def load_lib(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        except OSError:
            return False

    module._load_lib = load_lib


class _AfterExec(importlib.abc.Loader):
    """Delegates to the real loader, then runs one function on the finished module."""

    def __init__(self, loader, after):
        self._loader = loader
        self._after = after

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._after(module)


class CpuTorchFinder(importlib.abc.MetaPathFinder):
    """Looks at two module names and leaves every other import alone."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("torchvision", "torchaudio._extension.utils"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not _torch_is_cpu_only():
            return spec
        if name == "torchvision":
            if not _library_loads(spec):
                _declare_nms()
            return spec
        spec.loader = _AfterExec(spec.loader, _tolerate_missing_library)
        return spec


def install():
    if not any(isinstance(finder, CpuTorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CpuTorchFinder())
