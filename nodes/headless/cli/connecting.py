"""Which server a command talks to: one that runs, or one that it starts."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from ..client.blocking import CourierClient
from ..client.calls import token_in
from ..client.launch import find_program, running
from ..text import text_of
from .console import Console


@contextmanager
def client_of(options: argparse.Namespace, console: Console) -> Iterator[CourierClient]:
    """A client of it; what was started ends on leaving.

    Raises: UsageError, HeadlessError.
    """
    folder = getattr(options, "comfyui", None)
    if folder is None:
        file = options.token_file
        token = options.token if file is None else token_in(file)
        yield CourierClient(options.server, token, cacert=options.cacert)
        return
    extra = shlex.split(options.comfyui_args, posix=os.name != "nt")
    program = find_program(folder, options.comfyui_python, extra)
    console.note(f"starting ComfyUI in {text_of(str(program.folder))}")
    with running(program) as client:
        yield client
        console.note("ending ComfyUI")
