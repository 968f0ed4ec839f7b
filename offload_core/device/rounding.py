"""A kernel that rounds bfloat16 to float16 in place, at the speed of the device's memory.

It is here because no operator of torch's comes near: on an H200 its fastest takes 1.5 times as
long for the same bytes, and where a model is stored in one and computes in the other, rounding is
most of what streaming costs (bench/results). The kernel is PTX, which the driver itself makes into
machine code, and it is launched through the driver's own C interface: there is nothing to build or
install.

Names nothing of torch, and nothing that needs a device before ``load`` is called.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .driver import Kernel, load_kernel

UNIT_BYTES = 16
"""What one thread reads and writes at once; memory has to be aligned to it."""

_THREADS = 256
_ENTRY = "courier_round"


def _ptx() -> str:
    words = range(4)
    regs = ", ".join(f"%w{i}" for i in words)
    # Both numbers of a word: a bfloat16 is the upper half of a float32 of the same value.
    halves = "\n".join(
        f"""    shl.b32 %low, %w{i}, 16;
    and.b32 %high, %w{i}, 0xffff0000;
    mov.b32 %f0, %low;
    mov.b32 %f1, %high;
    cvt.rn.f16.f32 %h0, %f0;
    cvt.rn.f16.f32 %h1, %f1;
    mov.b32 %w{i}, {{%h0, %h1}};"""
        for i in words
    )
    return f""".version 6.0
.target sm_53
.address_size 64
.visible .entry {_ENTRY}(.param .u64 memory, .param .u32 units)
{{
    .reg .pred %past;
    .reg .b16 %h0, %h1;
    .reg .b32 {regs}, %low, %high, %block, %size, %thread, %index, %units;
    .reg .f32 %f0, %f1;
    .reg .b64 %address, %offset;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %size, %thread;
    ld.param.u32 %units, [units];
    setp.ge.u32 %past, %index, %units;
    @%past ret;
    ld.param.u64 %address, [memory];
    cvta.to.global.u64 %address, %address;
    mul.wide.u32 %offset, %index, {UNIT_BYTES};
    add.s64 %address, %address, %offset;
    ld.global.v4.u32 {{{regs}}}, [%address];
{halves}
    st.global.v4.u32 [%address], {{{regs}}};
    ret;
}}
"""


@dataclass(frozen=True)
class Rounder:
    """The kernel in one device's context. It stays there as long as the process."""

    _kernel: Kernel

    def round(self, address: int, units: int, stream: int) -> None:
        """Round ``units`` times 16 bytes from ``address`` on, which is aligned to 16.

        Args:
            stream: the driver's handle; the context of its device is current on this thread.
        Raises: DriverError.
        """
        if units:
            arguments = (ctypes.c_uint64(address), ctypes.c_uint32(units))
            self._kernel.launch(-(-units // _THREADS), _THREADS, stream, arguments)


def load() -> Rounder:
    """The kernel in the context that is current on this thread. Raises: DriverError."""
    return Rounder(load_kernel(_ptx().encode("ascii"), _ENTRY))
