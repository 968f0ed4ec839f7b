from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HOSTILE_NAMES = [
    "模型 🐎.safetensors",
    "<img src=x onerror=alert(1)>.safetensors",
    "ä b (1).safetensors",
    "line\nbreak.safetensors",
    "../../etc/passwd",
    "C:\\models\\x.safetensors",
    "no-utf8-\udcff.safetensors",
    "x" * 250 + ".safetensors",
    ".safetensors",
    "",
    "%2e%2e",
]

MakeEngine = Callable[..., Any]
PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.parametrize("file", HOSTILE_NAMES)
def test_id_is_short_ascii_fit_for_a_url(
    service: Any, make_engine: MakeEngine, backend: Any, file: str
) -> None:
    engine = make_engine()
    model_id = service.register(engine, "name", file, backend)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", model_id)
    assert len(model_id) <= 50


def test_id_is_made_of_the_file_stem(service: Any, make_engine: MakeEngine, backend: Any) -> None:
    engine = make_engine()
    file = "wan2.1_t2v_14B_bf16.safetensors"
    assert service.register(engine, "wan", file, backend) == "wan2-1-t2v-14b-bf16-1"


def test_one_file_loaded_twice_has_two_ids(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    first, second = make_engine(), make_engine()
    ids = {service.register(engine, "m", "m.safetensors", backend) for engine in (first, second)}
    assert ids == {"m-1", "m-2"}
    assert [model.id for model in service.status().models] == ["m-1", "m-2"]


def test_id_is_never_given_twice(service: Any, make_engine: MakeEngine, backend: Any) -> None:
    engine = make_engine()
    service.register(engine, "m", "m.safetensors", backend)
    del engine
    gc.collect()
    assert service.status().models == ()
    engine = make_engine()
    assert service.register(engine, "m", "m.safetensors", backend) == "m-2"


def test_registering_again_changes_nothing(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engine = make_engine()
    first = service.register(engine, "m", "m.safetensors", backend)
    assert service.register(engine, "other", "other.safetensors", backend) == first
    assert [model.name for model in service.status().models] == ["m"]


def test_dead_engine_vanishes_by_itself(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engine = make_engine()
    service.register(engine, "m", "m.safetensors", backend)
    record = service.status()
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    # Also a record that somebody still holds must not keep the model.
    assert record.models[0].id == "m-1"
    assert alive() is None
    assert service.status().models == ()
    assert service.status_of("m-1") is None


def test_detached_engine_is_no_model_any_more(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engine = make_engine()
    model_id = service.register(engine, "m", "m.safetensors", backend)
    engine.detach()
    assert service.status().models == ()
    assert service.status_of(model_id) is None


def test_model_is_found_by_id_and_by_engine(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engine, stranger = make_engine(), make_engine()
    model_id = service.register(engine, "m", "m.safetensors", backend)
    assert service.status_of(model_id).name == "m"
    assert service.status_of_engine(engine).id == model_id
    assert service.status_of_engine(stranger) is None
    assert service.status_of("../../x") is None


@pytest.mark.parametrize("file", ["/home/me/models/m.safetensors", "D:\\me\\m.safetensors"])
def test_only_the_base_name_of_a_file_is_kept(
    service: Any, make_engine: MakeEngine, backend: Any, file: str
) -> None:
    engine = make_engine()
    service.register(engine, "m", file, backend)
    assert service.status().models[0].file == "m.safetensors"


def test_file_name_that_is_no_utf8_can_be_sent(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engine = make_engine()
    service.register(engine, "m-\udcff", "m-\udcff.safetensors", backend)
    (model,) = service.status().models
    assert model.file.encode("utf-8").startswith(b"m-")
    assert model.name.encode("utf-8").startswith(b"m-")


def test_device_is_the_models_own(service: Any, make_engine: MakeEngine, backend: Any) -> None:
    engine = make_engine()
    service.use_device_probe(lambda: pytest.fail("the models' own device was to be asked"))
    service.register(engine, "m", "m.safetensors", backend)
    device = service.status().device
    assert (device.name, device.type) == ("cpu", "cpu")
    assert device.total_bytes == backend.memory().total_bytes


def test_device_is_probed_while_there_is_no_model(pack: Any) -> None:
    memory = pack.module("offload_core.device").DeviceMemory(total_bytes=8, free_bytes=5)
    probe = lambda: (torch.device("cuda", 1), memory)  # noqa: E731
    device = pack.module("nodes.models.registry").CourierService(device_probe=probe).status().device
    assert (device.name, device.type) == ("cuda:1", "cuda")
    assert (device.total_bytes, device.free_bytes) == (8, 5)


def test_driver_in_trouble_is_a_note_and_no_error(service: Any) -> None:
    def probe() -> Any:
        raise RuntimeError("CUDA error: unknown error")

    service.use_device_probe(probe)
    record = service.status()
    assert record.device.total_bytes is None
    expected = "the device's memory could not be read (RuntimeError: CUDA error: unknown error)"
    assert record.notes == (expected,)


def test_unreadable_model_does_not_hide_the_others(
    service: Any, make_engine: MakeEngine, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = make_engine(), make_engine()
    service.register(broken, "broken", "a.safetensors", backend)
    service.register(sound, "sound", "b.safetensors", backend)

    def snapshot() -> Any:
        raise KeyError(3)

    monkeypatch.setattr(broken, "snapshot", snapshot)
    record = service.status()
    assert [model.name for model in record.models] == ["sound"]
    assert record.notes == ("broken: its status could not be read (KeyError: 3)",)


def test_model_of_choice_goes_first_and_the_others_keep_their_order(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engines = [make_engine() for _ in range(3)]
    ids = [service.register(engine, "m", "m.safetensors", backend) for engine in engines]
    ordered = service.status().with_first(ids[1])
    assert [model.id for model in ordered.models] == [ids[1], ids[0], ids[2]]


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads change places between almost any two steps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
def test_registration_from_many_threads_gives_each_its_id(
    service: Any, make_engine: MakeEngine, backend: Any
) -> None:
    engines = [make_engine(1) for _ in range(64)]
    gate = threading.Barrier(len(engines))
    ids: list[str] = []

    def register(engine: Any) -> None:
        gate.wait()
        ids.append(service.register(engine, "m", "m.safetensors", backend))
        service.status()

    threads = [threading.Thread(target=register, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == len(engines)
    assert {model.id for model in service.status().models} == set(ids)


def test_there_is_one_service_and_it_is_made_when_asked_for(pack: Any, other_pack: Any) -> None:
    module = pack.module("nodes.models.registry")
    assert module.get_service() is module.get_service()
    other = other_pack.module("nodes.models.registry").get_service()
    assert other.boot_id != module.get_service().boot_id


def test_version_is_that_of_the_project(pack: Any) -> None:
    line = f'version = "{pack.module("nodes.models.registry").VERSION}"'
    assert line in PROJECT.read_text(encoding="utf-8").splitlines()
