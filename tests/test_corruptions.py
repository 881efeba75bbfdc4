# SPDX-License-Identifier: Apache-2.0
"""Images turned, moved and corrupted, against scipy and closed forms."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage
from sklearn.datasets import load_digits

from pyro_bbb.data import CORRUPTIONS, corrupt, rotate, translate

RANDOM = {"gaussian_noise", "shot_noise", "impulse_noise", "occlusion", "elastic", "fog"}
SEVERITIES = range(1, 6)


@pytest.fixture(scope="module")
def digits():
    small = torch.tensor(load_digits().images[:40] / 16, dtype=torch.float32)[:, None]
    return F.interpolate(small, (28, 28), mode="bilinear").clamp(0, 1)


def noise(shape=(3, 1, 28, 28)):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# --- of every kind ---


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_stay_images_and_change_the_more_the_stronger(digits, name):
    before, state = digits.clone(), torch.get_rng_state()
    corrupted = [corrupt(digits, name, severity) for severity in SEVERITIES]
    distances = [float((images - digits).abs().mean()) for images in corrupted]
    assert distances == sorted(distances) and 0 < distances[0] < distances[-1] - 0.01
    for images in corrupted:
        assert images.shape == digits.shape and images.dtype == digits.dtype
        assert images.min() >= 0 and images.max() <= 1
    again, reseeded = (corrupt(digits, name, 5, seed=seed) for seed in (0, 1))
    assert torch.equal(images, again) and torch.equal(images, reseeded) == (name not in RANDOM)
    assert torch.equal(digits, before) and torch.equal(torch.get_rng_state(), state)
    for shape in [(0, 1, 28, 28), (2, 3, 20, 33), (1, 1, 1, 1)]:
        images = corrupt(noise(shape), name, 5)
        assert images.shape == shape and images.dtype == torch.float64


# --- noise: means and variances within five standard errors ---


@pytest.mark.parametrize(
    ("name", "grey", "variance"),
    [
        ("gaussian_noise", 0.5, 0.08**2),
        ("shot_noise", 0.1, 0.1 / 60),
        ("impulse_noise", 0.5, 0.03 / 4),
    ],
)
def test_noise_has_its_mean_and_variance(name, grey, variance):
    images = corrupt(torch.full((100, 1, 28, 28), grey, dtype=torch.float64), name, 1)
    error = (images - grey).flatten()
    for value, expected in [(error, 0.0), (error.square(), variance)]:
        standard_error = value.std() / math.sqrt(len(value))
        assert abs(value.mean() - expected) < 5 * standard_error


# --- blur ---


@pytest.mark.parametrize("severity", [1, 5])
def test_blurs_are_scipys(severity):
    x, std = noise(), (0.6, 0.9, 1.3, 1.8, 2.4)[severity - 1]
    expected = ndimage.gaussian_filter(
        x.numpy(), std, mode="nearest", axes=(2, 3), radius=int(4 * std + 1)
    )
    np.testing.assert_allclose(corrupt(x, "gaussian_blur", severity), expected, atol=1e-12)
    expected = ndimage.uniform_filter1d(x.numpy(), 2 * severity + 1, mode="nearest")
    np.testing.assert_allclose(corrupt(x, "motion_blur", severity), expected, atol=1e-12)


def test_defocus_of_a_point_is_a_disk_of_that_radius():
    x = torch.zeros(1, 1, 28, 28, dtype=torch.float64)
    x[..., 14, 14] = 1.0
    disk = corrupt(x, "defocus_blur", 5)[0, 0]  # radius 3
    torch.testing.assert_close(disk.sum().item(), 1.0)
    torch.testing.assert_close(disk, disk.T)
    area = (disk.sum() / disk.max()).item()
    assert area == pytest.approx(math.pi * 9, rel=0.03)


# --- light ---


@pytest.mark.parametrize(("name", "amount"), [("brightness", 0.3), ("inversion", 0.6)])
def test_light_changes_by_that_much(name, amount):
    x = noise()
    expected = x + amount if name == "brightness" else x + amount * (1 - 2 * x)
    torch.testing.assert_close(corrupt(x, name, 3), expected.clamp(max=1.0))


def test_contrast_scales_the_deviations_from_each_mean():
    x = noise()
    faded = corrupt(x, "contrast", 2)
    deviations = faded - x.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(deviations, 0.5 * (x - x.mean((1, 2, 3), keepdim=True)))


def test_fog_is_a_plane_of_white_in_any_direction():
    white = corrupt(torch.zeros(50, 1, 28, 28, dtype=torch.float64), "fog", 5)[:, 0]
    torch.testing.assert_close(white.mean((1, 2)), torch.full((50,), 0.45, dtype=torch.float64))
    for dim in (1, 2):
        slopes = white.diff(dim=dim)
        torch.testing.assert_close(slopes, slopes[:, :1, :1].expand_as(slopes))
        assert (slopes[:, 0, 0] > 0).any() and (slopes[:, 0, 0] < 0).any()


# --- shape ---


def test_occlusion_hides_a_square_anywhere():
    hidden = corrupt(torch.zeros(200, 1, 28, 28), "occlusion", 3)[:, 0] == 0.5
    side = round(28 * 0.4)
    assert (hidden.any(1).sum(1) == side).all() and (hidden.any(2).sum(1) == side).all()
    assert (hidden.sum((1, 2)) == side**2).all()
    assert hidden.any((0, 1)).all() and hidden.any((0, 2)).all()


def test_elastic_moves_pixels_by_that_much():
    """An image whose value is the place changes by the displacement."""
    ramp = torch.linspace(0, 1, 112).expand(20, 1, 112, 112)
    moved = [corrupt(images, "elastic", 1) - images for images in (ramp, ramp.mT.contiguous())]
    across, down = (111 * images[..., 20:-20, 20:-20].square().mean().sqrt() for images in moved)
    expected = 0.6 * 112 / 28  # as large as the image
    assert torch.hypot(across, down).item() / 2**0.5 == pytest.approx(expected, rel=0.1)
    constant = torch.full((2, 1, 28, 28), 0.3)
    torch.testing.assert_close(corrupt(constant, "elastic", 5), constant)


def test_a_square_grows_by_one_pixel_on_each_side():
    x = torch.zeros(1, 1, 28, 28)
    x[..., 10:15, 10:15] = 1.0
    grown, half = (corrupt(x, "thickness", severity)[0, 0] for severity in (3, 4))
    assert grown.sum() == 49 and grown[9:16, 9:16].all()
    assert half.sum() == 49 + 0.5 * (81 - 49)


def test_pixelation_has_the_means_of_blocks():
    x = noise()
    blocks = F.avg_pool2d(x, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(corrupt(x, "pixelation", 4), blocks)


# --- turned and moved ---


def test_quarter_turns_are_exact(digits):
    for turns in range(5):
        expected = torch.rot90(digits, turns, (2, 3))
        torch.testing.assert_close(rotate(digits, 90 * turns), expected, atol=2e-5, rtol=0)


def test_moved_columns_come_back_on_the_other_side(digits):
    moved = translate(digits, 5)
    assert torch.equal(moved[..., 5:], digits[..., :-5])
    assert torch.equal(moved[..., :5], digits[..., -5:])
    assert torch.equal(translate(moved, -5), digits)
