#!/usr/bin/env python3
"""Set up, show, check and measure ComfyUI-Courier in this checkout; nothing else is touched.

Needs Python 3.11 or newer and, for the first run, the package index and about 3 GB of disk (some
5 GB more where torch comes with CUDA libraries). Everything goes into .venv and .comfyui, which
git ignores.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from devtools.console import DevError, say
from devtools.environment import check_python, ensure_environment
from devtools.paths import checkout

COMMANDS = {
    "demo": "start a real ComfyUI, run a workflow with streamed weights, show every layer's place",
    "test": "run everything that CI runs; further arguments go to pytest",
    "lint": "ruff, and mypy on the core",
    "bench": "time and memory of a 1.1 GB model, stock loader against courier",
    "clean": "remove the environment, ComfyUI, the small models and caches",
}


def add_comfyui_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which ComfyUI (default: an embedded 0.3.75)")
    group.add_argument("--comfyui", metavar="PATH", help="a ComfyUI of yours; or set COMFYUI_PATH")
    group.add_argument(
        "--comfyui-python",
        metavar="FILE",
        help="the interpreter with that ComfyUI's requirements (default: the one in .venv)",
    )
    group.add_argument("--front-end-root", metavar="PATH", help="a frontend's static folder")
    group.add_argument(
        "--comfyui-args",
        metavar="ARGS",
        default="",
        help='more for its command line: --comfyui-args="--a --b"',
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in COMMANDS.items()
    }
    for name in ("demo", "test", "bench"):
        add_comfyui_options(parsers[name])
    parsers["demo"].add_argument("--serve", action="store_true", help="keep it up until Ctrl-C")
    parsers["demo"].add_argument("--port", type=int, help="for ComfyUI (default: a free one)")
    parsers["demo"].add_argument("--workflow", metavar="FILE", help="another one, in API form")
    parsers["bench"].add_argument("--steps", type=int, default=4, help="sampling steps (default 4)")
    parsers["clean"].add_argument(
        "--models", action="store_true", help="only the models (small and big)"
    )
    return parser


def run_in_environment(python: Path, arguments: list[str]) -> int:
    """Run this file again with the environment's interpreter."""
    command = [str(python), str(Path(__file__).resolve()), *arguments]
    if os.name == "posix":
        sys.stdout.flush()
        os.execv(command[0], command)
    return subprocess.call(command)


def run(arguments: list[str]) -> int:
    check_python()
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "test":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    paths = checkout()
    if options.command == "clean":
        from devtools.clean import clean

        return clean(paths, models_only=options.models)
    ensure_environment(paths)
    if Path(sys.prefix).resolve() != paths.venv.resolve():
        return run_in_environment(paths.venv_python, arguments)
    if options.command == "bench":
        # Here, for the benchmarks are built on the tools and the tools on none of them.
        from bench.quick import run_bench
        from devtools.prepared import prepare

        return run_bench(paths, prepare(paths, options), options.steps)
    from devtools.commands import run_command

    return run_command(paths, options, rest)


def main() -> int:
    # As an exception, so that every "finally" on the way ends the process that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(sys.argv[1:])
    except DevError as error:
        sys.stdout.flush()
        say(f"dev.py: {error}")
        return 1
    except KeyboardInterrupt:
        say("dev.py: stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
