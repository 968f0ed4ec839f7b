"""Answers of Courier's routes for states of the panel that no small model on a CPU gets into.

A test puts them in the place of the server's own answers, on the page of a real ComfyUI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
MIB = 2**20
BOOT_ID = "b" * 32
HOSTILE = "<img src=x onerror=window.courierWasHere=1>"
LONG = "wan2.1_i2v_720p_14B_fp8_scaled_e4m3fn_KJ_merged_with_a_very_long_name_" * 3
NON_LATIN = "万相2.1_文生视频_十四亿参数 — нейросеть العربية 🐎"


@dataclass(frozen=True)
class Answers:
    """What ``GET status`` and ``GET models`` answer: a body, or a status code, or nothing at all.

    ``post`` is what orders get: (status code, body).
    """

    status: Any
    models: Any
    post: tuple[int, Any] = (200, {})


@dataclass(frozen=True)
class Model:
    """One model of a state. ``places`` are letters: r, p, m, a; capital: in use now."""

    name: str = "wan2.1_t2v_14B_bf16"
    places: str = "r" * 12 + "p" * 20 + "m" * 8
    state: str = "loaded"
    rest: str = "awake"
    level: int | None = None
    problem: str = ""
    notes: Sequence[str] = ()
    reason: str = ""
    asked: dict[str, Any] = field(default_factory=dict)

    def status(self, number: int) -> dict[str, Any]:
        """Its entry in the status."""
        layers = [self._layer(index, letter) for index, letter in enumerate(self.places)]
        if layers:
            layers.append(
                {
                    **self._layer(0, "m" if self.rest == "asleep" else "r"),
                    "name": "(outside the blocks)",
                }
            )
        held = 0 if self.rest == "asleep" else sum(layer["resident_bytes"] for layer in layers)
        names = {"r": "resident", "p": "pinned", "m": "mapped", "a": "pageable"}
        counts = {name: self.places.lower().count(letter) for letter, name in names.items()}
        return {
            "id": f"model-{number}",
            "name": self.name,
            "file": f"{self.name}.safetensors",
            "state": self.state,
            "budgets": {"device_bytes": int(11.25 * GIB), "host_bytes": 16 * GIB},
            "asked": {
                "device_bytes": int(11.25 * GIB), "host_bytes": 16 * GIB, "shared": False,
                "by": "node", "waits": False, **self.asked,
            },
            "measured": {
                "device_bytes": held, "device_peak_bytes": held + 300 * MIB,
                "activation_peak_bytes": 1180 * MIB, "host_locked_bytes": 8 * GIB,
                "host_copied_bytes": 0, "host_locked_copy_bytes": 0,
                "host_staging_bytes": 112 * MIB,
            },
            "counts": counts,
            "bytes": counts,
            "block_lists": ["diffusion_model.blocks"] if self.places else [],
            "streamable_layers": len(self.places),
            "traffic": {
                "layers_shipped": 1200, "shipped_bytes": 640 * GIB, "prefetch_hits": 1190,
                "prefetch_misses": 10, "prefetches_discarded": 0,
            },
            "notes": list(self.notes),
            "layers": layers,
        }  # fmt: skip

    def entry(self, number: int) -> dict[str, Any]:
        """Its entry in the list of models."""
        asleep = self.rest == "asleep"
        return {
            "id": f"model-{number}",
            "name": self.name,
            "kind": "diffusion model",
            "state": self.rest,
            "level": self.level,
            "on_use": "refuse" if asleep else None,
            "problem": self.problem,
            "held": {
                "device_bytes": 0 if asleep else 8 * GIB, "locked_bytes": 0, "copied_bytes": 0,
                "staging_bytes": 0,
            },
        }  # fmt: skip

    def _layer(self, index: int, letter: str) -> dict[str, Any]:
        size = 670 * MIB
        place = {"r": "resident", "p": "pinned", "m": "mapped", "a": "pageable"}[letter.lower()]
        resident = size if place == "resident" else size // 8 if index % 3 else 0
        if self.rest == "asleep":
            resident = 0
        reasons = {
            "resident": "fits the device budget",
            "pinned": "streams from its file pages, locked in place",
            "mapped": "the host budget is used up; streams from the file",
            "pageable": "its weights have no usable bytes in the file",
        }
        return {
            "name": f"diffusion_model.blocks.{index}",
            "bytes": size,
            "resident_bytes": resident,
            "locked_bytes": size - resident if place == "pinned" else 0,
            "placement": place,
            "in_place": place == "pinned",
            "reason": self.reason or reasons[place],
            "state": "in use" if letter.isupper() else "ready" if place == "resident" else "absent",
            "dtypes": ["bfloat16"],
        }


def answers(
    models: Sequence[Model],
    device: dict[str, Any] | None = None,
    orders: Sequence[dict[str, Any]] = (),
    core: Sequence[dict[str, Any]] = (),
    post: tuple[int, Any] = (200, {}),
    **more: Any,
) -> Answers:
    """A server with these models."""
    card = {"name": "cuda:0", "type": "cuda", "total_bytes": 12 * GIB, "free_bytes": 2 * GIB}
    status = {
        "version": more.pop("version", "0.1.0"),
        "boot_id": more.pop("boot_id", BOOT_ID),
        "device": card if device is None else device,
        "host": {
            "total_bytes": 32 * GIB, "available_bytes": 15 * GIB, "limit_bytes": 32 * GIB,
            "source": "psutil",
        },
        "models": [model.status(number) for number, model in enumerate(models, start=1)],
        "notes": list(more.pop("notes", ())),
    }  # fmt: skip
    entries = [model.entry(number) for number, model in enumerate(models, start=1)]
    listed = {
        "models": [*entries, *core], "last_order": None, "orders": list(orders),
        "busy": more.pop("busy", False),
    }  # fmt: skip
    assert not more, more
    return Answers(status, listed, post)


def order(action: str, **more: Any) -> dict[str, Any]:
    """An order under way."""
    made = {
        "action": action,
        "waits": False,
        "done": 1,
        "total": 3,
        "name": "wan",
        "cancelled": False,
    }
    return {**made, **more}


CORE = (
    {
        "id": "core-vae-1", "name": "WanVAE", "kind": "VAE", "state": "awake", "level": None,
        "on_use": None, "problem": "",
        "held": {
            "device_bytes": 250 * MIB, "locked_bytes": 0, "copied_bytes": 0, "staging_bytes": 0,
        },
    },
)  # fmt: skip
FULL = "a prompt runs; nothing was changed. Try again when the queue is empty"
NO_LOCKS = "pages cannot be locked: this system does not lock pages of files in place"
SWITCH = "COURIER_PRETEND_DEVICE_GIB=4: the device is treated as that large (a test setting)"
RUNNING = Model(places="r" * 12 + "pPpppppppppppppppppp" + "m" * 8, state="running")
ASLEEP = Model(state="asleep", rest="asleep", level=1, places="m" * 40)

STATES: dict[str, Answers] = {
    "no-server": Answers(None, None),
    "loading": Answers("hangs", "hangs"),
    "empty": answers([]),
    "ready": answers([Model()], core=CORE),
    "running": answers([RUNNING], busy=True),
    "falling-asleep": answers([Model(rest="falling asleep")], orders=[order("sleep")]),
    "asleep": answers([ASLEEP], core=CORE),
    "waking": answers([Model(rest="waking")], orders=[order("wake", done=0, total=1)]),
    "failed": answers(
        [Model(rest="failed", problem="wan is still asleep: the device refused 640 MiB.")]
    ),
    "refused": answers([Model()], post=(409, {"error": {"code": "busy", "message": FULL}})),
    "waiting": answers([RUNNING], busy=True, orders=[order("sleep", waits=True, total=0)]),
    "unsupported": answers(
        [Model(places="m" * 40, reason=NO_LOCKS, notes=[SWITCH])],
        device={"name": "mps:0", "type": "mps", "total_bytes": None, "free_bytes": None},
    ),
    "cpu": answers(
        [Model()],
        device={"name": "cpu", "type": "cpu", "total_bytes": 32 * GIB, "free_bytes": 15 * GIB},
    ),
    "older-server": Answers(answers([Model()]).status, 404),
    "no-courier": Answers(404, 404),
    "garbage": Answers("<html>proxy</html>", "<html>proxy</html>"),
    "error": Answers(500, 500),
    "other-version": answers([Model()], version="9.9.9"),
    "no-layers": answers([Model(name="tiny", places="")]),
    "one-layer": answers([Model(name="single", places="m")]),
    "300-layers": answers([Model(places="rpma" * 75)]),
    "12-models": answers([Model(name=f"model number {n}", places="rrpm") for n in range(12)]),
    "names": answers([Model(name=name) for name in (HOSTILE, LONG, NON_LATIN)]),
}
