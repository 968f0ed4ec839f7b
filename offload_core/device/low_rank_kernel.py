"""One kernel for ``add_low_rank``: reads each weight once, writes it once, keeps no product.

torch's operators take 36 bytes of memory traffic an element, and a float32 copy of the weight and
of the product. The kernel takes 4 bytes. On an H200 it needs 1.5 ms for a rank of 64 on a layer of
Wan 14B, torch 5.0 (bench/results, 2026-12-01).

It sums the products of a row and a column in the order of the rank, with fused multiply-adds. So
does cuBLAS for matrices of some size, and for small ones it does not. A shape is therefore proved
before the kernel is used for it: its first weight is computed in both ways, and has to be equal bit
for bit. What is not proved is left to torch.

Names ``torch`` for its tensors only. Threads: the compute thread; a thread of its own compiles.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .driver import DriverError, Kernel, load_kernel
from .low_rank import LowRank, add_low_rank

_LOG = logging.getLogger("courier")

_ENTRY = "courier_add_low_rank"
_TILE = 128
_THREADS = 256
_MOST_ITEMS = 24
"""Of one launch; they are passed by value, and 4 KiB is what a kernel takes."""
_MOST_TERMS = 4
_ALIGNMENT_BYTES = 8
"""What one thread reads of a weight at once."""
_LEAST_ELEMENTS = 1 << 20
"""Of a weight. A proof needs many numbers to show another order of summing, and torch splits the
sums of small weights (one of 100 x 260 came to the same bits at first, and then did not)."""
_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_SOURCE = r"""
typedef unsigned short u16;
typedef unsigned long long u64;
struct Term { u64 up, down; int rank; float scale; };
struct Item {
  u64 weight; int rows, columns, first_tile, across, count, unused; Term term[MOST_TERMS];
};
struct Items { Item item[MOST_ITEMS]; int count; };

__device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float(((unsigned)v) << 16); }
__device__ __forceinline__ float from_fp16(u16 v) {
  float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v)); return f;
}
__device__ __forceinline__ u16 to_fp16(float f) {
  u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
}
__device__ __forceinline__ u16 to_bf16(float f) {
#if __CUDA_ARCH__ >= 800
  u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
#else
  unsigned u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}

#if WEIGHT == 1
#define LOAD_WEIGHT from_bf16
#define STORE_WEIGHT to_bf16
#else
#define LOAD_WEIGHT from_fp16
#define STORE_WEIGHT to_fp16
#endif
#if VIA == 0
#define ROUND(x) (x)
#else
#define ROUND(x) from_fp16(to_fp16(x))
#endif

#if FACTOR == 0
typedef float Factor;
__device__ __forceinline__ float4 load4(const Factor* p) { return *(const float4*)p; }
#else
typedef u16 Factor;
__device__ __forceinline__ float4 load4(const Factor* p) {
  uint2 v = *(const uint2*)p;
#if FACTOR == 1
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                     __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
#else
  return make_float4(from_fp16(v.x & 0xffff), from_fp16(v.x >> 16),
                     from_fp16(v.y & 0xffff), from_fp16(v.y >> 16));
#endif
}
#endif

// One of the four numbers of 16 bits.
#define PICK(v, n) ((u16)(((n) < 2 ? (v).x : (v).y) >> (((n) & 1) * 16)))

#define TILE 128
#define DEPTH 16
#define PAD 4  // or four threads would wait for one bank
#define THREADS 256
#define LOADS (DEPTH * TILE / 4 / THREADS)

// DEPTH steps of the rank for a tile of 128 rows, from a matrix (rows, rank).
__device__ __forceinline__ void fetch_up(
    float4* into, const Factor* from, int rows, int rank, int first, int step) {
  #pragma unroll
  for (int q = 0; q < LOADS; q++) {
    int e = threadIdx.x + q * THREADS, r = first + e / (DEPTH / 4), k = step + e % (DEPTH / 4) * 4;
    into[q] = (r < rows && k < rank) ? load4(from + (long long)r * rank + k)
                                     : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}
__device__ __forceinline__ void place_up(float into[DEPTH][TILE + PAD], const float4* from) {
  #pragma unroll
  for (int q = 0; q < LOADS; q++) {
    int e = threadIdx.x + q * THREADS, r = e / (DEPTH / 4), k = e % (DEPTH / 4) * 4;
    into[k][r] = from[q].x;
    into[k + 1][r] = from[q].y;
    into[k + 2][r] = from[q].z;
    into[k + 3][r] = from[q].w;
  }
}
// The same for 128 columns, from a matrix (rank, columns).
__device__ __forceinline__ void fetch(
    float4* into, const Factor* from, int width, int rank, int first, int step) {
  #pragma unroll
  for (int q = 0; q < LOADS; q++) {
    int e = threadIdx.x + q * THREADS, r = step + e / (TILE / 4), c = first + (e % (TILE / 4)) * 4;
    into[q] = (c < width && r < rank) ? load4(from + (long long)r * width + c)
                                      : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}
__device__ __forceinline__ void place(float into[DEPTH][TILE], const float4* from) {
  #pragma unroll
  for (int q = 0; q < LOADS; q++) {
    int e = threadIdx.x + q * THREADS;
    *(float4*)&into[e / (TILE / 4)][(e % (TILE / 4)) * 4] = from[q];
  }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void courier_add_low_rank(
    const __grid_constant__ Items items) {
  __shared__ __align__(16) float ups[2][DEPTH][TILE + PAD];
  __shared__ __align__(16) float downs[2][DEPTH][TILE];
  int which = 0;
  while (which + 1 < items.count && (int)blockIdx.x >= items.item[which + 1].first_tile) which++;
  const Item& item = items.item[which];
  const int rows = item.rows, columns = item.columns;
  const int tile = blockIdx.x - item.first_tile;
  const int first_row = (tile / item.across) * TILE, first_column = (tile % item.across) * TILE;
  u16* weight = (u16*)item.weight;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;

  // Read long before they are needed; nothing else writes them meanwhile.
  uint2 old[8][2];
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    int row = first_row + (i / 4) * 64 + y * 4 + i % 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      int column = first_column + h * 64 + x * 4;
      old[i][h] = (row < rows && column < columns)
          ? *(const uint2*)(weight + (long long)row * columns + column) : make_uint2(0, 0);
    }
  }
#if MANY
  float total[8][8];
  #pragma unroll
  for (int i = 0; i < 8; i++)
    #pragma unroll
    for (int j = 0; j < 8; j++)
      total[i][j] = ROUND(LOAD_WEIGHT(PICK(old[i][j / 4], j % 4)));
  for (int t = 0; t < item.count; t++) {
#else
  {
    const int t = 0;
#endif
    const Term& term = item.term[t];
    const Factor* up = (const Factor*)term.up;      // (rows, rank)
    const Factor* down = (const Factor*)term.down;  // (rank, columns)
    const int rank = term.rank;
    float4 next_up[LOADS], next_down[LOADS];
    fetch_up(next_up, up, rows, rank, first_row, 0);
    fetch(next_down, down, columns, rank, first_column, 0);
    __syncthreads();  // the last term may still be read
    place_up(ups[0], next_up);
    place(downs[0], next_down);
    __syncthreads();
    float sum[8][8];
    #pragma unroll
    for (int i = 0; i < 8; i++)
      #pragma unroll
      for (int j = 0; j < 8; j++) sum[i][j] = 0.f;
    int side = 0;
    for (int step = 0; step < rank; step += DEPTH) {
      const bool more = step + DEPTH < rank;
      if (more) {
        fetch_up(next_up, up, rows, rank, first_row, step + DEPTH);
        fetch(next_down, down, columns, rank, first_column, step + DEPTH);
      }
      #pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        float a[8], b[8];
        *(float4*)&a[0] = *(const float4*)&ups[side][k][y * 4];
        *(float4*)&a[4] = *(const float4*)&ups[side][k][64 + y * 4];
        *(float4*)&b[0] = *(const float4*)&downs[side][k][x * 4];
        *(float4*)&b[4] = *(const float4*)&downs[side][k][64 + x * 4];
        #pragma unroll
        for (int i = 0; i < 8; i++)
          #pragma unroll
          for (int j = 0; j < 8; j++) sum[i][j] = __fmaf_rn(a[i], b[j], sum[i][j]);
      }
      if (more) {
        place_up(ups[side ^ 1], next_up);
        place(downs[side ^ 1], next_down);
        __syncthreads();
        side ^= 1;
      }
    }
#if MANY
    #pragma unroll
    for (int i = 0; i < 8; i++)
      #pragma unroll
      for (int j = 0; j < 8; j++)
        total[i][j] = ROUND(__fadd_rn(total[i][j], ROUND(__fmul_rn(term.scale, sum[i][j]))));
  }
#define RESULT(i, j) STORE_WEIGHT(total[i][j])
#else
#define RESULT(i, j) STORE_WEIGHT(ROUND(__fadd_rn( \
    ROUND(LOAD_WEIGHT(PICK(old[i][(j) / 4], (j) % 4))), ROUND(__fmul_rn(term.scale, sum[i][j])))))
#endif
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    int row = first_row + (i / 4) * 64 + y * 4 + i % 4;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      int column = first_column + h * 64 + x * 4;
      if (row >= rows || column >= columns) continue;
      unsigned w[4];
      #pragma unroll
      for (int j = 0; j < 4; j++) w[j] = RESULT(i, h * 4 + j);
      *(uint2*)(weight + (long long)row * columns + column) =
          make_uint2(w[0] | (w[1] << 16), w[2] | (w[3] << 16));
    }
  }
#if !MANY
  }
#endif
}
"""


class _Term(ctypes.Structure):
    _fields_ = (
        ("up", ctypes.c_uint64),
        ("down", ctypes.c_uint64),
        ("rank", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class _Item(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("first_tile", ctypes.c_int),
        ("across", ctypes.c_int),
        ("count", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("term", _Term * _MOST_TERMS),
    )


class _Items(ctypes.Structure):
    _fields_ = (("item", _Item * _MOST_ITEMS), ("count", ctypes.c_int))


@dataclass(frozen=True)
class _Variant:
    """What is compiled for: the dtypes of weight, sum and thin matrices."""

    weight: torch.dtype
    via: torch.dtype
    factor: torch.dtype
    has_many: bool
    """Whether there is more than one term; for one, half of the registers do."""

    @property
    def macros(self) -> dict[str, int]:
        return {
            "MOST_ITEMS": _MOST_ITEMS,
            "MOST_TERMS": _MOST_TERMS,
            "MANY": int(self.has_many),
            "WEIGHT": _FLOATS[self.weight],
            "VIA": 0 if self.via is torch.float32 else 1,
            "FACTOR": _FLOATS[self.factor],
        }


@dataclass(frozen=True)
class _Shape:
    """What decides how torch multiplies."""

    variant: _Variant
    rows: int
    columns: int
    ranks: tuple[int, ...]


class LowRankKernels:
    """The kernels of one device and the shapes that they are proved for. Lives as long as the
    process.

    ``compiler`` makes machine code of a source and macros; it is called on a thread of its own, for
    it takes 0.3 s, and torch's operators do the work until it is there.
    Threads: the compute thread; ``_images`` is written by the compiling threads, a key at a time.
    """

    def __init__(self, compiler: Callable[[str, dict[str, int]], bytes]) -> None:
        self._compiler = compiler
        self._images: dict[_Variant, bytes | None] = {}
        self._compiling: dict[_Variant, threading.Thread] = {}
        self._kernels: dict[_Variant, Kernel | None] = {}
        self._proved: dict[_Shape, bool] = {}

    def add(self, updates: Sequence[LowRank], stream: int) -> list[LowRank]:
        """Do those that a kernel does as torch would; the others are returned, not begun.

        Args:
            stream: the driver's handle of the current stream, on which torch works too.
        """
        ready: dict[_Variant, list[LowRank]] = {}
        rest: list[LowRank] = []
        for update in updates:
            variant = _variant_of(update)
            kernel = None if variant is None else self._kernel(variant)
            if variant is None or kernel is None:
                rest.append(update)
                continue
            shape = _shape_of(update, variant)
            if shape not in self._proved:
                # This also does the work.
                self._proved[shape] = _prove(kernel, update, stream)
            elif self._proved[shape]:
                ready.setdefault(variant, []).append(update)
            else:
                rest.append(update)
        for variant, proved in ready.items():
            kernel = self._kernels[variant]
            assert kernel is not None
            for first in range(0, len(proved), _MOST_ITEMS):
                _launch(kernel, proved[first : first + _MOST_ITEMS], stream)
        return rest

    def _kernel(self, variant: _Variant) -> Kernel | None:
        if variant in self._kernels:
            return self._kernels[variant]
        if variant not in self._images:
            if variant not in self._compiling:
                thread = threading.Thread(
                    target=self._compile, args=(variant,), name="courier-compiler", daemon=True
                )
                self._compiling[variant] = thread
                thread.start()
            return None
        image = self._images[variant]
        kernel = None
        if image is not None:
            try:
                kernel = load_kernel(image, _ENTRY)
            except DriverError as error:
                _LOG.info("LoRA is added by torch: %s", error)
        self._kernels[variant] = kernel
        return kernel

    def _compile(self, variant: _Variant) -> None:
        try:
            self._images[variant] = self._compiler(_SOURCE, variant.macros)
        except Exception as error:
            # Whatever it was: torch does the same work, only slower.
            _LOG.info("LoRA is added by torch: %s", error)
            self._images[variant] = None


def _variant_of(update: LowRank) -> _Variant | None:
    """None where the kernel does not know the dtypes, or the memory does not suit it."""
    weight, factors = update.weight, _factors(update)
    kinds = {factor.dtype for factor in factors}
    if weight.dtype not in (torch.bfloat16, torch.float16) or len(kinds) > 1:
        return None
    kind = kinds.pop()
    if kind not in _FLOATS or update.via not in (torch.float32, torch.float16):
        return None
    rows, columns = _sizes(update)
    alignment = 4 * kind.itemsize
    suits = (
        len(update.terms) <= _MOST_TERMS
        and rows * columns >= _LEAST_ELEMENTS
        and rows % 4 == columns % 4 == 0
        and all(term.up.shape[1] % 4 == 0 for term in update.terms)
        and weight.is_contiguous()
        and weight.data_ptr() % _ALIGNMENT_BYTES == 0
        and all(factor.data_ptr() % alignment == 0 for factor in factors)
    )
    return _Variant(weight.dtype, update.via, kind, len(update.terms) > 1) if suits else None


def _factors(update: LowRank) -> list[torch.Tensor]:
    return [factor for term in update.terms for factor in (term.up, term.down)]


def _sizes(update: LowRank) -> tuple[int, int]:
    first = update.terms[0]
    return first.up.shape[0], first.down.shape[1]


def _shape_of(update: LowRank, variant: _Variant) -> _Shape:
    return _Shape(variant, *_sizes(update), tuple(term.down.shape[0] for term in update.terms))


def _prove(kernel: Kernel, update: LowRank, stream: int) -> bool:
    """Do the work by torch's operators, and whether the kernel comes to the same bits."""
    tried = replace(update, weight=update.weight.clone())
    add_low_rank([update])
    _launch(kernel, [tried], stream)
    bits = torch.int16
    return torch.equal(tried.weight.view(bits), update.weight.view(bits))


def _launch(kernel: Kernel, updates: Sequence[LowRank], stream: int) -> None:
    items, tiles = _Items(), 0
    for place, update in enumerate(updates):
        rows, columns = _sizes(update)
        across = -(-columns // _TILE)
        terms = (
            _Term(term.up.data_ptr(), term.down.data_ptr(), term.down.shape[0], term.scale)
            for term in update.terms
        )
        items.item[place] = _Item(
            update.weight.data_ptr(),
            rows,
            columns,
            tiles,
            across,
            len(update.terms),
            0,
            (_Term * _MOST_TERMS)(*terms),
        )
        tiles += across * -(-rows // _TILE)
    items.count = len(updates)
    kernel.launch(tiles, _THREADS, stream, (items,))
