"""Tensor names and shapes of a Wan 2.1 video VAE of any base width."""

from __future__ import annotations

from devtools.model_shapes import Shapes

MULTIPLIERS = (1, 2, 4, 4)
LATENT_CHANNELS = 16


def _conv(name: str, *weight: int) -> Shapes:
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def _residual(name: str, channels_in: int, channels: int) -> Shapes:
    shapes: Shapes = {f"{name}.residual.0.gamma": (channels_in, 1, 1, 1)}
    shapes |= _conv(f"{name}.residual.2", channels, channels_in, 3, 3, 3)
    shapes |= {f"{name}.residual.3.gamma": (channels, 1, 1, 1)}
    shapes |= _conv(f"{name}.residual.6", channels, channels, 3, 3, 3)
    if channels_in != channels:
        shapes |= _conv(f"{name}.shortcut", channels, channels_in, 1, 1, 1)
    return shapes


def _middle(name: str, channels: int) -> Shapes:
    shapes = _residual(f"{name}.0", channels, channels) | _residual(f"{name}.2", channels, channels)
    shapes |= {f"{name}.1.norm.gamma": (channels, 1, 1)}
    shapes |= _conv(f"{name}.1.to_qkv", 3 * channels, channels, 1, 1)
    return shapes | _conv(f"{name}.1.proj", channels, channels, 1, 1)


def _head(name: str, channels_in: int, channels: int) -> Shapes:
    shapes: Shapes = {f"{name}.0.gamma": (channels_in, 1, 1, 1)}
    return shapes | _conv(f"{name}.2", channels, channels_in, 3, 3, 3)


def _encoder(width: int) -> Shapes:
    shapes = _conv("encoder.conv1", width, 3, 3, 3, 3)
    index, before = 0, width
    for level, multiplier in enumerate(MULTIPLIERS):
        channels = width * multiplier
        for _ in range(2):
            shapes |= _residual(f"encoder.downsamples.{index}", before, channels)
            index, before = index + 1, channels
        if level == len(MULTIPLIERS) - 1:
            break
        name = f"encoder.downsamples.{index}"
        shapes |= _conv(f"{name}.resample.1", channels, channels, 3, 3)
        if level > 0:  # the first level shrinks the picture only, the others time as well
            shapes |= _conv(f"{name}.time_conv", channels, channels, 3, 1, 1)
        index += 1
    shapes |= _middle("encoder.middle", before)
    return shapes | _head("encoder.head", before, 2 * LATENT_CHANNELS)


def _decoder(width: int) -> Shapes:
    before = width * MULTIPLIERS[-1]
    shapes = _conv("decoder.conv1", before, LATENT_CHANNELS, 3, 3, 3)
    shapes |= _middle("decoder.middle", before)
    index = 0
    for level, multiplier in enumerate(reversed(MULTIPLIERS)):
        channels = width * multiplier
        for _ in range(3):
            shapes |= _residual(f"decoder.upsamples.{index}", before, channels)
            index, before = index + 1, channels
        if level == len(MULTIPLIERS) - 1:
            break
        name = f"decoder.upsamples.{index}"
        shapes |= _conv(f"{name}.resample.1", channels // 2, channels, 3, 3)
        if level < 2:
            shapes |= _conv(f"{name}.time_conv", 2 * channels, channels, 3, 1, 1)
        index, before = index + 1, channels // 2
    return shapes | _head("decoder.head", before, 3)


def wan_vae(width: int) -> Shapes:
    shapes = _encoder(width) | _decoder(width)
    shapes |= _conv("conv1", 2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1, 1, 1)
    return shapes | _conv("conv2", LATENT_CHANNELS, LATENT_CHANNELS, 1, 1, 1)
