from __future__ import annotations

from pathlib import Path

from devtools.clean import clean
from devtools.comfyui_install import ensure_base
from devtools.paths import Paths


def checkout_in(folder: Path) -> Paths:
    paths = Paths(folder / "checkout")
    (paths.root / "nodes" / "__pycache__").mkdir(parents=True)
    (paths.root / "nodes" / "a.py").touch()
    paths.venv.mkdir()
    ensure_base(paths)
    (paths.models / "vae" / "v.safetensors").touch()
    return paths


def test_clean_removes_what_was_made_and_never_follows_the_link_to_the_sources(
    tmp_path: Path,
) -> None:
    paths = checkout_in(tmp_path)
    assert clean(paths) == 0
    left = sorted(str(path.relative_to(paths.root)) for path in paths.root.rglob("*"))
    assert left == ["nodes", str(Path("nodes", "a.py"))]


def test_models_alone_can_be_removed(tmp_path: Path) -> None:
    paths = checkout_in(tmp_path)
    clean(paths, models_only=True)
    assert not paths.models.exists()
    assert paths.venv.is_dir()
    assert paths.base.is_dir()


def test_clean_of_a_clean_checkout_is_no_error(tmp_path: Path) -> None:
    assert clean(Paths(tmp_path)) == 0
