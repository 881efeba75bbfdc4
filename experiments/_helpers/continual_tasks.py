# SPDX-License-Identifier: Apache-2.0
"""Sequences of tasks for continual learning, made of one set of images."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from _helpers.images import images, train_and_validation
from _helpers.run import Data


@dataclass(frozen=True)
class Task:
    """One task: images ``[n, 784]``, labels ``[n]``, and the last layer that answers it."""

    data: Callable[[bool], Data]
    """The training part, or the one that is scored."""
    head: str
    """Name of its last layer; tasks of one name share it."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A published sequence of tasks."""

    title: str
    dataset: str
    hidden: tuple[int, int]
    """Units of the hidden layers."""
    outputs: int
    """Classes of a task."""
    own_heads: bool
    """Each task has a last layer of its own, and its name is known when it is scored."""
    tasks: Callable[[Data, Data, int, bool], list[Task]]
    """Makes them, of training and scored images, and a seed."""
    coreset: int
    """Images of each task that a coreset keeps."""
    published: dict[str, float] = field(default_factory=dict)
    """Average accuracy after the last task, by method."""

    def sequence(
        self, root: Path | None, *, smoke: bool, seed: int, validation: bool = False
    ) -> list[Task]:
        """The tasks; with ``validation``, held-out training images take the test images' part."""
        train = images(self.dataset, root, train=True, smoke=smoke)
        if validation:
            train, scored = train_and_validation(train, 1 / 12)
        else:
            scored = images(self.dataset, root, train=False, smoke=smoke)
        (x, y), (x_scored, y_scored) = train, scored
        flat = (x.flatten(1), y), (x_scored.flatten(1), y_scored)
        return self.tasks(*flat, seed, self.own_heads)


def permuted(train: Data, scored: Data, seed: int, own_heads: bool) -> list[Task]:
    """Ten tasks: all digits, the pixels in another order each time, the first as they are."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(784), *(torch.randperm(784, generator=generator) for _ in range(9))]
    return [Task(reordered(train, scored, order), "last") for order in orders]


def reordered(train: Data, scored: Data, order: Tensor) -> Callable[[bool], Data]:
    """Images whose pixels are in another order, made when they are asked for."""

    def data(training: bool) -> Data:
        x, y = train if training else scored
        return x[:, order], y

    return data


def split(train: Data, scored: Data, seed: int, own_heads: bool) -> list[Task]:
    """Five tasks: to tell class 0 from 1, then 2 from 3, and so on."""
    return [
        Task(pair(train, scored, first), f"last{first // 2}" if own_heads else "last")
        for first in range(0, 10, 2)
    ]


def pair(train: Data, scored: Data, first: int) -> Callable[[bool], Data]:
    """Images of two classes that follow each other, labelled 0 and 1."""

    def data(training: bool) -> Data:
        x, y = train if training else scored
        rows = (y == first) | (y == first + 1)
        return x[rows], y[rows] - first

    return data


PROTOCOLS = {
    "permuted": Protocol(
        title="permuted MNIST",
        dataset="mnist",
        hidden=(100, 100),
        outputs=10,
        own_heads=False,
        tasks=permuted,
        coreset=200,
        published={
            "VCL": 0.90,
            "VCL, random coreset of 200": 0.93,
            "mean field, Swaroop et al.": 0.93,
            "EWC": 0.84,
            "SI": 0.86,
            "Laplace propagation": 0.82,
        },
    ),
    "split": Protocol(
        title="split MNIST",
        dataset="mnist",
        hidden=(256, 256),
        outputs=2,
        own_heads=True,
        tasks=split,
        coreset=40,
        published={
            "VCL": 0.970,
            "VCL, random coreset of 40": 0.984,
            "mean field, Swaroop et al.": 0.984,
            "EWC": 0.631,
            "SI": 0.989,
        },
    ),
    "split_fashion": Protocol(
        title="split Fashion-MNIST",
        dataset="fashion_mnist",
        hidden=(256, 256),
        outputs=2,
        own_heads=True,
        tasks=split,
        coreset=40,
    ),
    "split_one_head": Protocol(
        title="split MNIST, the task not known",
        dataset="mnist",
        hidden=(256, 256),
        outputs=2,
        own_heads=False,
        tasks=split,
        coreset=40,
        published={"VCL": 0.64, "TD-VCL": 0.66},
    ),
}
