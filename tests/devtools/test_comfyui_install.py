from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from devtools.comfyui_install import choose_program, ensure_base, link_pack, unpack
from devtools.console import DevError
from devtools.paths import PACK_NAME, Paths

PREFIX = "inner/"


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMFYUI_PATH", "COMFYUI_PYTHON", "COMFYUI_FRONT_END_ROOT", "COMFYUI_ARGS"):
        monkeypatch.delenv(name, raising=False)


def wheel_of(folder: Path, names: list[str]) -> Path:
    wheel = folder / "some-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return wheel


def test_unpacking_leaves_out_what_breaks_start_up(tmp_path: Path) -> None:
    names = ["inner/main.py", "inner/a/b.py", "inner/extra_model_paths.yaml", "other.py"]
    unpack(wheel_of(tmp_path, names), PREFIX, tmp_path / "out")
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")}
    assert files == {"main.py", str(Path("a", "b.py"))}
    assert not (tmp_path / "out.partial").exists()


def test_wheel_that_writes_outside_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, ["inner/../../evil.py"])
    with pytest.raises(DevError, match="write outside its folder"):
        unpack(wheel, PREFIX, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_wheel_is_removed_and_named(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1-py3-none-any.whl"
    wheel.write_bytes(b"half a file")
    with pytest.raises(DevError, match="damaged"):
        unpack(wheel, PREFIX, tmp_path / "out")
    assert not wheel.exists()
    assert not (tmp_path / "out").exists()


def test_wheel_without_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="nothing under inner/"):
        unpack(wheel_of(tmp_path, ["other.py"]), PREFIX, tmp_path / "out")


def test_folder_without_main_is_no_comfyui(tmp_path: Path) -> None:
    with pytest.raises(DevError, match=r"has no main\.py, so it is not a ComfyUI"):
        choose_program(Paths(tmp_path), str(tmp_path))


def test_user_s_comfyui_keeps_its_own_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    monkeypatch.setenv("COMFYUI_ARGS", '--a "b c"')
    program = choose_program(Paths(tmp_path))
    assert program.path == tmp_path.resolve()
    assert program.frontend is None
    assert program.extra_args == ("--a", "b c")
    assert program.python == Paths(tmp_path).venv_python


@pytest.mark.parametrize("words", ["--port 1", "--listen=0.0.0.0", "--a --base-directory b"])
def test_what_dev_py_chooses_itself_is_refused(tmp_path: Path, words: str) -> None:
    (tmp_path / "main.py").touch()
    with pytest.raises(DevError, match=r"may not have --\w.*\(demo --port\)"):
        choose_program(Paths(tmp_path), str(tmp_path), extra_args=words)


def test_frontend_without_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    with pytest.raises(DevError, match=r"has no index\.html"):
        choose_program(Paths(tmp_path), str(tmp_path), frontend=str(tmp_path / "front"))


def test_base_has_the_pack_and_survives_a_second_call(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "__init__.py").touch()
    for _ in range(2):
        base = ensure_base(Paths(root), tmp_path / "base")
    assert (base / "custom_nodes" / PACK_NAME / "__init__.py").is_file()
    assert (base / "models" / "diffusion_models").is_dir()


def test_link_to_another_checkout_is_replaced(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(name)
    place = tmp_path / "place"
    link_pack(tmp_path / "old", place)
    link_pack(tmp_path / "new", place)
    assert (place / "__init__.py").read_text() == "new"
    assert (tmp_path / "old" / "__init__.py").read_text() == "old"


def test_pack_is_copied_where_links_are_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("a privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    root = tmp_path / "checkout"
    (root / ".venv").mkdir(parents=True)
    (root / "__init__.py").write_text("1")
    link_pack(root, tmp_path / "place")
    (root / "__init__.py").write_text("2")
    link_pack(root, tmp_path / "place")
    assert (tmp_path / "place" / "__init__.py").read_text() == "2"
    assert not (tmp_path / "place" / ".venv").exists()
