from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

MIB = 1 << 20


@pytest.fixture
def values(pack: Any) -> Any:
    return pack.module("offload_core.values")


@pytest.fixture
def wire(pack: Any) -> Any:
    return pack.module("nodes.models.status_json")


MakeRecord = Callable[..., Any]


@pytest.fixture
def make_record(pack: Any, values: Any) -> MakeRecord:
    """``make_record(layers, **model)``: a status of one model whose layers are given as
    (name, size, placement, in place)."""
    service = pack.module("nodes.models.registry")
    host = pack.module("offload_core.host")

    def make(layers: list[tuple[str, int, str, bool]] | None = None, **more: Any) -> Any:
        models = ()
        if layers is not None:
            models = (_model(service, values, layers, more),)
        return service.StatusRecord(
            version="0.1.0",
            boot_id="b" * 32,
            device=service.DeviceRecord("cuda:0", "cuda", 12 << 30, 3 << 30),
            host=host.HostLimits(32 << 30, 20 << 30, 35 << 30, "memory.max of control group /"),
            models=models,
            notes=("a note of the service",),
        )

    return make


def _model(service: Any, values: Any, layers: list[Any], more: dict[str, Any]) -> Any:
    records = tuple(
        values.LayerRecord(
            name=name,
            size_bytes=size,
            resident_bytes=size if placement == "resident" else more.get("in_part", 0),
            locked_bytes=more.get("locked", 0),
            placement=values.Placement(placement),
            in_place=in_place,
            reason=f"why {placement}",
            state=values.LayerState.ABSENT,
            tensors=2,
            dtypes=("bfloat16", "float32"),
        )
        for name, size, placement, in_place in layers
    )
    snapshot = values.EngineSnapshot(
        state=values.EngineState.LOADED,
        budget=values.Budget(4 * MIB, None),
        layers=records,
        memory=values.MemoryRecord(
            resident_bytes=2 * MIB,
            slot_bytes=MIB,
            device_peak_bytes=3 * MIB,
            activation_peak_bytes=more.get("activations"),
            locked_bytes=5 * MIB,
            copied_bytes=6,
            staging_bytes=7,
        ),
        traffic=values.TrafficRecord(10, 20 * MIB, 8, 2, 1),
        block_lists=("blocks",),
        streamable_layers=len(records),
        notes=("a note of the model",),
    )
    name = more.get("name", "tiny")
    asked = service.AskedBudget(values.Budget(5 * MIB, 0), service.AskedBy.ORDER, True)
    return service.ModelRecord("tiny-1", name, f"{name}.safetensors", snapshot, asked)


LAYERS = [
    ("blocks.0", 512 << 10, "resident", False),
    ("blocks.1", 512 << 10, "pinned", True),
    ("blocks.2", 512 << 10, "pinned", True),
    ("blocks.3", 256 << 10, "pinned", True),
    ("blocks.4", 512 << 10, "mapped", False),
    ("blocks.5", 512 << 10, "pageable", False),
]


def test_status_has_exactly_the_agreed_shape(wire: Any, make_record: MakeRecord) -> None:
    body = json.loads(json.dumps(wire.status_json(make_record(LAYERS[:2])), allow_nan=False))
    model = body["models"][0]
    layers = model.pop("layers")
    assert model == {
        "id": "tiny-1",
        "name": "tiny",
        "file": "tiny.safetensors",
        "kind": "diffusion model",
        "loader": {"class": "", "inputs": {}},
        "state": "loaded",
        "budgets": {"device_bytes": 4 * MIB, "host_bytes": None},
        "asked": {
            "device_bytes": 5 * MIB,
            "host_bytes": 0,
            "shared": False,
            "by": "order",
            "waits": True,
        },
        "measured": {
            "device_bytes": 3 * MIB,
            "device_peak_bytes": 3 * MIB,
            "activation_peak_bytes": None,
            "host_locked_bytes": 5 * MIB,
            "host_copied_bytes": 6,
            "host_locked_copy_bytes": 0,
            "host_staging_bytes": 7,
        },
        "counts": {"resident": 1, "pinned": 1, "mapped": 0, "pageable": 0},
        "bytes": {"resident": 512 << 10, "pinned": 512 << 10, "mapped": 0, "pageable": 0},
        "block_lists": ["blocks"],
        "streamable_layers": 2,
        "traffic": {
            "layers_shipped": 10,
            "shipped_bytes": 20 * MIB,
            "prefetch_hits": 8,
            "prefetch_misses": 2,
            "prefetches_discarded": 1,
        },
        "notes": ["a note of the model"],
    }
    assert layers[1] == {
        "name": "blocks.1",
        "bytes": 512 << 10,
        "resident_bytes": 0,
        "locked_bytes": 0,
        "placement": "pinned",
        "in_place": True,
        "reason": "why pinned",
        "state": "absent",
        "dtypes": ["bfloat16", "float32"],
    }
    del body["models"]
    assert body == {
        "version": "0.1.0",
        "boot_id": "b" * 32,
        "device": {
            "name": "cuda:0",
            "type": "cuda",
            "total_bytes": 12 << 30,
            "free_bytes": 3 << 30,
        },
        "host": {
            "total_bytes": 32 << 30,
            "available_bytes": 20 << 30,
            "limit_bytes": 35 << 30,
            "source": "memory.max of control group /",
        },
        "notes": ["a note of the service"],
    }


def test_real_engine_passes_through_json_unchanged(
    wire: Any, service: Any, backend: Any, make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(blocks=3)
    service.register(engine, "模型", "模型 x.safetensors", backend)
    body = wire.status_json(service.status())
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    model = body["models"][0]
    assert (model["name"], model["file"]) == ("模型", "模型 x.safetensors")
    assert [layer["name"] for layer in model["layers"][:3]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert sum(model["counts"].values()) == len(model["layers"])


def test_table_shows_machine_budgets_and_every_layer(wire: Any, make_record: MakeRecord) -> None:
    assert wire.status_text(make_record(LAYERS, activations=9 * MIB)).splitlines() == [
        "Courier 0.1.0",
        "device  3.00 GiB free of 12.00 GiB (cuda:0)",
        "host    20.00 GiB available of 32.00 GiB (memory.max of control group /)",
        "! a note of the service",
        "",
        "tiny: loaded",
        "  file     tiny.safetensors",
        "  id       tiny-1",
        "  layers   6 streamable layers in blocks",
        "  placed   1 resident (512.00 KiB), 3 pinned (1.25 MiB), 1 mapped (512.00 KiB), "
        "1 pageable (512.00 KiB)",
        "  shipped  10 layers, 20.00 MiB (prefetched in time 8, missed 2, discarded 1)",
        "  ! a note of the model",
        "",
        "  memory                    budget       now      peak",
        "  device: weights, slots  4.00 MiB  3.00 MiB  3.00 MiB",
        "  device: activations                         9.00 MiB",
        "  host: page-locked           auto  5.00 MiB",
        "  host: copied                           6 B",
        "  host: staging                          7 B",
        "",
        "  layer                               size  resident  placement         why",
        "  blocks.0                      512.00 KiB      100%  resident          why resident",
        "  blocks.1 - 2 (2 layers)  512.00 KiB each        0%  pinned, in place  why pinned",
        "  blocks.3                      256.00 KiB        0%  pinned, in place  why pinned",
        "  blocks.4                      512.00 KiB        0%  mapped            why mapped",
        "  blocks.5                      512.00 KiB        0%  pageable          why pageable",
    ]


def test_neighbours_of_two_lists_keep_both_names(wire: Any, make_record: MakeRecord) -> None:
    layers = [("double.18", MIB, "mapped", False), ("single.0", MIB, "mapped", False)]
    assert "double.18 - single.0 (2 layers)" in wire.status_text(make_record(layers))


def test_forty_alike_layers_take_one_line(wire: Any, make_record: MakeRecord) -> None:
    layers = [(f"blocks.{index}", 670 * MIB, "mapped", False) for index in range(40)]
    text = wire.status_text(make_record(layers))
    assert "  blocks.0 - 39 (40 layers)  670.00 MiB each        0%  mapped     why mapped" in text
    assert text.count("blocks.") == 1


def test_a_layer_that_streams_in_part_counts_with_each_part_where_it_rests(
    wire: Any, make_record: MakeRecord
) -> None:
    layers = [(f"blocks.{index}", 4 * MIB, "pinned", True) for index in range(2)]
    record = make_record(layers, in_part=MIB)
    model = wire.status_json(record)["models"][0]
    assert model["counts"]["pinned"] == 2
    assert model["bytes"] == {"resident": 2 * MIB, "pinned": 6 * MIB, "mapped": 0, "pageable": 0}
    assert [layer["resident_bytes"] for layer in model["layers"]] == [MIB, MIB]
    text = wire.status_text(record)
    assert "2 pinned (6.00 MiB), 2.00 MiB of the layers that stream are resident" in text
    assert "4.00 MiB each       25%  pinned, in place" in text


def test_a_mapped_layer_that_is_locked_in_part_counts_with_that_part_as_pinned(
    wire: Any, make_record: MakeRecord
) -> None:
    layers = [(f"blocks.{index}", 4 * MIB, "mapped", False) for index in range(2)]
    record = make_record(layers, in_part=2 * MIB, locked=MIB // 2)
    model = wire.status_json(record)["models"][0]
    assert (model["counts"]["pinned"], model["counts"]["mapped"]) == (0, 2)
    assert model["bytes"] == {
        "resident": 4 * MIB,
        "pinned": MIB,
        "mapped": 3 * MIB,
        "pageable": 0,
    }
    assert [layer["locked_bytes"] for layer in model["layers"]] == [MIB // 2] * 2
    text = wire.status_text(record)
    assert "2 mapped (3.00 MiB)" in text
    assert "1.00 MiB of the mapped layers are pinned" in text
    assert "4.00 MiB each       50%  mapped, 25% pinned in place" in text
    # More may be locked than streams: locks of an earlier plan are kept while there is room.
    more = wire.status_json(make_record(layers, in_part=3 * MIB, locked=2 * MIB))["models"][0]
    assert (more["bytes"]["pinned"], more["bytes"]["mapped"]) == (2 * MIB, 0)


def test_without_models_the_table_says_so(wire: Any, make_record: MakeRecord) -> None:
    assert wire.status_text(make_record()).endswith("\n\nNo model is loaded with Courier.")


def test_model_without_layers_is_shown(wire: Any, make_record: MakeRecord) -> None:
    text = wire.status_text(make_record([]))
    assert "  layers   0 streamable layers in blocks" in text
    assert "  placed   nothing" in text


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\u202eb", "a\u2028b"])
def test_name_cannot_break_the_table(wire: Any, make_record: MakeRecord, name: str) -> None:
    lines = wire.status_text(make_record(LAYERS, name=name)).split("\n")
    assert any(line.startswith("a?") and line.endswith("b: loaded") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_only_names_bring_in_more_than_ascii(wire: Any, make_record: MakeRecord) -> None:
    text = wire.status_text(make_record(LAYERS, name="模型 🐎"))
    assert "模型 🐎: loaded" in text
    assert text.replace("模型 🐎", "").isascii()


def test_unknown_device_is_said_to_be_unknown(wire: Any, service: Any) -> None:
    record = service.status()
    assert wire.status_json(record)["device"] == {
        "name": None,
        "type": None,
        "total_bytes": None,
        "free_bytes": None,
    }
    assert "device  not known" in wire.status_text(record)
