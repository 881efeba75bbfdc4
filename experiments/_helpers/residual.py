# SPDX-License-Identifier: Apache-2.0
"""Small networks with BatchNorm, residual branches and attention, as plain torch modules."""

import torch
from torch import Tensor, nn


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
