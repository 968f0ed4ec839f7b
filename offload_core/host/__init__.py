"""Host: checkpoint bytes at rest, their mappings, and what the host's memory allows."""

from .checkpoint import (
    MAX_HEADER_BYTES,
    CheckpointHeader,
    TensorEntry,
    read_header,
    torch_dtype,
)
from .heap import give_back_freed
from .identity import (
    FileIdentity,
    check_not_rewritten,
    check_unchanged,
    difference_text,
    file_text,
    sizes_text,
)
from .ledger import HostLedger, Reservation
from .limits import HostLimits, SystemMemory, host_limits, system_memory
from .locking import (
    LockedRange,
    LockRefused,
    MlockBackend,
    PageLockBackend,
    PageLocker,
)
from .mapping import PAGE_BYTES, FileMapping, fill, open_mapping, read_tensor
from .process_memory import (
    MapLine,
    MemoryKind,
    ProcessMemory,
    maps_lines,
    maps_lookup,
    memory_kind,
    process_memory,
)
from .shards import resolve_shards

__all__ = [
    "MAX_HEADER_BYTES",
    "PAGE_BYTES",
    "CheckpointHeader",
    "FileIdentity",
    "FileMapping",
    "HostLedger",
    "HostLimits",
    "LockRefused",
    "LockedRange",
    "MapLine",
    "MemoryKind",
    "MlockBackend",
    "PageLockBackend",
    "PageLocker",
    "ProcessMemory",
    "Reservation",
    "SystemMemory",
    "TensorEntry",
    "check_not_rewritten",
    "check_unchanged",
    "difference_text",
    "file_text",
    "fill",
    "give_back_freed",
    "host_limits",
    "maps_lines",
    "maps_lookup",
    "memory_kind",
    "open_mapping",
    "process_memory",
    "read_header",
    "read_tensor",
    "resolve_shards",
    "sizes_text",
    "system_memory",
    "torch_dtype",
]
