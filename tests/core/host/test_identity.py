from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from offload_core.host import (
    FileIdentity,
    check_not_rewritten,
    check_unchanged,
    file_text,
    sizes_text,
)
from offload_core.values import MIB, CheckpointChangedError


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def delete(path: Path) -> None:
    path.unlink()


def hide_folder(path: Path) -> None:
    path.unlink()
    path.parent.rename(path.parent.with_name("moved"))


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "was truncated to 100 bytes from "),
    (rewrite, "was rewritten in place"),
    (append, "grew to "),
    (replace, "was replaced by another file of "),
    (delete, "was deleted, moved or renamed"),
    (hide_folder, "was deleted, moved or renamed"),
]


def test_an_untouched_file_is_unchanged(checkpoint: Path) -> None:
    identity = FileIdentity.of(checkpoint)
    checkpoint.read_bytes()
    check_unchanged(checkpoint, identity)


def test_descriptor_and_path_have_one_identity(checkpoint: Path) -> None:
    with checkpoint.open("rb") as file:
        assert FileIdentity.of(file.fileno()) == FileIdentity.of(checkpoint)


# Case 44.
@pytest.mark.parametrize(
    ("change", "words"), CHANGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_changed_file_is_refused_with_what_happened(
    checkpoint: Path, change: Callable[[Path], None], words: str
) -> None:
    identity = FileIdentity.of(checkpoint)
    change(checkpoint)
    with pytest.raises(CheckpointChangedError) as caught:
        check_unchanged(checkpoint, identity)
    text = str(caught.value)
    assert text.startswith(f"{checkpoint} {words}")
    assert text.endswith("load the model again")


def test_a_rewritten_file_is_seen_by_its_time_alone(checkpoint: Path) -> None:
    identity = FileIdentity.of(checkpoint)
    os.utime(checkpoint, ns=(identity.mtime_ns, identity.mtime_ns + 1))
    with pytest.raises(CheckpointChangedError, match=re.escape("was rewritten in place")):
        check_unchanged(checkpoint, identity)


def test_a_changed_file_refuses_instead_of_ending_the_process(
    checkpoint: Path, run_python: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    code = (
        "import os, sys\n"
        "from offload_core.host import open_mapping\n"
        "from offload_core.values import CheckpointChangedError\n"
        "path, sound = sys.argv[1], open(sys.argv[1], 'rb').read()\n"
        "def truncate(): os.truncate(path, 100)\n"
        "def rewrite():\n"
        "    with open(path, 'r+b') as file: file.seek(-1, 2); file.write(b'x')\n"
        "def replace():\n"
        "    with open(path + '2', 'wb') as file: file.write(sound)\n"
        "    os.replace(path + '2', path)\n"
        "kept = []\n"
        "for change in (truncate, rewrite, replace, lambda: os.unlink(path)):\n"
        "    with open(path, 'wb') as file: file.write(sound)\n"
        "    os.utime(path, ns=(1, 1))\n"
        "    mapping = open_mapping(path)\n"
        "    weight = mapping.tensor(mapping.header.entries['weight'])\n"
        "    change()\n"
        "    try:\n"
        "        mapping.check_unchanged()\n"
        "    except CheckpointChangedError:\n"
        "        print('refused')\n"
        "    else:\n"
        "        print(weight.sum())\n"
        "    kept.append(weight)\n"
    )
    done = run_python(code, checkpoint)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split() == [b"refused"] * 4


def test_sizes_are_exact_and_readable() -> None:
    assert sizes_text(100) == "100 bytes"
    assert sizes_text(3 * MIB) == "3145728 bytes (3.00 MiB)"


@pytest.mark.skipif(os.name != "posix", reason="file names are bytes on POSIX only")
def test_a_name_that_is_not_unicode_is_still_printable() -> None:
    text = file_text(os.fsdecode(b"caf\xe9.safetensors"))
    assert text == "caf\\xe9.safetensors"
    text.encode("utf-8")


def test_only_a_file_rewritten_in_place_is_not_the_bytes_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"as it was")
    os.utime(path, ns=(1, 1))
    before = FileIdentity.of(path)
    check_not_rewritten(path, before)
    with path.open("r+b") as file:
        file.write(b"different")
    os.utime(path, ns=(2, 2))
    with pytest.raises(CheckpointChangedError, match="was rewritten in place"):
        check_not_rewritten(path, before)
    other = tmp_path / "other"
    other.write_bytes(b"another file")
    os.replace(other, path)
    check_not_rewritten(path, before)
    path.unlink()
    check_not_rewritten(path, before)
