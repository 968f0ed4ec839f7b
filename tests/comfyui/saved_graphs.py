# ruff: noqa: E501 - graphs are data; a node in a line is easier to read than in ten
"""Graphs as ComfyUI's page saves them, made here: for each kind of file that was once read wrong.

Each is made of nodes of the core that need no model, so that the page and the command can be
compared on any server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Saved = dict[str, Any]
Source = tuple[int, int]
IMAGE, LATENT, MASK = "IMAGE", "LATENT", "MASK"
_SUBGRAPH = "5b0c2c1e-8a59-4f0c-9d8c-0f7a41f7d6{:02x}"


class Draft:
    """A graph on its way. Nodes are numbered from ``first`` on."""

    def __init__(self, first: int = 1) -> None:
        self.nodes: list[Saved] = []
        self.links: list[list[Any]] = []
        self.subgraphs: list[Saved] = []
        self.extra: Saved = {}
        self._next = first

    def add(
        self,
        kind: str,
        values: Any = None,
        links: dict[str, tuple[Source, str]] | None = None,
        outputs: tuple[str, ...] = (),
        **more: Any,
    ) -> int:
        """A node. ``links``: by input, what it comes from, and the type; ``*`` before a name says
        that the input is a widget's."""
        node_id, self._next = self._next, self._next + 1
        inputs = [
            self._input(node_id, place, *item) for place, item in enumerate((links or {}).items())
        ]
        node = {
            "id": node_id, "type": kind, "pos": [0, 0], "size": [200, 100], "flags": {},
            "order": node_id, "mode": 0, "inputs": inputs, "properties": {},
            "outputs": [{"name": t, "type": t, "links": []} for t in outputs],
        }  # fmt: skip
        if values is not None:
            node["widgets_values"] = values
        self.nodes.append({**node, **more})
        return node_id

    def _input(self, node_id: int, place: int, name: str, link: tuple[Source, str]) -> Saved:
        (origin, slot), kind = link
        number = len(self.links) + 1
        self.links.append([number, origin, slot, node_id, place, kind])
        origins = [node for node in self.nodes if node["id"] == origin]
        if origins:
            origins[0]["outputs"][slot]["links"].append(number)
        entry: Saved = {"name": name.removeprefix("*"), "type": kind, "link": number}
        return {**entry, "widget": {"name": entry["name"]}} if name.startswith("*") else entry

    def saved(self) -> Saved:
        """As the page writes it."""
        return {
            "last_node_id": self._next, "last_link_id": len(self.links), "nodes": self.nodes,
            "links": self.links, "groups": [], "config": {}, "version": 0.4, "extra": self.extra,
            "definitions": {"subgraphs": self.subgraphs},
        }  # fmt: skip

    def subgraph(
        self,
        inner: Draft,
        inputs: list[tuple[str, str, list[tuple[int, str]]]],
        output: Source,
        kind: str,
    ) -> str:
        """Make ``inner`` a subgraph. ``inputs``: name, type, and the inputs inside of it."""
        self.subgraphs += inner.subgraphs
        graph_id = _SUBGRAPH.format(len(self.subgraphs))
        nodes = {node["id"]: node for node in inner.nodes}
        links = [dict(zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), link, strict=True)) for link in inner.links]  # fmt: skip
        border = []
        for place, (name, type_name, targets) in enumerate(inputs):
            ids = []
            for target, slot_name in targets:
                number = len(links) + 1
                slots = nodes[target]["inputs"]
                plain = slot_name.removeprefix("*")
                slots.append({"name": plain, "type": type_name, "link": number})
                if slot_name.startswith("*"):
                    slots[-1]["widget"] = {"name": plain}
                links.append({
                    "id": number, "origin_id": -10, "origin_slot": place, "target_id": target,
                    "target_slot": len(slots) - 1, "type": type_name,
                })  # fmt: skip
                ids.append(number)
            border.append({
                "id": f"0000000{place}-0000-4000-8000-0000000000{len(self.subgraphs):02x}",
                "name": name, "type": type_name, "linkIds": ids,
            })  # fmt: skip
        last = len(links) + 1
        nodes[output[0]]["outputs"][output[1]]["links"].append(last)
        links.append({
            "id": last, "origin_id": output[0], "origin_slot": output[1], "target_id": -20,
            "target_slot": 0, "type": kind,
        })  # fmt: skip
        self.subgraphs.append({
            "id": graph_id, "version": 1, "name": "Inside", "revision": 0, "config": {},
            "state": {"lastGroupId": 0, "lastNodeId": 99, "lastLinkId": 99, "lastRerouteId": 0},
            "inputNode": {"id": -10, "bounding": [0, 0, 100, 100]},
            "outputNode": {"id": -20, "bounding": [500, 0, 100, 100]},
            "inputs": border, "widgets": [], "nodes": inner.nodes, "groups": [], "links": links,
            "outputs": [{"id": f"00000009-0000-4000-8000-0000000000{len(self.subgraphs):02x}",
                         "name": kind, "type": kind, "linkIds": [last]}],
            "extra": {},
        })  # fmt: skip
        return graph_id


def _image(draft: Draft, width: int = 64) -> int:
    return draft.add("EmptyImage", [width, 48, 1, 255], outputs=(IMAGE,))


def _shown(draft: Draft, source: Source, kind: str = "PreviewImage", **more: Any) -> Saved:
    draft.add(kind, links={"images": (source, IMAGE)}, **more)
    return draft.saved()


# The slot after a seed


def _latents(draft: Draft, kind: str, values: list[Any]) -> Saved:
    """A sampler whose model is a checkpoint's that nobody has: only its values matter."""
    loader = draft.add(
        "CheckpointLoaderSimple", ["none.safetensors"], outputs=("MODEL", "CLIP", "VAE")
    )
    text = draft.add("CLIPTextEncode", ["a"], {"clip": ((loader, 1), "CLIP")}, ("CONDITIONING",))
    empty = draft.add("EmptyLatentImage", [64, 64, 1], outputs=(LATENT,))
    links = {
        "model": ((loader, 0), "MODEL"), "positive": ((text, 0), "CONDITIONING"),
        "negative": ((text, 0), "CONDITIONING"), "latent_image": ((empty, 0), LATENT),
    }  # fmt: skip
    sampler = draft.add(kind, values, links, (LATENT,))
    decoded = draft.add("VAEDecode", None, {"samples": ((sampler, 0), LATENT), "vae": ((loader, 2), "VAE")}, (IMAGE,))  # fmt: skip
    return _shown(draft, (decoded, 0))


def control_slots() -> dict[str, Saved]:
    """Whatever stands there, the slot belongs to the control."""
    plain = [7, "fixed", 9, 4.5, "dpmpp_2m", "karras", 0.75]
    advanced = ["enable", 8, "fixed", 11, 3.5, "heun", "simple", 2, 10, "disable"]
    found = {}
    for word in (True, False, None, "increment", "words", 3):
        found[f"KSampler {word!r}"] = _latents(Draft(), "KSampler", [plain[0], word, *plain[2:]])
    for word in (None, False, "randomize"):
        values = [*advanced[:2], word, *advanced[3:]]
        found[f"KSamplerAdvanced {word!r}"] = _latents(Draft(), "KSamplerAdvanced", values)
    found["no control at all, and fewer values"] = _latents(Draft(), "KSampler", [5, "fixed", 9])
    found["an old name of a sampler"] = _latents(Draft(), "KSampler", [1, True, 9, 2, "sample_euler", "simple", 1])  # fmt: skip
    return found


# Widgets with a link, whatever it brings


def linked_widgets() -> dict[str, Saved]:
    """A value that is kept for an input that became a socket, and links that bring nothing."""
    found = {}
    for name, mode in (("that runs", 0), ("that is bypassed", 4)):
        draft = Draft()
        number = draft.add("PrimitiveInt", [320, "fixed"], outputs=("INT",), mode=mode)
        image = draft.add(
            "EmptyImage", [64, 48, 1, 255], {"*width": ((number, 0), "INT")}, (IMAGE,)
        )
        found[f"a number {name}"] = _shown(draft, (image, 0))
    draft = Draft()
    primitive = draft.add("PrimitiveNode", [96, "fixed"], outputs=("INT",))
    draft.nodes[0]["outputs"][0]["widget"] = {"name": "width"}
    link = ((primitive, 0), "INT")
    one = draft.add("EmptyImage", [64, 48, 1, 255], {"*width": link}, (IMAGE,))
    two = draft.add("EmptyImage", [64, 48, 1, 255], {"*height": link, "*width": link}, (IMAGE,))
    draft.add("PreviewImage", links={"images": ((two, 0), IMAGE)})
    found["one primitive for three widgets"] = _shown(draft, (one, 0))
    draft = Draft()
    primitive = draft.add("PrimitiveNode", [96, "fixed"], outputs=("INT",))
    reroute = draft.add("Reroute", None, {"": ((primitive, 0), "*")}, ("INT",))
    image = draft.add("EmptyImage", [64, 48, 1, 255], {"*width": ((reroute, 0), "INT")}, (IMAGE,))
    found["a primitive behind a reroute, which brings nothing"] = _shown(draft, (image, 0))
    draft = Draft()
    text = draft.add("StringConcatenate", ["a", "b", ", "], outputs=("STRING",))
    draft.add("PreviewAny", links={"source": ((text, 0), "STRING")})
    found["values of texts"] = draft.saved()
    return found


# Subgraphs


def _sized(draft: Draft, host: dict[str, Any], names: tuple[str, ...] = ("width", "height", "color")) -> Saved:  # fmt: skip
    inner = Draft()
    image = inner.add("EmptyImage", [16, 16, 1, 1], outputs=(IMAGE,))
    graph = draft.subgraph(
        inner, [(n, "INT", [(image, f"*{n}")]) for n in names], (image, 0), IMAGE
    )
    for more in (host,) if isinstance(host, dict) else host:
        node = draft.add(graph, outputs=(IMAGE,), **copy.deepcopy(more))
        draft.nodes[-1]["inputs"] = [
            {"name": n, "type": "INT", "link": None, "widget": {"name": n}} for n in names
        ]
        draft.add("PreviewImage", links={"images": ((node, 0), IMAGE)})
    return draft.saved()


def proxy_orders() -> dict[str, Saved]:
    """Values in the order of the list of widgets that were taken out."""
    found = {}
    for order in (
        ("height", "width", "color"),
        ("color", "height", "width"),
        ("width", "color", "height"),
    ):
        listed = [["-1", name] for name in order]
        by_name = {"width": 320, "height": 240, "color": 77}
        more = {
            "widgets_values": [by_name[n] for n in order],
            "properties": {"proxyWidgets": listed},
        }
        found[" ".join(order)] = _sized(Draft(), more)
    found["two uses of one subgraph"] = _sized(Draft(), [
        {"widgets_values": [1, 2, 3], "properties": {"proxyWidgets": [["-1", "color"], ["-1", "width"], ["-1", "height"]]}},
        {"widgets_values": [4, 5, 6], "properties": {"proxyWidgets": [["-1", "height"], ["-1", "color"], ["-1", "width"]]}},
    ])  # fmt: skip
    found["a shown widget between them, which keeps its own value"] = _sized(Draft(), {
        "widgets_values": [90, None, 80], "properties": {"proxyWidgets": [["-1", "height"], ["1", "batch_size"], ["-1", "width"]]},
    }, ("width", "height"))  # fmt: skip
    found["no values at all"] = _sized(Draft(), {"properties": {"proxyWidgets": [["-1", "color"]]}})
    return found


def nested() -> dict[str, Saved]:
    """The same ids and names at each level; bypassed and muted ones among them."""
    found = {}
    for mode in (0, 2, 4):
        innermost = Draft()
        scaled = innermost.add("ImageScaleBy", ["bilinear", 2], outputs=(IMAGE,))
        middle = Draft()
        inside = middle.subgraph(
            innermost, [("image", IMAGE, [(scaled, "image")])], (scaled, 0), IMAGE
        )
        host = middle.add(inside, outputs=(IMAGE,), mode=mode)
        middle.add("ImageInvert", None, {"image": ((host, 0), IMAGE)}, (IMAGE,))
        draft = Draft()
        outer = draft.subgraph(middle, [("image", IMAGE, [(host, "image")])], (2, 0), IMAGE)
        image = _image(draft)
        first = draft.add(outer, None, {"image": ((image, 0), IMAGE)}, (IMAGE,))
        second = draft.add(outer, None, {"image": ((first, 0), IMAGE)}, (IMAGE,))
        found[f"twice in a row, the inner one in mode {mode}"] = _shown(draft, (second, 0))
    for mode in (0, 2, 4):
        draft = Draft()
        inner = Draft()
        scaled = inner.add("ImageScaleBy", ["area", 0.5], outputs=(IMAGE,))
        kind = draft.subgraph(inner, [("image", IMAGE, [(scaled, "image")])], (scaled, 0), IMAGE)
        image = _image(draft)
        host = draft.add(kind, None, {"image": ((image, 0), IMAGE)}, (IMAGE,), mode=mode)
        draft.add("PreviewImage", links={"images": ((image, 0), IMAGE)})
        found[f"a subgraph in mode {mode}"] = _shown(draft, (host, 0))
    return found


# Nodes of the page, and of packs that are not here


def page_only() -> dict[str, Saved]:
    """Labels, bookmarks, switches: nothing that runs needs them."""
    found = {}
    for name, more in {
        "a label": {"kind": "Label (acme)", "title": "SAMPLING", "properties": {"fontSize": 24}},
        "a bookmark": {"kind": "Jump mark", "values": ["1", 1], "properties": {"Node name for S&R": "Jump mark"}},
        "a switch of groups": {"kind": "Groups off", "outputs": ("*",), "properties": {"sort": "position"}},
        "notes": {"kind": "MarkdownNote", "values": ["# hello"]},
    }.items():  # fmt: skip
        draft = Draft()
        image = _image(draft)
        draft.add(more.pop("kind"), **more)
        found[name] = _shown(draft, (image, 0))
    draft = Draft()
    image = _image(draft)
    other = draft.add("ImageInvert", None, {"image": ((image, 0), IMAGE)}, (IMAGE,), mode=2)
    draft.add("Some Missing Saver", [], {"images": ((other, 0), IMAGE)}, mode=2)
    found["a muted node that is not here"] = _shown(draft, (image, 0))
    return found


def types_decide() -> dict[str, Saved]:
    """``type`` says what a node is, whatever its properties, its title or its name say."""
    found = {}
    for name, more in {
        "another search name": {"properties": {"Node name for S&R": "LoadImage"}},
        "the title of a reroute": {
            "title": "Reroute",
            "properties": {"Node name for S&R": "Reroute"},
        },
        "a pack's id": {"properties": {"cnr_id": "none", "Node name for S&R": "SetNode"}},
    }.items():
        draft = Draft()
        image = _image(draft)
        inverted = draft.add("ImageInvert", None, {"image": ((image, 0), IMAGE)}, (IMAGE,), **more)
        found[name] = _shown(draft, (inverted, 0))
    return found


def passing() -> dict[str, Saved]:
    """Reroutes and pairs that carry a link, of a pack that the tests make: see ``PACK``."""
    found = {}
    for kind, slots in (("Waypoint (acme)", ("", "*")), ("Acme Reroute", ("in", IMAGE))):
        draft = Draft()
        image = _image(draft)
        for _ in range(2):
            image = draft.add(kind, None, {slots[0]: ((image, 0), slots[1])}, (IMAGE,))
        found[f"two of {kind}"] = _shown(draft, (image, 0))
    for name, uses in (("is used by its pair", "get"), ("passes through", "set"), ("both", "both")):
        draft = Draft()
        image = _image(draft)
        setter = draft.add("AcmeSet", ["picture"], {IMAGE: ((image, 0), IMAGE)}, (IMAGE,))
        getter = draft.add("AcmeGet", ["picture"], outputs=(IMAGE,))
        if uses in ("set", "both"):
            draft.add("PreviewImage", links={"images": ((setter, 0), IMAGE)})
        if uses in ("get", "both"):
            draft.add("SaveImage", ["x"], {"images": ((getter, 0), IMAGE)})
        found[f"a setter that {name}"] = draft.saved()
    draft = Draft()
    first, second = _image(draft, 32), _image(draft, 64)
    for number, image in enumerate((first, second)):
        draft.add("AcmeSet", [f"picture {number}"], {IMAGE: ((image, 0), IMAGE)}, (IMAGE,))
    third = draft.add("AcmeGet", ["picture 1"], outputs=(IMAGE,))
    found["of two pairs the right one"] = _shown(draft, (third, 0))
    return found


PACK = """() => {
    const { LiteGraph, LGraphNode } = window;
    const virtual = (name, outputs) => {
        const kind = class extends LGraphNode {
            constructor(title) { super(title); this.isVirtualNode = true; this.serialize_widgets = true; }
        };
        LiteGraph.registerNodeType(name, kind);
        return kind;
    };
    virtual("Waypoint (acme)");
    virtual("Acme Reroute");
    virtual("AcmeSet");
    const getter = virtual("AcmeGet");
    getter.prototype.getInputLink = function () {
        const setter = this.graph._nodes.find(
            node => node.type === "AcmeSet" && node.widgets_values?.[0] === this.widgets_values?.[0]);
        return setter ? this.graph.getLink(setter.inputs[0].link) : null;
    };
}"""
"""What such a pack adds to the page, written here for the comparison."""


# Bypassed nodes


def bypassed() -> dict[str, Saved]:
    """What a bypassed node passes on is decided by types."""
    found = {}
    draft = Draft()
    image = _image(draft)
    scaled = draft.add(
        "ImageScaleBy", ["area", 2], {"image": ((image, 0), IMAGE)}, (IMAGE,), mode=4
    )
    found["the same type"] = _shown(draft, (scaled, 0))
    draft = Draft()
    image = _image(draft)
    mask = draft.add("ImageToMask", ["red"], {"image": ((image, 0), IMAGE)}, (MASK,), mode=4)
    shown = draft.add("MaskToImage", None, {"mask": ((mask, 0), MASK)}, (IMAGE,))
    draft.add("PreviewImage", links={"images": ((image, 0), IMAGE)})
    found["another type, so that nothing passes"] = _shown(draft, (shown, 0))
    draft = Draft()
    one, two = _image(draft, 32), _image(draft, 64)
    joined = draft.add("ImageBatch", None, {"image1": ((one, 0), IMAGE), "image2": ((two, 0), IMAGE)}, (IMAGE,), mode=4)  # fmt: skip
    found["the first of two"] = _shown(draft, (joined, 0))
    draft = Draft()
    image = _image(draft)
    for _ in range(3):
        image = draft.add("ImageInvert", None, {"image": ((image, 0), IMAGE)}, (IMAGE,), mode=4)
    found["three in a row"] = _shown(draft, (image, 0))
    return found


# Texts that the page fills in


def prefixes() -> dict[str, Saved]:
    """The page fills them in when it queues."""
    found = {}
    for prefix in (
        "%date:yyyy-MM-dd%/x", "%EmptyImage.width%x%EmptyImage.height%", "%Sized.color%_%date:yy%",
        "%Nobody.width%_%width%", "%PrimitiveInt.value%", "%Twice.width%_%EmptyImage.none%",
    ):  # fmt: skip
        draft = Draft()
        number = draft.add("PrimitiveInt", [12, "fixed"], outputs=("INT",))
        image = draft.add("EmptyImage", [64, 48, 1, 9], {"*width": ((number, 0), "INT")}, (IMAGE,), title="Sized")  # fmt: skip
        other = draft.add("EmptyImage", [5, 6, 1, 1], outputs=(IMAGE,), title="Twice", mode=2)
        draft.nodes[-1]["properties"] = {"Node name for S&R": "Twice"}
        assert other
        found[prefix] = _shown(draft, (image, 0), "SaveImage", values=[prefix])
    return found


# Group nodes


def groups() -> dict[str, Saved]:
    """Group nodes of before 2025: their values are those of the nodes in them, in their order."""
    inner = [
        {"type": "EmptyImage", "pos": [0, 0], "size": [200, 100], "flags": {}, "order": 0, "index": 0, "mode": 0, "inputs": [], "properties": {}, "widgets_values": [64, 48, 1, 0],
         "outputs": [{"name": IMAGE, "type": IMAGE, "links": []}]},
        {"type": "ImageScaleBy", "pos": [300, 0], "size": [200, 100], "flags": {}, "order": 1, "index": 1, "mode": 0, "properties": {}, "widgets_values": ["area", 2],
         "inputs": [{"name": "image", "type": IMAGE, "link": None}],
         "outputs": [{"name": IMAGE, "type": IMAGE, "links": []}]},
        {"type": "ImageBatch", "pos": [600, 0], "size": [200, 100], "flags": {}, "order": 2, "index": 2, "mode": 0, "properties": {}, "widgets_values": [],
         "inputs": [{"name": "image1", "type": IMAGE, "link": None}, {"name": "image2", "type": IMAGE, "link": None}],
         "outputs": [{"name": IMAGE, "type": IMAGE, "links": []}]},
    ]  # fmt: skip

    def grouped(name: str, count: int, links: list[Any], values: list[Any], inputs: bool) -> Saved:
        draft = Draft()
        given = {"image": ((_image(draft, 8), 0), IMAGE)} if inputs else {}
        node = draft.add(name, values, given, (IMAGE,))
        definition = {"nodes": inner[:count] if not inputs else [{**inner[1], "index": 0}], "links": links, "external": []}  # fmt: skip
        draft.extra["groupNodes"] = {name[9:]: copy.deepcopy(definition)}
        return _shown(draft, (node, 0))

    return {
        "one node": grouped("workflow>One", 1, [], [32, 16, 2, 5], False),
        "the older separator": grouped("workflow/One", 1, [], [32, 16, 2, 5], False),
        "two that are linked": grouped("workflow>Two", 2, [[0, 0, 1, 0, 1, IMAGE]], [9, 8, 1, 7, "bilinear", 3], False),
        "three of them": grouped("workflow>Three", 3, [[0, 0, 1, 0, 1, IMAGE], [0, 0, 2, 0, 1, IMAGE], [1, 0, 2, 1, 2, IMAGE]], [9, 8, 1, 7, "area", 4], False),
        "an input from outside": grouped("workflow>In", 1, [], ["bilinear", 0.5], True),
    }  # fmt: skip


# Files that nodes choose


OUTPUT = "a.png"


def files() -> dict[str, Saved]:
    """Choices that the page puts buttons beside. ``OUTPUT`` has to be among the outputs: the page
    asks for the list, and takes the first."""
    found = {}
    for name, kind, values in (
        ("the last outputs", "LoadImageOutput", ["a.png [output]", False, "refresh", "image"]),
        ("the last outputs, saved by a program", "LoadImageOutput", ["a.png [output]"]),
        ("an image with its button", "LoadImage", ["c.png", "image"]),
        ("a mask", "LoadImageMask", ["d.png", "green", "image"]),
    ):
        draft = Draft()
        outputs = (MASK,) if kind == "LoadImageMask" else (IMAGE, MASK)
        loaded = draft.add(kind, values, outputs=outputs)
        if kind == "LoadImageMask":
            loaded = draft.add("MaskToImage", None, {"mask": ((loaded, 0), MASK)}, (IMAGE,))
        found[name] = _shown(draft, (loaded, 0))
    return found


KINDS: dict[str, Callable[[], dict[str, Saved]]] = {
    "control slots": control_slots, "linked widgets": linked_widgets, "proxy orders": proxy_orders,
    "nested": nested, "page only": page_only, "types decide": types_decide, "passing": passing,
    "bypassed": bypassed, "prefixes": prefixes, "groups": groups, "files": files,
}  # fmt: skip
