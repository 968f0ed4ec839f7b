"""Where everything lies in one checkout. All but the sources is ignored by git."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PACK_NAME = "comfyui-courier"
EMBEDDED_COMFYUI_VERSION = "0.3.75"
EMBEDDED_FRONTEND_VERSION = "1.32.9"


@dataclass(frozen=True)
class Paths:
    """The folders of one checkout, by what they are for."""

    root: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def venv_python(self) -> Path:
        return self.venv_scripts / ("python.exe" if os.name == "nt" else "python")

    @property
    def venv_scripts(self) -> Path:
        return self.venv / ("Scripts" if os.name == "nt" else "bin")

    @property
    def lock(self) -> Path:
        return self.root / "devtools" / "requirements.lock"

    @property
    def state(self) -> Path:
        """Everything downloaded or made, apart from the environment."""
        return self.root / ".comfyui"

    @property
    def downloads(self) -> Path:
        return self.state / "downloads"

    @property
    def comfyui(self) -> Path:
        return self.state / EMBEDDED_COMFYUI_VERSION

    @property
    def frontend(self) -> Path:
        return self.state / f"frontend-{EMBEDDED_FRONTEND_VERSION}"

    @property
    def base(self) -> Path:
        """ComfyUI's base directory: models, custom nodes, input, output, user, temp."""
        return self.state / "base"

    @property
    def models(self) -> Path:
        return self.base / "models"

    @property
    def logs(self) -> Path:
        return self.state / "logs"


def checkout() -> Paths:
    """The checkout that this file belongs to."""
    return Paths(Path(__file__).resolve().parent.parent)
