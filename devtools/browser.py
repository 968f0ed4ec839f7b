"""A Chromium and the proxies for the tests: found, or installed where we may."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from devtools.console import DevError, Progress

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
UPDATE = ("apt-get", "update", "-q")
INSTALL = ("apt-get", "install", "-y", "-q")
SERVERS = {"nginx": "nginx-light", "caddy": "caddy", "openssl": "openssl"}
"""Programs that the tests of the HTTP door start, by Debian's packages."""


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome; CHROMIUM_PATH goes first."""
    named = os.environ.get("CHROMIUM_PATH")
    if named:
        if not Path(named).is_file():
            raise DevError(f"CHROMIUM_PATH names {named}, which is not a file")
        return named
    return next((path for path in map(shutil.which, NAMES) if path), None)


def may_install() -> bool:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return is_root and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def ensure_chromium() -> str:
    """Find one, or install Debian's where we are root there; otherwise say what to install."""
    found = find_chromium()
    if found:
        return found
    if not may_install():
        raise DevError(
            "the panel's tests need Chromium or Chrome and none was found; install one (on Debian "
            "as root: apt-get install chromium) or name it in CHROMIUM_PATH"
        )
    _install("Chromium", ["chromium"])
    found = find_chromium()
    if not found:
        raise DevError("apt-get installed chromium, and still there is no chromium to run")
    return found


def ensure_servers() -> None:
    """nginx, Caddy and openssl; the same, but without a word where they are."""
    missing = {name: package for name, package in SERVERS.items() if _server(name) is None}
    if not missing:
        return
    names, packages = ", ".join(missing), " ".join(missing.values())
    if not may_install():
        raise DevError(
            f"the tests of the HTTP door need {names}; install them (on Debian as root: apt-get "
            f"install {packages})"
        )
    _install(names, list(missing.values()))


def _server(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _install(what: str, packages: list[str]) -> None:
    with Progress(f"Installing {what}") as progress:
        _run(list(UPDATE), progress)
        _run([*INSTALL, *packages], progress)


def _run(command: list[str], progress: Progress) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # RUNLEVEL: what is installed is not to be started as a service, which listens to everybody.
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"},
    )
    assert process.stdout is not None
    tail: list[str] = []
    with process.stdout:
        for line in process.stdout:
            tail = [*tail[-9:], line.rstrip()]
            progress.show(line.strip())
    if process.wait():
        raise DevError(f"{' '.join(command)} failed:\n" + "\n".join(tail))
