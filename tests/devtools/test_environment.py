from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from devtools.console import DevError
from devtools.environment import (
    HOOKS,
    STAMP_NAME,
    check_disk,
    check_python,
    is_ready,
    lock_lines,
    only_one,
    stamp_of,
)
from devtools.paths import Paths, checkout


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A checkout with a finished environment, as far as the stamp can tell."""
    paths = Paths(tmp_path)
    paths.venv_scripts.mkdir(parents=True)
    paths.venv_python.touch()
    (paths.venv / "pyvenv.cfg").write_text("home = /x\nversion = 3.12.1\n")
    paths.lock.parent.mkdir()
    paths.lock.write_text("torch==2.13.0\n")
    for name in HOOKS:
        (paths.lock.parent / name).write_text("")
    (paths.venv / STAMP_NAME).write_text(stamp_of(paths), encoding="utf-8")
    return paths


def test_stamped_environment_is_ready(paths: Paths) -> None:
    assert is_ready(paths)


def test_environment_without_stamp_is_not_ready(paths: Paths) -> None:
    (paths.venv / STAMP_NAME).unlink()
    assert not is_ready(paths)


def test_changed_lock_makes_the_environment_anew(paths: Paths) -> None:
    paths.lock.write_text("torch==2.13.1\n")
    assert not is_ready(paths)


def test_changed_import_hook_makes_the_environment_anew(paths: Paths) -> None:
    (paths.lock.parent / "cpu_torch_shim.py").write_text("# new\n")
    assert not is_ready(paths)


def test_environment_without_interpreter_is_not_ready(paths: Paths) -> None:
    paths.venv_python.unlink()
    assert not is_ready(paths)


def test_other_python_in_the_environment_makes_it_anew(paths: Paths) -> None:
    (paths.venv / "pyvenv.cfg").write_text("home = /x\nversion = 3.13.0\n")
    assert not is_ready(paths)
    (paths.venv / "pyvenv.cfg").unlink()
    assert not is_ready(paths)


def test_caller_s_python_does_not_matter(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert is_ready(paths)


@pytest.mark.skipif(sys.platform == "win32", reason="the lock there waits without saying so")
def test_second_set_up_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    monkeypatch.setattr("devtools.environment.say", lambda _: waiting.set())
    order = []

    def second() -> None:
        with only_one(tmp_path / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with only_one(tmp_path / "lock"):
        thread.start()
        came_to_wait = waiting.wait(10)
        order.append("first")
    thread.join()
    assert came_to_wait
    assert order == ["first", "second"]


def test_moved_checkout_makes_the_environment_anew(paths: Paths, tmp_path: Path) -> None:
    moved = Paths(tmp_path / "moved")
    (tmp_path / "moved").mkdir()
    for name in (".venv", "devtools"):
        (paths.root / name).rename(moved.root / name)
    assert not is_ready(moved)


def test_too_little_disk_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(DevError, match=r"needs 1000000000\.0 GB under .* and \d+\.\d GB are free"):
        check_disk(tmp_path, need_bytes=10**18)


def test_enough_disk_is_taken(tmp_path: Path) -> None:
    check_disk(tmp_path, need_bytes=1)


def test_old_python_is_refused_with_its_version() -> None:
    with pytest.raises(DevError, match=r"needs Python 3\.11 or newer and this is 3\.10"):
        check_python((3, 10, 9))


def test_lock_is_exact_pins_and_sorted() -> None:
    pins = lock_lines(checkout().lock)
    names = [pin.split("==")[0] for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert names == sorted(names)
    assert "torch" in names


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=checkout().root
    )


def test_only_the_core_and_the_tools_are_importable() -> None:
    found = python("import offload_core, devtools; print(offload_core.__file__)")
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).is_relative_to(checkout().root)
    hidden = python("import nodes")
    assert "No module named 'nodes'" in hidden.stderr


def test_torchvision_and_torchaudio_import_beside_this_torch() -> None:
    done = python("import torchaudio, torchvision; from torchvision.ops import nms")
    assert done.returncode == 0, done.stderr
