"""The command without a server: what it imports, what it refuses, and how it speaks."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..conftest import COMMAND, ROOT, Headless

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}


def run(
    *arguments: str | bytes, folder: Path | None = None, data: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, str(COMMAND), *arguments],
        cwd=folder,
        input=data,
        env={**os.environ, "COURIER_SERVER": "http://127.0.0.1:9", **environment},
        capture_output=True,
        timeout=60,
    )


def test_help_names_every_command_and_every_exit_status() -> None:
    done = run("--help")
    text = done.stdout.decode()
    assert (done.returncode, done.stderr) == (0, b"")
    for name in ("run", "check", "convert", "status", "runs", "cancel", "sleep", "wake", "plan"):
        assert f"\n    {name} " in text
    assert "130  stopped with Ctrl-C" in text
    for name in ("run", "plan", "sleep"):
        assert run(name, "--help").returncode == 0


@pytest.mark.parametrize("how", ["import courier", "from courier import *", "import courier as c"])
def test_the_client_comes_without_torch_comfyui_aiohttp_or_the_packs_door(
    tmp_path: Path, how: str
) -> None:
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); {how}; import courier;"
        "bad = {'torch', 'aiohttp', 'nodes', 'comfy', 'server', 'execution', 'PIL', 'safetensors'};"
        "assert not bad & set(sys.modules), bad & set(sys.modules);"
        "door = [m for m in sys.modules.values() if getattr(m, 'comfy_entrypoint', 0)];"
        "assert not door; import threading; assert threading.active_count() == 1;"
        "print(courier.CourierClient, courier.AsyncCourierClient, sorted(courier.__all__)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_called_nodes_of_somebody_else_is_not_disturbed(tmp_path: Path) -> None:
    """ComfyUI's own is called so, and a program may run beside it."""
    (tmp_path / "nodes.py").write_text("whose = 'theirs'\n")
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import nodes, courier;"
        "assert nodes.whose == 'theirs'; courier.CourierClient('http://x')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_door_lists_what_it_gives() -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r}); import courier; print(courier.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = eval(done.stdout)
    ranks = [(not name.isupper(), not name[0].isupper(), name) for name in names]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(("arguments", "words"), [
    ((), "required: COMMAND"),
    (("dance",), "invalid choice"),
    (("run",), "required: workflow"),
    (("run", "x.json", "--vram", "2GB"), "is no number of GiB"),
    (("run", "x.json", "--vram", "-1"), "is not between 0 and 4096"),
    (("run", "x.json", "--vram", "nan"), "is not between 0 and 4096"),
    (("run", "x.json", "--time-limit", "0"), "is no number of seconds"),
    (("run", "x.json", "--sleep-after", "3"), "invalid choice"),
    (("run", "x.json", "--server", "a", "--comfyui", "b"), "not allowed with"),
    (("sleep", "--level", "9"), "invalid choice"),
    (("status", "--server", "ftp://x"), "is no address"),
    (("plan", "x", "--card", "12", "--vram", "3"), "not allowed with"),
    (("run", "x.json", "--no-wait", "--save", "out"), "--no-wait goes before"),
    (("run", "x.json", "--no-wait", "--comfyui", "."), "--no-wait goes before"),
])  # fmt: skip
def test_options_that_cannot_be_meant_end_with_2_and_one_sentence(
    arguments: tuple[str, ...], words: str
) -> None:
    done = run(*arguments)
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in text
    assert len(text.splitlines()) == 1
    told = json.loads(run(*arguments, "--json").stdout)
    assert (told["exit_status"], told["error"]["code"]) == (2, "usage")


def test_a_file_that_is_none_ends_with_3_and_asks_nobody(tmp_path: Path) -> None:
    for name in ("run", "check", "convert"):
        done = run(name, str(tmp_path / "no.json"))
        assert done.returncode == 3
        assert done.stderr.decode().strip().endswith("no.json does not exist")
    assert run("check", "-", data=b"[]").returncode == 3


def test_nobody_there_ends_with_5(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"1": {"class_type": "X", "inputs": {}}}')
    for arguments in (("run", str(file)), ("status",), ("wake",), ("cancel", "x")):
        done = run(*arguments, "--json")
        told = json.loads(done.stdout)
        assert (done.returncode, told["error"]["code"]) == (5, "no_answer"), done


@pytest.mark.parametrize("words", ["--port 1", "--port=1", "--cpu --listen 0.0.0.0"])
def test_where_it_listens_is_not_for_the_user_to_choose(
    headless: Headless, tmp_path: Path, words: str
) -> None:
    (tmp_path / "main.py").write_text("")
    find_program = headless.module("client.launch").find_program
    with pytest.raises(headless.courier.UsageError, match="this command chooses it itself"):
        find_program(str(tmp_path), None, words.split())
    assert find_program(str(tmp_path), None, ["--portable"]).extra == ("--portable",)


def test_a_python_beside_us_is_started_in_comfyuis_folder_too(
    headless: Headless, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "comfyui"
    folder.mkdir()
    (folder / "main.py").write_text("import no_such_package_at_all")
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    launch = headless.module("client.launch")
    program = launch.find_program("comfyui", "./python", [])
    assert program.python == str(tmp_path / "python"), "the link, which an environment is known by"
    with (
        pytest.raises(headless.courier.HeadlessError) as caught,
        launch.running(program),
    ):
        pass
    assert "No module named 'no_such_package_at_all'" in str(caught.value)
    assert f"{program.python} lacks what ComfyUI needs" in str(caught.value)


@pytest.mark.parametrize(("words", "said"), [
    (("--save", str(COMMAND)), "is no folder"),
    (("--on-use", "wake"), "--on-use is for models that --sleep-after puts to sleep"),
])  # fmt: skip
def test_what_would_be_known_too_late_is_said_first(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"1": {"class_type": "X", "inputs": {}}}))
    done = run("run", str(file), *words)
    assert done.returncode == 2
    assert said in done.stderr.decode()


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


def test_what_cannot_be_said_changes_nothing(headless: Headless) -> None:
    console = headless.module("cli.console").Console(False, error=Full())
    console.note("a word")
    console.progress(headless.courier.Run.from_json({"id": "x", "state": "queued"}))
    console.failure(headless.courier.UsageError("another"))


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_descriptors_are_no_error_of_ours(closed: int) -> None:
    words = ["check", "-"] if closed == 0 else ["status"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", sys.executable, str(COMMAND), *words],
        env={**os.environ, "COURIER_SERVER": "http://127.0.0.1:9"},
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == (3 if closed == 0 else 5)
    assert b"Traceback" not in done.stderr


def test_a_folder_that_is_no_comfyui(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"1": {"class_type": "X", "inputs": {}}}')
    done = run("run", str(file), "--comfyui", str(tmp_path))
    assert done.returncode == 2
    assert "there is no main.py" in done.stderr.decode()
    (tmp_path / "main.py").write_text("print('hello from it'); raise SystemExit(7)")
    done = run("run", str(file), "--comfyui", str(tmp_path), "--comfyui-python", sys.executable)
    assert done.returncode == 1
    assert "ComfyUI ended with 7 instead of starting" in done.stderr.decode()
    assert "hello from it" in done.stderr.decode()


# CASES 46, 48: other encodings, other folders, names as people have them


@pytest.mark.parametrize("environment", [{}, C_LOCALE], ids=["as it is", "LC_ALL=C"])
def test_names_and_words_in_any_encoding(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "模型 x" / "ä b"
    folder.mkdir(parents=True)
    (folder / "a 🐎 (1).json").write_text("[]")
    for path in ("ä b/a 🐎 (1).json", str(folder / "a 🐎 (1).json")):
        done = run("check", path.encode(), folder=folder.parent, **environment)
        assert done.returncode == 3
        text = done.stderr.decode()
        shown = "a 🐎 (1).json" if not environment else "a \\U0001f40e (1).json"
        assert f"{shown} is JSON, but a list and no workflow" in text
    told = json.loads(run("check", "ä b/n 猫.json".encode(), "--json", folder=folder.parent,
                          **environment).stdout)  # fmt: skip
    assert told["error"]["message"] == "ä b/n 猫.json does not exist"


def test_text_arguments_are_read_as_utf8_whatever_the_locale(headless: Headless) -> None:
    text_of = headless.module("text").text_of
    assert text_of("猫") == "猫"
    assert text_of("猫".encode().decode("ascii", "surrogateescape")) == "猫"
    text_of("\ud800").encode()


# Progress


def events(headless: Headless) -> list[Any]:
    run_from = headless.courier.Run.from_json
    node = {"id": "7", "class_type": "KSampler", "title": "Sam\npler", "step": 0, "steps": 20}
    running = {"id": "x", "state": "running", "nodes": 10, "nodes_done": 4}
    return [
        run_from({"id": "x", "state": "queued", "ahead": 2}),
        run_from(running),
        *(run_from({**running, "node": {**node, "step": step}}) for step in (5, 20)),
        run_from({"id": "x", "state": "done"}),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_and_no_more_than_places(headless: Headless) -> None:
    error = io.StringIO()
    console = headless.module("cli.console").Console(as_json=False, error=error)
    for event in events(headless):
        console.progress(event)
    assert error.getvalue().splitlines() == [
        "queued, 2 before it",
        "running  4/10 nodes",
        "running  4/10 nodes  node 7 Sam pler 5/20",
        "done",
    ]


def test_a_terminal_gets_a_bar_that_grows_and_goes(headless: Headless) -> None:
    error = Terminal()
    console = headless.module("cli.console").Console(as_json=False, error=error)
    for event in events(headless):
        console.progress(event)
    console.clear()
    drawn = error.getvalue().split("\r")
    bars = [text for text in drawn if text.startswith("[")]
    filled = [text.count("#") for text in bars]
    assert len(bars) == 2
    assert 0 < filled[0] < filled[1] < 24
    assert "Sam pler 20/20" in bars[1]
    assert drawn[-2].strip() == ""
    quiet = Terminal()
    console = headless.module("cli.console").Console(as_json=False, quiet=True, error=quiet)
    for event in events(headless):
        console.progress(event)
    console.note("hello")
    assert quiet.getvalue() == ""


# Files that come back


@pytest.mark.parametrize(("name", "safe"), [
    ("a.png", "a.png"), ("../../etc/passwd", "passwd"), ("..\\..\\x.png", "x.png"), ("..", "file"),
    ("C:x.png", "C_x.png"), ("a\0b.png", "a_b.png"), ("", "file"), ("猫 x.png", "猫 x.png"),
    ("nul:", "nul_"), (".", "file"), ("a/..", "file"),
])  # fmt: skip
def test_a_file_stays_in_its_folder(headless: Headless, name: str, safe: str) -> None:
    assert headless.module("cli.saving").safe_name(name) == safe


def test_no_file_is_replaced(headless: Headless, tmp_path: Path) -> None:
    courier = headless.courier
    shown = [{"filename": "a.png"}, {"filename": "a.png"}, {"filename": "sub/a"}]
    run = courier.Run.from_json({"id": "x", "state": "done", "outputs": {"9": {"images": shown}}})

    class Client:
        def download(self, file: Any) -> bytes:
            return f"{file.filename}".encode()

    save = headless.module("cli.saving").save_files
    saved = save(Client(), run, tmp_path / "new" / "folder")
    assert [path.name for path in saved] == ["a.png", "a (1).png", "a"]
    again = save(Client(), run, tmp_path / "new" / "folder")
    assert [path.name for path in again] == ["a (2).png", "a (3).png", "a (1)"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(courier.UsageError, match="--save"):
        save(Client(), run, blocked)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_is_said_with_the_file_that_is_not_there(
    headless: Headless, tmp_path: Path
) -> None:
    courier, saving = headless.courier, headless.module("cli.saving")
    shown = [{"filename": "a.png"}]
    run = courier.Run.from_json({"id": "x", "state": "done", "outputs": {"9": {"images": shown}}})

    class Client:
        def download(self, file: Any) -> bytes:
            return b"picture"

    class Full(type(tmp_path)):  # type: ignore[misc]
        def open(self, *arguments: Any, **more: Any) -> Any:
            super().open(*arguments, **more).close()
            return Path("/dev/full").open("wb")

    with pytest.raises(courier.HeadlessError, match=r"a\.png: No space left") as caught:
        saving.save_files(Client(), run, Full(tmp_path / "out"))
    assert caught.value.exit_status == 1
    assert list((tmp_path / "out").iterdir()) == []


# What should not happen


def test_a_cancel_waits_for_its_turn(headless: Headless, monkeypatch: pytest.MonkeyPatch) -> None:
    module, refused = headless.module("cli.workflow_commands"), headless.courier.RefusedError
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.0)
    answers = [refused("later", 429, "too_many_requests")] * 3 + [None]

    class Client:
        def cancel(self, run_id: str) -> None:
            error = answers.pop(0)
            if error is not None:
                raise error

    module.in_turn(lambda: Client().cancel("x"))
    assert answers == []
    answers.append(refused("no", 403, "not_local"))
    with pytest.raises(refused, match="no"):
        module.in_turn(lambda: Client().cancel("x"))


def test_an_error_of_ours_is_json_too(
    headless: Headless, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = headless.module("cli.command")

    def fails(*_: object) -> int:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(command, "COMMANDS", {"status": fails})
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main(["status", "--json"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    told, trace = capsys.readouterr()
    assert (
        json.loads(told)["error"]["message"] == "an error of ours (ZeroDivisionError: by nothing)"
    )
    assert "Traceback" in trace


def test_a_token_that_no_request_can_hold_is_said() -> None:
    for token in ("猫", "a\nb"):
        done = run("status", COURIER_TOKEN=token)
        assert done.returncode == 2
        assert "the token has characters that no header can hold" in done.stderr.decode()
        assert "Traceback" not in done.stderr.decode()


def test_a_token_is_read_from_a_file_and_one_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = run("status", "--token-file", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "the file with the token cannot be read" in done.stderr.decode()
    file = tmp_path / "token"
    file.write_text("a\nb")
    done = run("status", "--token-file", str(file))
    assert "characters that no header can hold" in done.stderr.decode()


def test_a_reader_that_goes_away_is_no_error_worth_a_trace() -> None:
    process = subprocess.Popen(
        [sys.executable, str(COMMAND), "plan", "x", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert b"Traceback" not in error


# The room


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_takes_nothing_is_said(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, str(COMMAND), "check", str(tmp_path / "none.json"), "--json"],
            stdout=full, stderr=subprocess.PIPE, timeout=60,
        )  # fmt: skip
    assert done.returncode == 3, "what was wrong first"
    first, second = done.stderr.decode().splitlines()
    assert "none.json" in first
    assert second == "courier: standard output cannot be written: No space left on device"


def test_it_imports_the_standard_library_its_own_and_the_core_only() -> None:
    """What it takes of the pack's other rooms is named; torch is for the dry run alone."""
    allowed = {"offload_core", "nodes.headless", "nodes.default_budget"}
    for path in sorted((ROOT / "nodes" / "headless").rglob("*.py")):
        for name in imported(path):
            first = name.partition(".")[0]
            if first in ("nodes", "offload_core"):
                assert any(f"{name}.".startswith(f"{room}.") for room in allowed), f"{path}: {name}"
            elif first == "torch":
                assert path.name == "dry_run.py"
            elif first in ("aiohttp", "typing_extensions"):
                assert path.parts[-2:] in (("client", "async_client.py"), ("client", "blocking.py"))
            else:
                assert first in sys.stdlib_module_names, f"{path}: {name}"


def imported(path: Path) -> list[str]:
    """Full names of what a file of the room imports, relative ones resolved."""
    package = ["nodes", "headless", *path.parent.relative_to(ROOT / "nodes" / "headless").parts]
    found = []
    for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Import):
            found += [alias.name for alias in part.names]
        elif isinstance(part, ast.ImportFrom):
            # Above "nodes" is the pack itself.
            start = package[: max(0, len(package) - part.level + 1)] if part.level else []
            found.append(".".join([*start, *filter(None, [part.module])]))
    return found


def test_a_file_is_written_whole_and_what_is_none_is_written_through(
    headless: Headless, tmp_path: Path
) -> None:
    write = headless.module("cli.workflow_commands")._write
    fifo, target, link = tmp_path / "fifo", tmp_path / "target", tmp_path / "link"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write(fifo, "{}")
    assert os.read(reader, 10) == b"{}\n"
    assert fifo.is_fifo()
    os.close(reader)
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new\n")
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link", "target"]


def test_a_terminal_obeys_nothing_of_a_workflow(headless: Headless) -> None:
    error = io.StringIO()
    console = headless.module("cli.console").Console(False, error=error)
    console.note("node \x1b[31mred \u202e\nnext")
    console.failure(headless.courier.UsageError("class \x1b]0;title\x07"))
    assert error.getvalue() == "node  [31mred  \nnext\ncourier: class  ]0;title \n"
