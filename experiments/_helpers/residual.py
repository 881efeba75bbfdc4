# SPDX-License-Identifier: Apache-2.0
"""Small networks with BatchNorm, residual branches and attention, as plain torch modules."""

import torch
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb.priors import CONTEXTS


class Block(nn.Module):
    """Residual block of two 3x3 convolutions (He et al. 2015, arXiv:1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the block's input and its residual branch."""
        branch = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(self.short(x) + branch)


class ResNet(nn.Module):
    """Three stages of residual blocks on images ``[n, 1, 28, 28]``, at 14, 7 and 4 pixels."""

    def __init__(self, channels: tuple[int, ...] = (8, 16, 32), blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels[0], 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels[0])
        widths = [channels[0], *(width for width in channels for _ in range(blocks))]
        self.blocks = nn.Sequential(
            *(
                Block(inputs, outputs, 1 if inputs == outputs else 2)
                for inputs, outputs in zip(widths, widths[1:], strict=False)
            )
        )
        self.last = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[n, 10]``."""
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return self.last(x.mean((-2, -1)))


class Transformer(nn.Module):
    """Two encoder blocks over patches of 7x7 pixels (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, stride=7)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[n, 10]``."""
        tokens = self.patches(x).flatten(-2).transpose(-2, -1) + self.position
        return self.last(self.encoder(tokens).mean(-2))


def shifted(x: Tensor, *, flip: bool) -> Tensor:
    """Shift images by up to two pixels, and mirror half of them if wanted."""
    across, down = torch.randint(-2, 3, (2, len(x)))
    rows = (torch.arange(28) - down[:, None]).clamp(0, 27)[:, None, :, None]
    columns = (torch.arange(28) - across[:, None]).clamp(0, 27)[:, None, None, :]
    if flip:
        columns = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, columns, 27 - columns)
    return x[torch.arange(len(x))[:, None, None, None], 0, rows, columns]


def patches(x: Tensor) -> Tensor:
    """Replace each field of a grid of 4 x 4 by one from a random place of the image."""
    offsets = nn.functional.interpolate(torch.empty(len(x), 2, 4, 4).uniform_(-1, 1), x.shape[-2:])
    identity = torch.eye(2, 3).expand(len(x), 2, 3)
    places = nn.functional.affine_grid(identity, list(x.shape), align_corners=False)
    places = places + offsets.movedim(1, -1)
    return nn.functional.grid_sample(x, places, padding_mode="reflection", align_corners=False)


def edges(x: Tensor) -> Tensor:
    """Return differences of neighbouring pixels, as thin lines."""
    return ((x - x.roll(1, -1)).abs() + (x - x.roll(1, -2)).abs()).clamp(0, 1)


def train_augmented(
    network: nn.Module, data: tuple[Tensor, Tensor], epochs: int, *, flip: bool, outliers: float
) -> nn.Module:
    r"""Train on shifted images by SGD in bfloat16, the learning rate along one cycle.

    ``outliers`` weighs the mean of $-\log p$ over all classes at images made of others
    (Hendrycks et al. 2019, arXiv:1812.04606).
    """
    batches = bbb.data.Minibatches(*data, batch_size=128)
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    descent = torch.optim.SGD(network.parameters(), lr=0.2, **options)
    steps = epochs * len(batches)
    cycle = torch.optim.lr_scheduler.OneCycleLR(descent, 0.2, total_steps=steps, pct_start=0.2)
    changes = patches, CONTEXTS["warped"], CONTEXTS["clouds"], edges, CONTEXTS["mixed"]
    network.to(memory_format=torch.channels_last).train()
    for step in range(steps):
        if step % len(batches) == 0:
            epoch = iter(batches)
        x, y = next(epoch)
        x, known = shifted(x, flip=flip), len(x)
        if outliers:
            change = changes[int(torch.randint(len(changes), ()))]
            x = torch.cat([x, change(data[0][torch.randint(len(data[0]), (32,))])])
        with torch.autocast("cpu", torch.bfloat16):
            outputs = network(x.contiguous(memory_format=torch.channels_last))
        log_probs = outputs.float().log_softmax(-1)
        loss = nn.functional.nll_loss(log_probs[:known], y)
        if outliers:
            loss = loss - outliers * log_probs[known:].mean()
        descent.zero_grad()
        loss.backward()
        descent.step()
        cycle.step()
    return network.eval()
