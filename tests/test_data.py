"""Image sets from disk, user data as tensors, minibatches, splits."""

import gzip
import hashlib
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pyro_bbb.data import Minibatches, as_tensors, load_images, split

X = torch.arange(14.0).reshape(7, 2)
Y = torch.arange(7)


# --- image sets, synthetic ---


def idx(array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


def tiny_arrays(part):
    n = {"train": 3, "t10k": 2}[part]
    images = np.arange(n * 28 * 28).reshape(n, 28, 28) % 256
    return {f"{part}-images-idx3-ubyte.gz": images, f"{part}-labels-idx1-ubyte.gz": np.arange(n)}


@pytest.fixture
def image_root(tmp_path, monkeypatch):
    """A root with a tiny MNIST known to torchvision's checksums; an empty cache and no network."""
    raw = tmp_path / "root" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    table = []
    for name, array in (tiny_arrays("train") | tiny_arrays("t10k")).items():
        (raw / name).write_bytes(idx(array))
        table.append((name, hashlib.md5(idx(array)).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", table)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [])  # every download fails at once
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYRO_BBB_DATA", raising=False)
    return tmp_path / "root"


@pytest.mark.parametrize("train", [True, False])
def test_images_have_the_values_of_the_file(image_root, train):
    images, labels = load_images("mnist", root=image_root, train=train)
    expected, expected_labels = tiny_arrays("train" if train else "t10k").values()
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    assert images.shape == (len(expected), 1, 28, 28)
    np.testing.assert_array_equal((images[:, 0] * 255).round().numpy(), expected)
    assert labels.tolist() == expected_labels.tolist()
    assert float(images.max()) == 1.0 and float(images.min()) == 0.0


def test_a_given_root_is_not_written_to(image_root):
    before = sorted(image_root.rglob("*"))
    for path in before:
        path.chmod(path.stat().st_mode & ~0o222)
    load_images("mnist", root=str(image_root))
    assert sorted(image_root.rglob("*")) == before
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()
    for path in before:  # so that the folder can be removed
        path.chmod(path.stat().st_mode | 0o200)


def test_the_environment_variable_names_the_root(image_root, monkeypatch):
    monkeypatch.setenv("PYRO_BBB_DATA", str(image_root))
    assert len(load_images("mnist")[0]) == 3
    with pytest.raises(FileNotFoundError):  # the argument goes first
        load_images("mnist", root=image_root / "elsewhere")


def test_an_unknown_set_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"\['fashion_mnist', 'mnist'\], got 'cifar'"):
        load_images("cifar")


def test_a_given_root_without_the_set_names_folder_and_layout(image_root):
    (image_root / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load_images("mnist", root=image_root)
    message = str(caught.value)
    assert "no train-labels-idx1-ubyte.gz in" in message
    assert str(image_root) in message and "ROOT/MNIST/raw/*.gz" in message
    assert "images" not in message  # the images are there
    assert len(load_images("mnist", root=image_root, train=False)[0]) == 2  # so is the test part


@pytest.mark.parametrize("damage", [b"", b"not a gzip file", None])
def test_a_damaged_file_is_named(image_root, damage):
    path = image_root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    with pytest.raises(RuntimeError, match=r"train-images-idx3-ubyte\.gz is damaged: its MD5"):
        load_images("mnist", root=image_root)


def test_a_failed_download_says_what_to_do(image_root):
    with pytest.raises(RuntimeError, match=r"--data-root.*PYRO_BBB_DATA.*ROOT/MNIST/raw/\*\.gz"):
        load_images("mnist")
    assert [p for p in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if p.is_file()] == []


@pytest.fixture
def downloads(image_root, monkeypatch):
    """Torchvision's download, replaced by a copy from ``image_root``; counts its calls."""
    calls = []

    def download(self):
        calls.append(self.root)
        for name, array in (tiny_arrays("train") | tiny_arrays("t10k")).items():
            Path(self.raw_folder).mkdir(parents=True, exist_ok=True)
            (Path(self.raw_folder) / name).write_bytes(idx(array))
            (Path(self.raw_folder) / name.removesuffix(".gz")).write_bytes(
                gzip.decompress(idx(array))
            )

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", download)
    return calls


def test_a_download_fills_the_cache_once(downloads):
    first, second = load_images("mnist"), load_images("mnist")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    load_images("mnist", train=False)
    assert len(downloads) == 1
    files = {p.name for p in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if p.is_file()}
    assert files == set(tiny_arrays("train") | tiny_arrays("t10k"))  # no scratch files are left


def test_two_downloads_at_once_agree(downloads):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load_images("mnist"), range(8)))
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


# --- image sets, real ---


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "n", "mean", "std", "first_labels"),
    [
        ("mnist", True, 60_000, 0.1307, 0.3081, [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]),
        ("mnist", False, 10_000, 0.1325, 0.3105, [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
        ("fashion_mnist", True, 60_000, 0.2860, 0.3530, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
        ("fashion_mnist", False, 10_000, 0.2868, 0.3524, [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]),
    ],
)
def test_the_real_sets_have_their_known_moments(name, train, n, mean, std, first_labels, real_root):
    images, labels = load_images(name, root=real_root, train=train)
    assert images.shape == (n, 1, 28, 28)
    assert float(images.mean()) == pytest.approx(mean, abs=5e-5)
    assert float(images.std()) == pytest.approx(std, abs=5e-5)
    assert labels[:10].tolist() == first_labels
    assert labels.unique().tolist() == list(range(10))


# --- as_tensors ---


class Items(Dataset):
    """A map-style dataset that is no TensorDataset."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], Y[0])])


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        (X.numpy()[::-1][::-1], Y),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(7)),
        Items([(X[i].numpy(), i) for i in range(7)]),
    ],
)
def test_every_kind_of_data_gives_the_same_tensors(data):
    x, y = as_tensors(data)
    torch.testing.assert_close((x, y), (X, Y), rtol=0, atol=0)


def test_a_dataset_longer_than_one_read_keeps_its_order():
    items = [(torch.tensor([float(i)]), i) for i in range(2500)]
    x, y = as_tensors(Items(items))
    assert y.tolist() == list(range(2500)) and torch.equal(x[:, 0], y.float())


def test_dtypes_are_kept_and_tensors_not_copied():
    x, y = as_tensors((np.zeros((2, 3)), np.zeros(2, dtype=np.float32)))
    assert (x.dtype, y.dtype) == (torch.float64, torch.float32)
    assert as_tensors((X, Y))[0] is X
    assert as_tensors(TensorDataset(X, Y))[0] is X


def test_read_only_arrays_are_taken_and_left_alone():
    array = np.ones((2, 3))
    array.setflags(write=False)
    x, _ = as_tensors((array, np.zeros(2)))
    x.zero_()
    assert array.sum() == 6


def test_data_move_to_the_device():
    x, y = as_tensors((X, Y.numpy()), device="meta")
    assert x.device.type == y.device.type == "meta"


BAD_X = X.clone()
BAD_X[4, 1] = math.nan
BAD_X[5, 0] = math.inf


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (3, TypeError, "data must be a pair.*or a map-style Dataset of pairs, got int"),
        (X, TypeError, "data must be a pair.*got Tensor"),
        (DataLoader(TensorDataset(X, Y)), TypeError, "data must be a pair.*got DataLoader"),
        (Stream(), TypeError, "data must be a map-style Dataset, got Stream"),
        (Items(list(X)), TypeError, r"data must have pairs \(x, y\) as items, got Items of others"),
        (Items([{"x": X[0]}]), TypeError, "data must have pairs"),
        (Items([]), ValueError, "data must not be empty"),
        ((X,), ValueError, r"data must be a pair \(x, y\), got 1 parts"),
        (TensorDataset(X, Y, Y), ValueError, r"data must be a pair \(x, y\), got 3 parts"),
        (Items([(X[0], Y[0], Y[0])]), ValueError, r"data must be a pair \(x, y\), got 3 parts"),
        ((X.tolist(), Y), TypeError, "x must be a tensor or a numeric numpy array, got list"),
        ((X, np.array(["a"] * 7)), TypeError, "y must be.*numeric numpy array, got dtype <U1"),
        ((X, np.array([None] * 7)), TypeError, "y must be.*got dtype object"),
        ((X[:0], Y[:0]), ValueError, r"x must have at least one example.*got shape \[0, 2\]"),
        ((X, Y[:0]), ValueError, r"y must have at least one example.*got shape \[0\]"),
        ((X, Y[0]), ValueError, r"y must have at least one example.*got shape \[\]"),
        ((X, Y[:5]), ValueError, "x and y must have equally many rows, got 7 and 5"),
        ((BAD_X, Y), ValueError, "x must be finite, got NaN or infinity first in row 4"),
        ((BAD_X[5:], Y[5:]), ValueError, "x must be finite, got NaN or infinity first in row 0"),
        ((X, BAD_X[:, 1].numpy()), ValueError, "y must be finite.*row 4"),
    ],
)
def test_bad_data_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        as_tensors(data)


# --- minibatches ---


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_an_epoch_has_every_row_once_with_its_target(batch_size, shuffle):
    batches = Minibatches(X, Y, batch_size, shuffle=shuffle)
    parts = list(batches)
    assert len(parts) == len(batches) == math.ceil(7 / batch_size)
    assert all(len(y) == min(batch_size, 7) for _, y in parts[:-1])
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    assert sorted(y.tolist()) == Y.tolist()
    assert torch.equal(x, X[y])
    if not shuffle:
        assert torch.equal(y, Y)


def test_epochs_differ_and_a_seed_repeats_them():
    x, y = torch.zeros(50, 1), torch.arange(50)

    def epochs(seed):
        batches = Minibatches(x, y, 16, generator=torch.Generator().manual_seed(seed))
        return [torch.cat([y for _, y in batches]).tolist() for _ in range(2)]

    first, second = epochs(3)
    assert first != second
    assert epochs(3) == [first, second]
    assert epochs(4) != [first, second]


def test_an_own_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    list(Minibatches(X, Y, 2, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, Y, 0), ValueError, "batch_size must be at least 1, got 0"),
        ((X, Y, 2.0), TypeError, "batch_size must be an int, got float"),
        ((X, Y, True), TypeError, "batch_size must be an int, got bool"),
        ((X, Y[:3], 2), ValueError, "equally many rows, got 7 and 3"),
        ((X[:0], Y[:0], 2), ValueError, "x must have at least one example"),
        ((X, Y.to("meta"), 2), ValueError, "x and y must be on one device, got cpu and meta"),
    ],
)
def test_bad_minibatches_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Minibatches(*arguments)


# --- split ---


def test_a_split_is_a_disjoint_cover_that_keeps_pairs():
    (x_a, y_a), (x_b, y_b) = split(X, Y, fraction=0.3, seed=0)
    assert (len(x_a), len(x_b)) == (5, 2)
    assert sorted(y_a.tolist() + y_b.tolist()) == Y.tolist()
    assert torch.equal(x_a, X[y_a]) and torch.equal(x_b, X[y_b])


def test_a_split_depends_on_its_seed_alone():
    x, y = torch.zeros(40, 1), torch.arange(40)
    before = torch.get_rng_state()
    parts = [split(x, y, fraction=0.5, seed=seed)[1][1].tolist() for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\)"):
        split(X, Y, fraction=fraction, seed=0)


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_a_split_without_a_part_is_refused(fraction):
    with pytest.raises(ValueError, match="of 7 examples leaves one part empty"):
        split(X, Y, fraction=fraction, seed=0)
