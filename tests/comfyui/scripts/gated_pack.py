"""A pack of one file: a model whose leaving the device waits until a test lets it go."""

import threading
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from aiohttp import web
from server import PromptServer

may_leave = threading.Event()
is_leaving = threading.Event()
notes = []


class GatedPatcher(comfy.model_patcher.ModelPatcher):
    def detach(self, *args: Any, **kwargs: Any) -> Any:
        is_leaving.set()
        assert may_leave.wait(60)
        return super().detach(*args, **kwargs)


patcher = GatedPatcher(torch.nn.Linear(64, 64), torch.device("cpu"), torch.device("cpu"))


class GatedModel:
    CATEGORY = "test"
    OUTPUT_NODE = True
    RETURN_TYPES = ()
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls) -> Any:
        return {"required": {"loads": ("BOOLEAN", {"default": True})}}

    @classmethod
    def IS_CHANGED(cls, loads: bool) -> float:
        return float("nan")

    def run(self, loads: bool) -> Any:
        notes.append(loads)
        if loads:
            comfy.model_management.load_models_gpu([patcher])
        return {"ui": {"text": ["ran"]}}


@PromptServer.instance.routes.get("/gated")
async def look(request: web.Request) -> web.Response:
    return web.json_response({"is_leaving": is_leaving.is_set(), "ran": len(notes)})


@PromptServer.instance.routes.post("/gated")
async def let_go(request: web.Request) -> web.Response:
    may_leave.set()
    return web.json_response({})


@PromptServer.instance.routes.post("/gated/fill")
async def fill(request: web.Request) -> web.Response:
    """Have more on its way to a client than its connection takes."""
    socket = PromptServer.instance.sockets[request.query["client"]]
    transport = socket._req.transport
    transport.write(b"\0" * (32 << 20))
    return web.json_response({"unsent": transport.get_write_buffer_size()})


class BadFile:
    CATEGORY = "test"
    OUTPUT_NODE = True
    RETURN_TYPES = ()
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls) -> Any:
        return {"required": {}}

    def run(self) -> Any:
        with open("/no/such/folder of mine/wan.safetensors"):
            return ()


NODE_CLASS_MAPPINGS = {"GatedModel": GatedModel, "BadFile": BadFile}
