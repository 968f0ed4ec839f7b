"""Tensor names and shapes of real architectures, at small sizes.

ComfyUI recognises a model by the names and shapes in its file. These are the ones it looks for;
widths that it fixes (text width 4096, frequency width 256, SD 1.5's 320 channels) stay fixed.
"""

from __future__ import annotations

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

WAN_TEXT_WIDTH = 4096
WAN_FREQUENCY_WIDTH = 256
WAN_HEAD_WIDTH = 128


def _layer(name: str, *weight: int, bias: bool = True) -> Shapes:
    """A weight of shape (out, in, *kernel) and its bias of shape (out,)."""
    shapes: Shapes = {f"{name}.weight": weight}
    if bias:
        shapes[f"{name}.bias"] = weight[:1]
    return shapes


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def wan_block(width: int, ffn: int) -> Shapes:
    shapes: Shapes = {"modulation": (1, 6, width)}
    for attention in ("self_attn", "cross_attn"):
        for part in "qkvo":
            shapes |= _layer(f"{attention}.{part}", width, width)
        shapes |= {f"{attention}.norm_{part}.weight": (width,) for part in "qk"}
    shapes |= _layer("norm3", width)
    shapes |= _layer("ffn.0", ffn, width) | _layer("ffn.2", width, ffn)
    return shapes


def wan(depth: int, width: int, ffn: int, channels: int = 16) -> Shapes:
    """A Wan 2.1 text-to-video transformer; ``width`` is a multiple of 128 (one head)."""
    if width % WAN_HEAD_WIDTH:
        raise ValueError(f"a Wan model's width is a multiple of {WAN_HEAD_WIDTH}, not {width}")
    shapes = _layer("patch_embedding", width, channels, 1, 2, 2)
    shapes |= _layer("text_embedding.0", width, WAN_TEXT_WIDTH)
    shapes |= _layer("text_embedding.2", width, width)
    shapes |= _layer("time_embedding.0", width, WAN_FREQUENCY_WIDTH)
    shapes |= _layer("time_embedding.2", width, width)
    shapes |= _layer("time_projection.1", 6 * width, width)
    for index in range(depth):
        shapes |= _prefixed(f"blocks.{index}.", wan_block(width, ffn))
    return shapes | _layer("head.head", 4 * channels, width) | {"head.modulation": (1, 2, width)}


def sd3_stream(width: int, last_context: bool = False) -> Shapes:
    """One side of a joint block; the last context side has only what attention needs."""
    shapes = _layer("attn.qkv", 3 * width, width)
    if last_context:
        return shapes | _layer("adaLN_modulation.1", 2 * width, width)
    shapes |= _layer("attn.proj", width, width)
    shapes |= _layer("mlp.fc1", 4 * width, width) | _layer("mlp.fc2", width, 4 * width)
    return shapes | _layer("adaLN_modulation.1", 6 * width, width)


def sd3(depth: int, grid: int = 64) -> Shapes:
    """A Stable Diffusion 3 transformer; its width is always 64 x depth."""
    width = 64 * depth
    shapes: Shapes = {"pos_embed": (1, grid * grid, width)}
    shapes |= _layer("x_embedder.proj", width, 16, 2, 2)
    shapes |= _layer("t_embedder.mlp.0", width, 256) | _layer("t_embedder.mlp.2", width, width)
    shapes |= _layer("y_embedder.mlp.0", width, 2048) | _layer("y_embedder.mlp.2", width, width)
    shapes |= _layer("context_embedder", width, 4096)
    for index in range(depth):
        context = sd3_stream(width, last_context=index == depth - 1)
        shapes |= _prefixed(f"joint_blocks.{index}.context_block.", context)
        shapes |= _prefixed(f"joint_blocks.{index}.x_block.", sd3_stream(width))
    shapes |= _layer("final_layer.linear", 64, width)
    return shapes | _layer("final_layer.adaLN_modulation.1", 2 * width, width)


def _unet_residual(prefix: str, channels_in: int, channels: int) -> Shapes:
    shapes = _layer(f"{prefix}.in_layers.0", channels_in)
    shapes |= _layer(f"{prefix}.in_layers.2", channels, channels_in, 3, 3)
    shapes |= _layer(f"{prefix}.emb_layers.1", channels, 4 * channels)
    shapes |= _layer(f"{prefix}.out_layers.0", channels)
    shapes |= _layer(f"{prefix}.out_layers.3", channels, channels, 3, 3)
    if channels_in != channels:
        shapes |= _layer(f"{prefix}.skip_connection", channels, channels_in, 1, 1)
    return shapes


def _unet_transformer(prefix: str, channels: int, context: int) -> Shapes:
    shapes = _layer(f"{prefix}.norm", channels)
    shapes |= _layer(f"{prefix}.proj_in", channels, channels, 1, 1)
    block = f"{prefix}.transformer_blocks.0"
    for name, width in (("attn1", channels), ("attn2", context)):
        shapes |= _layer(f"{block}.{name}.to_q", channels, channels, bias=False)
        shapes |= _layer(f"{block}.{name}.to_k", channels, width, bias=False)
        shapes |= _layer(f"{block}.{name}.to_v", channels, width, bias=False)
        shapes |= _layer(f"{block}.{name}.to_out.0", channels, channels)
    shapes |= _layer(f"{block}.ff.net.0.proj", 8 * channels, channels)
    shapes |= _layer(f"{block}.ff.net.2", channels, 4 * channels)
    for index in (1, 2, 3):
        shapes |= _layer(f"{block}.norm{index}", channels)
    return shapes | _layer(f"{prefix}.proj_out", channels, channels, 1, 1)


def sd15_unet(channels: int = 320, context: int = 768) -> Shapes:
    """A Stable Diffusion 1.5 UNet cut to two levels of one residual block each."""
    shapes = _layer("time_embed.0", 4 * channels, channels)
    shapes |= _layer("time_embed.2", 4 * channels, 4 * channels)
    shapes |= _layer("input_blocks.0.0", channels, 4, 3, 3)
    shapes |= _unet_residual("input_blocks.1.0", channels, channels)
    shapes |= _unet_transformer("input_blocks.1.1", channels, context)
    shapes |= _layer("input_blocks.2.0.op", channels, channels, 3, 3)
    shapes |= _unet_residual("input_blocks.3.0", channels, channels)
    shapes |= _unet_residual("middle_block.0", channels, channels)
    shapes |= _unet_transformer("middle_block.1", channels, context)
    shapes |= _unet_residual("middle_block.2", channels, channels)
    for index in range(4):
        shapes |= _unet_residual(f"output_blocks.{index}.0", 2 * channels, channels)
    shapes |= _layer("output_blocks.1.1.conv", channels, channels, 3, 3)
    for index in (2, 3):
        shapes |= _unet_transformer(f"output_blocks.{index}.1", channels, context)
    return shapes | _layer("out.0", channels) | _layer("out.2", 4, channels, 3, 3)


def clip_l(depth: int = 12, width: int = 768) -> Shapes:
    """The text encoder CLIP-L; ComfyUI fixes every size of it."""
    shapes: Shapes = {
        "embeddings.token_embedding.weight": (49408, width),
        "embeddings.position_embedding.weight": (77, width),
    }
    for index in range(depth):
        layer = f"encoder.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _layer(f"{layer}.self_attn.{part}", width, width)
        shapes |= _layer(f"{layer}.layer_norm1", width) | _layer(f"{layer}.layer_norm2", width)
        shapes |= _layer(f"{layer}.mlp.fc1", 4 * width, width)
        shapes |= _layer(f"{layer}.mlp.fc2", width, 4 * width)
    shapes |= _layer("final_layer_norm", width)
    return _prefixed("text_model.", shapes) | {"text_projection.weight": (width, width)}


def t5_base(depth: int = 12, width: int = 768) -> Shapes:
    """The encoder of T5-base, as audio models use it; ComfyUI fixes every size of it."""
    shapes: Shapes = {"shared.weight": (32128, width)}
    for index in range(depth):
        layer = f"encoder.block.{index}.layer"
        shapes |= {f"{layer}.0.SelfAttention.{part}.weight": (width, width) for part in "qkvo"}
        if index == 0:
            shapes[f"{layer}.0.SelfAttention.relative_attention_bias.weight"] = (32, 12)
        shapes[f"{layer}.0.layer_norm.weight"] = (width,)
        shapes[f"{layer}.1.DenseReluDense.wi.weight"] = (4 * width, width)
        shapes[f"{layer}.1.DenseReluDense.wo.weight"] = (width, 4 * width)
        shapes[f"{layer}.1.layer_norm.weight"] = (width,)
    return shapes | {"encoder.final_layer_norm.weight": (width,)}
