# SPDX-License-Identifier: Apache-2.0
"""Images under shift: rotated, translated, and corrupted in fifteen ways at five strengths.

The kinds are those of Hendrycks and Dietterich (2019), "Benchmarking Neural Network Robustness to
Common Corruptions and Perturbations", arXiv:1903.12261, where they suit small grey images; the
formulas and strengths are those below. Lengths are in pixels of an image whose shorter side
is 28, and grow with the image. A new kind is a function and a line of `_KINDS`.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from pyro_bbb._utils.validation import all_finite, as_seed, count, finite, one_of, tensor

_SIDE = 28  # pixels of the images for which lengths are given
_GREY = 0.5
_KNOTS = 7.0  # pixels between those whose elastic displacements are independent


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate images counter-clockwise about their centre, by bilinear interpolation.

    Args:
        images: floating ``[n, channels, height, width]`` in [0, 1].
        degrees: the angle.

    Returns:
        Images of the same shape; pixels from outside are 0.
    """
    from torchvision.transforms import InterpolationMode, functional  # importing takes a second

    images, degrees = _checked(images), finite("degrees", degrees)
    if len(images) == 0:
        return images
    rotated: Tensor = functional.rotate(images, degrees, InterpolationMode.BILINEAR)
    return rotated


def translate(images: Tensor, pixels: int) -> Tensor:
    """Move images to the right; pixels that leave on one side enter on the other.

    Half the width is the largest shift: 14 pixels of MNIST, as in Ovadia et al. (2019,
    arXiv:1906.02530).

    Args:
        images: floating ``[n, channels, height, width]`` in [0, 1].
        pixels: the distance, negative to the left, at most the width there.

    Returns:
        Images of the same shape.
    """
    images = _checked(images)
    return images.roll(count("pixels", pixels, least=-images.shape[-1]), -1)


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Add noise, blur or another corruption to images.

        noisy = bbb.data.corrupt(x_test, "shot_noise", severity=3)

    Args:
        images: floating ``[n, channels, height, width]`` in [0, 1].
        name: the kind of corruption, of `CORRUPTIONS`; the guide on shift shows an example of each.
        severity: its strength, 1 to 5.
        seed: of the random kinds; the global random state stays as it is.

    Returns:
        Images of the same shape, dtype and device, in [0, 1].
    """
    images = _checked(images)
    function, strengths = _KINDS[one_of("name", name, _KINDS)]
    if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5, got {severity!r}")
    generator = Generator().manual_seed(as_seed("seed", seed))
    return function(images, strengths[int(severity) - 1], generator).clamp(0, 1)


def _checked(images: Any) -> Tensor:
    images = tensor("images", images)
    shape, numbers = list(images.shape), images.is_floating_point() and not images.is_meta
    if len(shape) != 4 or 0 in shape[1:] or not numbers:
        got = f"{images.dtype} of shape {shape} on {images.device}"
        raise ValueError(f"images must be floating [n, channels, height, width], got {got}")
    if images.numel() and not (all_finite(images) and images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images must be in [0, 1], got {images.min().item():.4g} to {images.max().item():.4g}"
        )
    return images


def _uniform(shape: Any, like: Tensor, generator: Generator) -> Tensor:
    """Draw on the CPU, so that the numbers are the same on every device."""
    return torch.rand(shape, generator=generator).to(like)


# --- noise ---


def _gaussian_noise(x: Tensor, std: float, generator: Generator) -> Tensor:
    return x + std * torch.randn(x.shape, generator=generator).to(x)


def _shot_noise(x: Tensor, photons: float, generator: Generator) -> Tensor:
    """Count Poisson photons, on average ``photons`` where the image is white."""
    return torch.poisson(photons * x.cpu(), generator).to(x) / photons


def _impulse_noise(x: Tensor, fraction: float, generator: Generator) -> Tensor:
    """Make a fraction of the pixels black or white."""
    u = _uniform(x.shape, x, generator)
    return torch.where(u < fraction, (u < fraction / 2).to(x), x)


# --- blur: means over neighbours, the edge repeated outside ---


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Return the mean of the neighbours ``[height, width]``, odd sides, weighted by the kernel."""
    (height, width), channels = kernel.shape, x.shape[1]
    padded = F.pad(x, [width // 2, width // 2, height // 2, height // 2], mode="replicate")
    weight = (kernel / kernel.sum()).to(x).expand(channels, 1, -1, -1)
    return F.conv2d(padded, weight, groups=channels)


def _pixels(x: Tensor, length: float) -> float:
    return length * min(x.shape[-2:]) / _SIDE


def _steps(reach: float) -> Tensor:
    """Return the whole distances -k, ..., k within the reach."""
    return torch.arange(-int(reach), int(reach) + 1, dtype=torch.float64)


def _gaussian_blur(x: Tensor, length: float, generator: Generator) -> Tensor:
    std = _pixels(x, length)
    line = (-0.5 * (_steps(4 * std + 1) / std).square()).exp()
    return _filtered(_filtered(x, line[None]), line[:, None])


def _motion_blur(x: Tensor, length: float, generator: Generator) -> Tensor:
    """Average over a horizontal line."""
    return _filtered(x, torch.ones_like(_steps(_pixels(x, length) / 2))[None])


def _defocus_blur(x: Tensor, radius: float, generator: Generator) -> Tensor:
    """Average over a disk, whose edge is half a pixel wide."""
    radius = _pixels(x, radius)
    along = _steps(radius + 1)
    distance = torch.hypot(along, along[:, None])
    return _filtered(x, (radius + 0.5 - distance).clamp(0, 1))


# --- light ---


def _contrast(x: Tensor, factor: float, generator: Generator) -> Tensor:
    """Move pixels towards each image's mean."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _fog(x: Tensor, thickness: float, generator: Generator) -> Tensor:
    """Add white that grows from one side to the other, in a random direction for each image."""
    angle = 2 * torch.pi * _uniform((len(x), 1, 1, 1), x, generator)
    down, right = (torch.linspace(-1, 1, size).to(x) for size in x.shape[-2:])
    along = angle.cos() * right + angle.sin() * down[:, None]
    white = thickness * (0.5 + along / 8**0.5)  # from 0 to 1 between opposite corners
    return x * (1 - white) + white


# --- shape ---


def _occlusion(x: Tensor, side: float, generator: Generator) -> Tensor:
    """Cover a random grey square in each image; ``side`` is a fraction of the image's."""
    inside = torch.ones(len(x), 1, 1, 1, dtype=torch.bool, device=x.device)
    for dim in (2, 3):
        size = round(side * x.shape[dim])
        shape = [x.shape[dim] if i == dim else 1 for i in range(4)]
        first = (_uniform((len(x), 1, 1, 1), x, generator) * (x.shape[dim] - size + 1)).floor()
        index = torch.arange(x.shape[dim], device=x.device).view(shape)
        inside = inside & (index >= first) & (index < first + size)
    return torch.where(inside, _GREY, x)


def _elastic(x: Tensor, length: float, generator: Generator) -> Tensor:
    """Displace pixels by a smooth random field of this standard deviation, one per image."""
    knots = [round(side / _pixels(x, _KNOTS)) + 1 for side in x.shape[-2:]]
    field = torch.randn(len(x), 2, *knots, generator=generator)
    field = F.interpolate(field, x.shape[-2:], mode="bicubic", align_corners=True)
    field = field / field.square().mean((1, 2, 3), keepdim=True).sqrt()
    down, right = (torch.linspace(-1, 1, size) for size in x.shape[-2:])
    grid = torch.stack(torch.broadcast_tensors(right, down[:, None]), -1)
    sides = torch.tensor([x.shape[-1], x.shape[-2]]).sub(1).clamp(min=1)
    moved = grid + 2 * _pixels(x, length) / sides * field.movedim(1, -1)
    return F.grid_sample(x, moved.to(x), align_corners=True, padding_mode="border")


def _thickness(x: Tensor, times: float, generator: Generator) -> Tensor:
    """Dilate bright strokes by 3x3 pixels ``times`` times, the last time in part."""
    while times > 0:
        x = x + min(times, 1.0) * (F.max_pool2d(x, 3, stride=1, padding=1) - x)
        times -= 1
    return x


def _pixelation(x: Tensor, part: float, generator: Generator) -> Tensor:
    height, width = (max(1, round(part * side)) for side in x.shape[-2:])
    return F.interpolate(F.adaptive_avg_pool2d(x, (height, width)), x.shape[-2:], mode="nearest")


def _jpeg(x: Tensor, quality: float, generator: Generator) -> Tensor:
    """Compress and decode each channel."""
    from PIL import Image

    pixels = (255 * x.cpu()).round().byte().flatten(0, 1).numpy()
    decoded = np.empty_like(pixels)
    for i, channel in enumerate(pixels):
        file = BytesIO()
        Image.fromarray(channel).save(file, "JPEG", quality=int(quality))
        decoded[i] = Image.open(file)
    return torch.from_numpy(decoded).view(x.shape).to(x) / 255


_KINDS: dict[str, tuple[Callable[[Tensor, float, Generator], Tensor], tuple[float, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.08, 0.16, 0.24, 0.32, 0.4)),
    "shot_noise": (_shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (_impulse_noise, (0.03, 0.07, 0.12, 0.2, 0.3)),
    "gaussian_blur": (_gaussian_blur, (0.6, 0.9, 1.3, 1.8, 2.4)),
    "motion_blur": (_motion_blur, (3, 5, 7, 9, 11)),
    "defocus_blur": (_defocus_blur, (1, 1.5, 2, 2.5, 3)),
    "contrast": (_contrast, (0.7, 0.5, 0.35, 0.25, 0.15)),
    "brightness": (lambda x, amount, generator: x + amount, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "occlusion": (_occlusion, (0.2, 0.3, 0.4, 0.5, 0.6)),
    "elastic": (_elastic, (0.6, 1.0, 1.4, 1.8, 2.3)),
    "thickness": (_thickness, (0.3, 0.6, 1.0, 1.5, 2.0)),
    "fog": (_fog, (0.3, 0.45, 0.6, 0.75, 0.9)),
    "pixelation": (_pixelation, (0.5, 0.4, 0.32, 0.25, 0.2)),
    "jpeg": (_jpeg, (60, 40, 25, 15, 8)),
    "inversion": (lambda x, amount, generator: x + amount * (1 - 2 * x), (0.2, 0.4, 0.6, 0.8, 1.0)),
}
CORRUPTIONS = tuple(_KINDS)
"""Names of the corruptions of images."""
