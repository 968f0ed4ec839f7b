"""The host's own duties, with small programs in ComfyUI's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from devtools.comfyui_host import ComfyUIHost
from devtools.comfyui_install import ComfyUIProgram
from devtools.console import DevError

ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
SILENT = "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
IGNORES_TERMINATE = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ANSWERS
DIES = "import sys\nprint('no such module: av')\nsys.exit(3)\n"


def host_of(folder: Path, main: str) -> ComfyUIHost:
    (folder / "main.py").write_text(main)
    program = ComfyUIProgram(folder, Path(sys.executable), None)
    return ComfyUIHost(program, folder / "base", folder / "logs" / "host.log", cpu=True)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def test_command_keeps_to_loopback_and_base(tmp_path: Path) -> None:
    command = host_of(tmp_path, "").command()
    assert command[command.index("--listen") + 1] == "127.0.0.1"
    assert command[command.index("--base-directory") + 1] == str(tmp_path / "base")
    assert "--cpu" in command
    assert "--front-end-root" not in command


def test_started_host_answers_and_leaving_ends_it(tmp_path: Path) -> None:
    with host_of(tmp_path, ANSWERS) as host:
        pid = host.pid
        assert pid is not None
        assert host.client.is_up()
        with pytest.raises(DevError, match="was started already"):
            host.start()
    assert not is_alive(pid)
    assert host.stop() is None


def test_process_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(DevError, match=r"(?s)exit status 3.*no such module: av"):
        host_of(tmp_path, DIES).start()


def test_process_that_never_answers_is_ended_and_reported(tmp_path: Path) -> None:
    host = host_of(tmp_path, SILENT)
    with pytest.raises(DevError, match=r"(?s)did not answer on .* within 1 s.*loading"):
        host.start(timeout_seconds=1.0)
    assert host.pid is None


@pytest.mark.skipif(os.name == "nt", reason="terminate always ends a process there")
def test_process_that_will_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devtools.comfyui_host.STOP_SECONDS", 0.2)
    host = host_of(tmp_path, IGNORES_TERMINATE).start()
    pid = host.pid
    assert pid is not None
    assert host.stop() == -9
    assert not is_alive(pid)


def test_unstarted_host_is_not_alive(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="has not been started"):
        host_of(tmp_path, "").check_alive()
