from __future__ import annotations

import os
from pathlib import Path

from bench.machine import Ground, boot_id, command_text, describe, offer_model, warm

GROUND = Ground(Path("/checkout"), Path("/base"), Path("/old"), "py", Path("/new"), "newpy")


def test_checkout_is_last_on_the_path_of_a_child() -> None:
    environment = GROUND.environment(False, {"PYTHONPATH": "mine", "HOME": "h"})
    expected = [str(Path("/checkout/tests/comfyui")), "mine", str(Path("/checkout"))]
    assert environment["PYTHONPATH"].split(os.pathsep) == expected
    assert environment["COURIER_TEST_COMFYUI"] == str(Path("/old"))
    assert environment["HOME"] == "h"


def test_newer_rows_have_their_own_program() -> None:
    assert GROUND.environment(True, {})["COURIER_TEST_COMFYUI"] == str(Path("/new"))
    assert (GROUND.interpreter(True), GROUND.interpreter(False)) == ("newpy", "py")


def test_command_is_told_without_the_folder_of_the_checkout() -> None:
    text = command_text(
        "bench.suite", ["--out", f"/checkout{os.sep}bench", "a b"], Path("/checkout")
    )
    assert text == "python3 -m bench.suite --out bench 'a b'"


def test_machine_is_described_without_a_card(tmp_path: Path) -> None:
    found = describe({"torch": "2.0", "cuda": False}, tmp_path)
    assert found["device"] == "none"
    assert found["torch"] == "2.0"
    assert "link" not in found


def test_link_is_told_in_words(tmp_path: Path) -> None:
    found = describe({"device": "A card", "link_bytes_per_second": 55.2e9}, tmp_path)
    assert found["link"].startswith("55.2 GB/s")


def test_boot_id_stays_the_same() -> None:
    assert boot_id() == boot_id() != ""


def test_model_is_offered_under_its_own_name(tmp_path: Path) -> None:
    model = tmp_path / "elsewhere" / "m.safetensors"
    model.parent.mkdir()
    model.write_text("weights")
    folder = tmp_path / "base" / "models" / "diffusion_models"
    folder.mkdir(parents=True)
    offered = offer_model(tmp_path / "base", model)
    assert offered == folder / "m.safetensors"
    assert offered.read_text() == "weights"


def test_warming_reads_the_file_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"x" * 1000)
    warm(file)
