"""The command line: every option, and what it means."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ..errors import UsageError

_EXITS = """exit status:
  0  done                          5  no answer from the server, or no longer
  1  an error of ours              6  a node failed
  2  options that cannot be meant  7  cancelled, interrupted, or its time was up
  3  the file is no workflow       8  the server said no: busy, full, asleep, not allowed
  4  it does not fit this ComfyUI  130  stopped with Ctrl-C (the run is cancelled)"""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would end the process: --json has a form for that too."""

    def error(self, message: str) -> NoReturn:
        """Raises: UsageError."""
        raise UsageError(f"{message}; {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Of the whole command."""
    parser = Parser(
        prog="courier.py",
        description="ComfyUI workflows without a browser, under Courier's budgets.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(_command(commands, "run", "run a workflow and follow it to its end"))
    check = _command(commands, "check", "say everything that is wrong with a workflow")
    _add_workflow(check)
    convert = _command(commands, "convert", "write a workflow in API form")
    _add_workflow(convert)
    convert.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    for name, text in (("status", "every model, its layers and budgets"), ("runs", "every run")):
        _add_server(_command(commands, name, text))
    cancel = _command(commands, "cancel", "cancel a run")
    cancel.add_argument("id", help="of the run")
    _add_server(cancel)
    sleep = _command(commands, "sleep", "put models to sleep: they give the card back")
    _add_order(sleep)
    sleep.add_argument("--level", type=int, choices=(1, 2), default=1, help="2 gives RAM back too")
    sleep.add_argument("--on-use", choices=("refuse", "wake"), default="refuse", help=_ON_USE)
    _add_order(_command(commands, "wake", "wake models"))
    _add_plan(_command(commands, "plan", "say where the layers of a model's file would be"))
    return parser


_ON_USE = "what a prompt finds that needs a sleeping model (default: %(default)s)"


def _command(commands: Any, name: str, text: str) -> Parser:
    parser: Parser = commands.add_parser(name, help=text, description=f"{text}.")
    parser.add_argument("--json", action="store_true", help="one JSON value on standard output")
    parser.add_argument("--quiet", action="store_true", help="say nothing on the way")
    return parser


def _add_server(parser: Parser, may_start: bool = False) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--server",
        metavar="URL",
        help="http(s)://[user:password@]host[:port][/path]; default: COURIER_SERVER, or "
        "http://127.0.0.1:8188",
    )
    parser.add_argument(
        "--cacert", metavar="FILE",
        help="for https: certificates (PEM) to trust beside the system's; default: COURIER_CACERT",
    )  # fmt: skip
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--token-file",
        metavar="FILE",
        help="with the token for a server elsewhere; default: COURIER_TOKEN or COURIER_TOKEN_FILE",
    )
    token.add_argument("--token", help="itself; every user of this machine can read it meanwhile")
    if may_start:
        where.add_argument(
            "--comfyui", metavar="PATH", help="start the ComfyUI there, and end it afterwards"
        )
        parser.add_argument("--comfyui-python", metavar="FILE", help="the Python for it")
        parser.add_argument(
            "--comfyui-args", metavar="ARGS", default="", help='for it: --comfyui-args="--a --b"'
        )


def _add_workflow(parser: Parser) -> None:
    parser.add_argument("workflow", help="a .json (API form, or as the page saves it), a "
                        "picture or a video with one in it, or - for standard input")  # fmt: skip
    _add_server(parser, may_start=True)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE", dest="values",
        help="NODE is an id, a title or a class; may be given again",
    )  # fmt: skip
    parser.add_argument("--seed", help="of every node that has one: a number, or random")
    parser.add_argument(
        "--courier", action="store_true", help="Courier's loaders in the place of ComfyUI's own"
    )
    parser.add_argument(
        "--vram", type=_gib, metavar="GIB", help="of the card, for each model; 0: ComfyUI decides"
    )
    parser.add_argument("--ram", type=_gib, metavar="GIB", help="of RAM, for each model")
    parser.add_argument(
        "--together", action="store_true", help="--vram and --ram are for all models together"
    )


def _add_run(parser: Parser) -> None:
    _add_workflow(parser)
    parser.add_argument("--name", help="what the list of runs calls it; default: the file's name")
    parser.add_argument("--wake-before", action="store_true", help="wake models that sleep, first")
    parser.add_argument(
        "--sleep-after", type=int, nargs="?", const=1, default=0, choices=(1, 2), metavar="LEVEL",
        help="put all models to sleep afterwards, however it ends; 2 gives RAM back too",
    )  # fmt: skip
    parser.add_argument(
        "--on-use",
        choices=("refuse", "wake"),
        help="what a prompt finds afterwards that needs one of them (default: wake)",
    )
    parser.add_argument("--time-limit", type=_seconds, metavar="SECONDS", help="for the run itself")
    parser.add_argument("--save", metavar="FOLDER", help="put the pictures there")
    parser.add_argument("--no-wait", action="store_true", help="queue it and go")
    parser.add_argument(
        "--no-check", action="store_true", help="leave it to the server to find what is wrong"
    )


def _add_order(parser: Parser) -> None:
    parser.add_argument("models", nargs="*", help="ids from the list of models; default: all")
    parser.add_argument(
        "--when",
        choices=("now", "idle"),
        default="now",
        help="idle waits for the queue to be empty",
    )
    _add_server(parser)


def _add_plan(parser: Parser) -> None:
    parser.add_argument("model", help="a .safetensors file, one of its shards, or their index")
    card = parser.add_mutually_exclusive_group()
    card.add_argument("--card", type=_gib, metavar="GIB", help="a card of that size; default: this")
    card.add_argument(
        "--vram", type=_gib, metavar="GIB", help="a budget of the card instead, not 0"
    )
    parser.add_argument("--ram", type=_gib, metavar="GIB", help="a budget of RAM")
    parser.add_argument("--activations", type=_gib, metavar="GIB", help="that a run needs beside")
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--link", type=float, metavar="GB/S", help="to the card; default: assumed")
    link.add_argument("--measure-link", action="store_true", help="measure it, on this card")
    parser.add_argument("--layers", action="store_true", help="every layer in a line")


def _gib(text: str) -> float:
    """A figure, with or without its unit: "12", "12 GiB"."""
    figure = text.strip().lower().removesuffix("gib").strip()
    try:
        value = float(figure)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB, such as 12") from None
    if not 0 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 4096 GiB")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 7 * 24 * 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds up to a week")
    return value
