"""What a save of the core's writes for a model of ours: each weight as the core would hold it.

Newer cores ask for the tensors without having had all patches merged first. Ours are merged when
they are written, one after the other, so that a save needs no second model in memory.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...offload_core.run import is_wrapper

Make = Callable[[], torch.Tensor]

_ELSEWHERE = namedtuple("_ELSEWHERE", ["type", "index"])("courier-later", 0)


class LaterTensor(torch.nn.Parameter):
    """A tensor of the right shape and dtype whose values are made when the writer wants them.

    The writer takes what is on another device to the CPU first; this is that moment.
    """

    def __new__(cls, shape: torch.Size, dtype: torch.dtype, make: Make) -> LaterTensor:
        """Memory that nobody touches is no memory."""
        return super().__new__(cls, torch.empty(shape, dtype=dtype), requires_grad=False)

    def __init__(self, shape: torch.Size, dtype: torch.dtype, make: Make) -> None:
        self._make: Make | None = make

    @property
    def device(self) -> Any:  # type: ignore[override]
        """Not the CPU."""
        return _ELSEWHERE

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """The values, on the CPU; once."""
        make, self._make = self._make, None
        assert make is not None, "a writer takes each tensor once"
        return make().to("cpu").contiguous()


def later_values(
    held: Mapping[str, torch.Tensor],
    weight_of: Callable[[str], torch.Tensor | None],
    merged_of: Callable[[str], Make | None],
    stored_of: Callable[[str], torch.dtype | None],
) -> dict[str, torch.Tensor]:
    """``held``, a state dict, with what the core would hold otherwise made later.

    Args:
        weight_of: the parameter of a key; None for what is none.
        merged_of: what merges its patches; None where it has none, or they are merged already.
        stored_of: the dtype that the core holds it in.
    """
    found = dict(held)
    for key, tensor in held.items():
        weight, merged, stored = weight_of(key), merged_of(key), stored_of(key)
        if weight is None:
            continue
        if is_wrapper(weight):
            if merged is not None:
                found.update(_pieces(key, weight, merged, held))
        elif merged is not None or weight.dtype != (stored or weight.dtype):
            make = merged or functools.partial(weight.detach().to, stored)
            found[key] = LaterTensor(tensor.shape, stored or weight.dtype, make)
    return found


def _pieces(
    key: str, weight: Any, merged: Make, held: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a quantised weight, all made at once when the first is wanted."""
    # ComfyUI's own quantised tensors say under which names they are saved.
    state = functools.cache(lambda: merged().state_dict(key))  # type: ignore[operator]
    for name, piece in weight.state_dict(key).items():
        if name in held:
            make = functools.partial(lambda name: state()[name], name)
            yield name, LaterTensor(piece.shape, piece.dtype, make)
