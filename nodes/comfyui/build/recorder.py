"""ComfyUI's loading, recorded instead of carried out: which weight it would copy where.

ComfyUI makes a model with empty weights and copies the file into them. While a ``LoadRecorder`` is
entered, such a copy is noted and not made, so the file is not read and the empty memory is never
touched. Afterwards the file's own tensors can be put in the places of the empty ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .dtypes import widens_exactly

_ATEN = torch.ops.aten
_EMPTY = tuple(
    getattr(_ATEN, name)
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)


class LoadRecorder(TorchDispatchMode):
    """Notes whole copies out of the file's tensors; everything else happens as ever.

    What was noted is copied after all before any other operation reads it, so that code between
    two copies sees what it would see without this.

    Threads: the one that entered it, and only that one is recorded.
    """

    def __init__(
        self, sources: Iterable[torch.Tensor], moves_to: torch.device | None = None
    ) -> None:
        """
        Args:
            sources: the file's tensors; views of them count as they do.
            moves_to: another name of the CPU, for which torch would copy.
        """
        super().__init__()
        self._moves_to = moves_to
        self._sources = {_address(one) for one in sources if _is_plain(one) and one.numel()}
        # By the address of their storage. The tensors are held, so no address comes twice.
        self._loads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._empty: dict[int, torch.Tensor] = {}

    def source_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The file's tensor that ``weight`` would have been filled with; None if none was."""
        load = self._loads.get(_address(weight)) if _is_plain(weight) and weight.numel() else None
        return load[1] if load is not None and load[0].shape == weight.shape else None

    def is_source(self, weight: torch.Tensor) -> bool:
        """Whether ``weight`` lies on a tensor of the file's already: newer ComfyUI assigns some."""
        return _is_plain(weight) and bool(weight.numel()) and _address(weight) in self._sources

    def is_unwritten(self, weight: torch.Tensor) -> bool:
        """Whether nobody gave ``weight`` any values: it is what the memory happened to hold."""
        return _is_plain(weight) and bool(weight.numel()) and _address(weight) in self._empty

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Torch's own call for each operation."""
        kwargs = kwargs or {}
        if func.overloadpacket is _ATEN._has_compatible_shallow_copy_type:
            return func(*args, **kwargs)  # asked by Module.to, and reads nothing
        with self:
            # In inference mode what is made of other operations arrives whole.
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if func.overloadpacket is _ATEN.copy_ and self._is_load(args[0], args[1]):
            target = args[0]
            self._loads[_address(target)] = (target, args[1])
            self._empty.pop(_address(target), None)
            return target
        if func.overloadpacket is _ATEN._to_copy:
            converted = self._converted(args[0], kwargs)
            if converted is not None:
                return converted
        self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket in _EMPTY and _is_plain(result) and result.numel():
            self._empty[_address(result)] = result
        return result

    def _is_load(self, target: Any, source: Any) -> bool:
        return (
            _is_plain(target)
            and _is_plain(source)
            and target.shape == source.shape
            and bool(target.numel())
            and target.is_contiguous()
            and target.untyped_storage().nbytes() == target.nbytes
            and _address(target) not in self._sources
            and _address(source) in self._sources
        )

    def _converted(self, weight: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """An empty weight, or one that would be filled, in another dtype: just as empty, or to be
        filled with the same. A tensor of the file that is moved to where it lies: itself. None
        where that is not the same as converting what it holds or would hold."""
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if not _is_plain(weight) or not weight.numel() or not weight.is_contiguous():
            return None
        if device is not None and torch.device(device).type != "cpu":
            return None
        address = _address(weight)
        if address in self._sources:
            moves = device == self._moves_to and dtype in (None, weight.dtype)
            return weight.detach() if moves else None
        load = self._loads.get(address)
        if load is None and address not in self._empty:
            return None
        if load is not None and not (
            load[0].shape == weight.shape and widens_exactly(load[1].dtype, weight.dtype)
        ):
            return None
        result = torch.empty(weight.shape, dtype=dtype or weight.dtype)
        if load is None:
            self._empty[_address(result)] = result
        else:
            self._loads[_address(result)] = (result, load[1])
        return result

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gives_views = any(one.alias_info is not None for one in func._schema.returns)
        for place, given in zip(func._schema.arguments, args, strict=False):
            writes = place.alias_info is not None and place.alias_info.is_write
            for tensor in _tensors(given):
                self._touch(tensor, writes, only_viewed=gives_views and not writes)
        for tensor in _tensors(list(kwargs.values())):
            self._touch(tensor, writes=True, only_viewed=False)

    def _touch(self, tensor: torch.Tensor, writes: bool, only_viewed: bool) -> None:
        if only_viewed or not tensor.numel():
            return
        address = _address(tensor)
        load = self._loads.pop(address, None)
        if load is not None:
            load[0].copy_(load[1])
        if writes:
            self._empty.pop(address, None)


def _is_plain(value: Any) -> bool:
    """A tensor with bytes of its own: a quantised wrapper has other tensors inside."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for one in value for tensor in _tensors(one)]
    return [value] if _is_plain(value) else []
