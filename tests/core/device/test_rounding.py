"""The rounding kernel's launches, on a driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from offload_core.device import driver as driver_module
from offload_core.device import rounding
from offload_core.device.driver import DriverError


class Call:
    """One function of the driver; ``code`` is what it answers."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return self.code


class Launch(Call):
    """Reads the kernel's arguments while they are there."""

    def __call__(self, *arguments: Any) -> int:
        _, *shape, stream, values, extra = arguments
        address = ctypes.cast(values[0], ctypes.POINTER(ctypes.c_uint64))[0]
        units = ctypes.cast(values[1], ctypes.POINTER(ctypes.c_uint32))[0]
        return super().__call__(shape, stream.value, address, units, extra)


class Driver:
    def __init__(self, **codes: int) -> None:
        self.cuModuleLoadData = Call(codes.get("load", 0))
        self.cuModuleGetFunction = Call(codes.get("get", 0))
        self.cuLaunchKernel = Launch(codes.get("launch", 0))


def opened(monkeypatch: pytest.MonkeyPatch, **codes: int) -> Driver:
    driver = Driver(**codes)
    monkeypatch.setattr(driver_module, "_open", lambda name: driver)
    return driver


@pytest.mark.parametrize(
    ("units", "blocks"), [(1, 1), (255, 1), (256, 1), (257, 2), (2**28, 2**20)]
)
def test_every_unit_has_a_thread(monkeypatch: pytest.MonkeyPatch, units: int, blocks: int) -> None:
    driver = opened(monkeypatch)
    rounding.load().round(4096, units, 77)
    shape = [blocks, 1, 1, 256, 1, 1, 0]
    assert driver.cuLaunchKernel.calls == [(shape, 77, 4096, units, None)]


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(monkeypatch)
    rounding.load().round(4096, 0, 0)
    assert driver.cuLaunchKernel.calls == []


def test_the_program_is_text_that_names_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(monkeypatch)
    rounding.load()
    program = driver.cuModuleLoadData.calls[0][1].decode("ascii")
    name = driver.cuModuleGetFunction.calls[0][2].decode("ascii")
    assert f".visible .entry {name}(" in program
    assert program.count("cvt.rn.f16.f32") == rounding.UNIT_BYTES // 2
    assert program.count("{") == program.count("}")


@pytest.mark.parametrize(
    ("refused", "named"), [("load", "cuModuleLoadData"), ("get", "cuModuleGetFunction")]
)
def test_a_driver_that_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, refused: str, named: str
) -> None:
    opened(monkeypatch, **{refused: 218})
    with pytest.raises(DriverError, match=f"{named} answered 218"):
        rounding.load()


def test_a_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened(monkeypatch, launch=700)
    rounder = rounding.load()
    with pytest.raises(DriverError, match="cuLaunchKernel answered 700"):
        rounder.round(4096, 1, 0)


def test_a_machine_without_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_LIBRARY", "no-such-library.so.1")
    with pytest.raises(DriverError, match="cannot be opened"):
        rounding.load()


def test_a_library_without_these_functions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_open", lambda name: object())
    with pytest.raises(DriverError, match="of another kind"):
        rounding.load()
