# SPDX-License-Identifier: Apache-2.0
"""Image sets and tables from disk, downloads, user data as tensors, minibatches, splits."""

import gzip
import hashlib
import io
import itertools
import math
import os
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from scipy import sparse
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler
from torch.utils.data import Dataset, Subset, TensorDataset

from pyro_bbb import data
from pyro_bbb.data import (
    Minibatches,
    _tables,
    as_tensors,
    cache,
    load_images,
    load_mushrooms,
    load_uci,
    read_uci,
    split,
)

X = torch.arange(14.0).reshape(7, 2)
Y = torch.arange(7)
ROOT = Path(__file__).resolve().parents[1]


# --- image sets, synthetic ---


def idx(array):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


def tiny_arrays(split):
    n = {"train": 3, "t10k": 2}[split]
    images = np.arange(n * 28 * 28).reshape(n, 28, 28) % 256
    return {f"{split}-images-idx3-ubyte.gz": images, f"{split}-labels-idx1-ubyte.gz": np.arange(n)}


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


def test_a_given_root_without_the_set_names_folder_and_layout(image_root):
    (image_root / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load_images("mnist", root=image_root)
    message = str(caught.value)
    assert str(image_root / "MNIST/raw/train-labels-idx1-ubyte.gz") in message
    assert "ROOT/MNIST/raw/train-labels-idx1-ubyte.gz" in message
    assert "images" not in message  # the images are there
    assert len(load_images("mnist", root=image_root, train=False)[0]) == 2  # so is the test part


def test_a_damaged_file_is_named(image_root):
    path = image_root / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"train-images-idx3-ubyte\.gz is damaged: its MD5"):
        load_images("mnist", root=image_root)


def cached_files():
    return [p for p in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if p.is_file()]


@pytest.fixture
def downloads(image_root, monkeypatch):
    """``image_root`` as the second of two mirrors; lists the addresses that answered."""
    answered, urlopen = [], cache.urlopen

    def listed(url, **options):
        answer = urlopen(url, **options)
        answered.append(url)
        return answer

    folder = (image_root / "MNIST" / "raw").as_uri()
    mirrors = [f"{folder}/elsewhere/", f"{folder}/"]
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", mirrors)
    monkeypatch.setattr(cache, "urlopen", listed)
    return answered


def test_a_download_fills_the_cache_once(downloads):
    first, second = load_images("mnist"), load_images("mnist")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(downloads) == 2
    load_images("mnist", train=False)
    assert len(downloads) == 4
    assert {p.name for p in cached_files()} == set(tiny_arrays("train") | tiny_arrays("t10k"))


def cached(name):
    return Path(os.environ["XDG_CACHE_HOME"], "pyro_bbb", "MNIST", "raw", name)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-9])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, os.remove])
def test_a_damaged_file_of_the_cache_is_downloaded_again_once(downloads, damage):
    file, intact = "train-labels-idx1-ubyte.gz", load_images("mnist")
    damage(cached(file))
    for _ in range(2):
        torch.testing.assert_close(load_images("mnist"), intact, rtol=0, atol=0)
    assert [Path(url).name for url in downloads[2:]] == [file]


def test_two_downloads_at_once_agree(downloads):
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: load_images("mnist"), range(4)))
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    assert {p.name for p in cached_files()} == set(tiny_arrays("train"))


# --- image sets, real ---


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "n", "mean", "std", "first_labels"),
    [
        ("mnist", False, 10_000, 0.1325, 0.3105, [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
        ("fashion_mnist", True, 60_000, 0.2860, 0.3530, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
    ],
)
def test_the_real_sets_have_their_known_moments(name, train, n, mean, std, first_labels, real_root):
    images, labels = load_images(name, root=real_root, train=train)
    assert images.shape == (n, 1, 28, 28)
    assert float(images.mean()) == pytest.approx(mean, abs=5e-5)
    assert float(images.std()) == pytest.approx(std, abs=5e-5)
    assert labels[:10].tolist() == first_labels
    assert labels.unique().tolist() == list(range(10))


# --- tables, synthetic ---


def tiny_table(**changes):
    rng = np.random.default_rng(0)
    return {
        "X": rng.normal(size=(5, 2)),
        "y": rng.normal(size=5),
        "train_index": np.array([[0, 1, 2], [4, 2, 0]], dtype=np.int32),
        "test_index": np.array([[4, 3], [1, 3]], dtype=np.int32),
    } | changes


def write_table(root, name="new", **arrays):
    path = root / "uci" / name / "data.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_a_table_of_an_unknown_name_is_read_as_it_is(tmp_path):
    table = tiny_table()
    path = write_table(tmp_path, **table)
    path.chmod(0o444)
    data = load_uci("new", root=tmp_path)
    assert [tensor.dtype for tensor in data] == [torch.float32] * 2 + [torch.int64] * 2
    for column, array in zip(data, table.values(), strict=True):
        np.testing.assert_array_equal(column.numpy(), array.astype(column.numpy().dtype))
    (x_train, y_train), (x_test, y_test) = data.split(1)
    np.testing.assert_array_equal(x_train, table["X"][[4, 2, 0]].astype(np.float32))
    np.testing.assert_array_equal(y_test, table["y"][[1, 3]].astype(np.float32))
    assert y_train.shape == (3,) and x_test.shape == (2, 2)


def test_tables_come_from_the_folder_of_the_environment_or_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYRO_BBB_DATA", raising=False)
    write_table(tmp_path / "cache" / "pyro_bbb", **tiny_table())
    assert load_uci("new", device="meta").x.device.type == "meta"
    monkeypatch.setenv("PYRO_BBB_DATA", str(tmp_path))
    for load in (lambda: load_uci("new"), load_mushrooms):
        with pytest.raises(FileNotFoundError, match=r"^no .*; pass root=ROOT .* set PYRO_BBB"):
            load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "y of .* must hold real numbers in 1-d, got no such array"),
        ({"X": np.zeros(5)}, r"X of .* must hold real numbers in 2-d, got float64 of shape \[5\]"),
        ({"y": np.array(["a"] * 5)}, "y of .* must hold real numbers in 1-d, got <U1"),
        ({"y": np.zeros(4)}, "X and y of .* equally many rows, got 5 and 4"),
        ({"X": np.full((5, 2), math.nan)}, "X of .* must be finite"),
        ({"train_index": np.zeros((2, 3))}, "train_index of .* must hold integers in 2-d"),
        ({"test_index": np.array([[4, 3]])}, "must have equally many splits, got 2 and 1"),
        ({"test_index": np.array([[4, 3], [1, -1]])}, r"rows in \[0, 4\], got -1 to 4"),
        ({"test_index": np.array([[4, 3], [1, 4]])}, "split 1 of .* has a row more than once"),
    ],
)
def test_tables_of_another_layout_are_refused(tmp_path, changes, message):
    write_table(tmp_path, **tiny_table(**changes))
    with pytest.raises(ValueError, match=message):
        load_uci("new", root=tmp_path)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("what a file held was executed",)


def test_a_table_cut_anywhere_or_with_a_wrong_byte_is_refused_or_read_right(tmp_path):
    path = write_table(tmp_path, **tiny_table())
    content, intact = path.read_bytes(), load_uci("new", root=tmp_path)
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for damaged in (pickle.dumps(Bomb()), array.getvalue(), *(content[:n] for n in (0, 77, 500))):
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=r"is damaged or not an \.npz file of numbers"):
            load_uci("new", root=tmp_path)
    for place in range(0, len(content), 17):  # some bytes of a zip file, as its dates, say nothing
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            tensors = load_uci("new", root=tmp_path)
        except (RuntimeError, ValueError) as error:
            assert str(path) in str(error)
        else:
            assert all(map(torch.equal, tensors, intact))


def test_a_known_table_must_be_the_known_file(tmp_path):
    write_table(tmp_path, "yacht", **tiny_table())
    with pytest.raises(
        RuntimeError, match=r"data\.npz is damaged: the SHA-256 of its numbers is .* expected bce1a"
    ):
        load_uci("yacht", root=tmp_path)


def test_any_file_of_the_layout_is_read_in_any_precision(tmp_path):
    far = 1e9 + np.arange(10.0).reshape(5, 2)  # which float32 cannot tell apart
    path = write_table(tmp_path, "yacht", **tiny_table(X=far))
    data = read_uci(path, dtype=torch.float64)
    assert [tensor.dtype for tensor in data] == [torch.float64] * 2 + [torch.int64] * 2
    np.testing.assert_array_equal(data.x, far)
    assert read_uci(str(path)).x.dtype == torch.float32
    with pytest.raises(FileNotFoundError, match="path must be a file, there is none at .*absent"):
        read_uci(tmp_path / "absent")


MUSHROOMS = b"p,x,?\ne,b,s\ne,x,s\n"


def test_mushrooms_are_one_hot_by_column_and_alphabet(tmp_path, monkeypatch):
    monkeypatch.setattr(_tables, "_MUSHROOMS_SHA256", hashlib.sha256(MUSHROOMS).hexdigest())
    path = tmp_path / "mushroom" / "agaricus-lepiota.data"
    path.parent.mkdir()
    path.write_bytes(MUSHROOMS)
    x, y = load_mushrooms(root=tmp_path)
    assert x.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]]  # b, x; ?, s
    assert y.tolist() == [1, 0, 0]
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    path.write_bytes(MUSHROOMS[:-1])
    with pytest.raises(RuntimeError, match=r"agaricus-lepiota\.data is damaged: its SHA256"):
        load_mushrooms(root=tmp_path)


# --- tables, downloaded ---


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder from which downloads come, as a site; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYRO_BBB_DATA", raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(_tables, "REGRESSION", f"{folder.as_uri()}/{{name}}-{{file}}")
    monkeypatch.setattr(_tables, "MUSHROOMS", f"{folder.as_uri()}/mushrooms")
    return folder


def test_mushrooms_are_downloaded_once_and_verified(mirror, monkeypatch):
    (mirror / "mushrooms").write_bytes(MUSHROOMS)
    with pytest.raises(RuntimeError, match="is damaged: its SHA256"):
        load_mushrooms()
    assert not (mirror.parent / "cache").exists()  # what is damaged is not saved
    monkeypatch.setattr(_tables, "_MUSHROOMS_SHA256", hashlib.sha256(MUSHROOMS).hexdigest())
    assert len(load_mushrooms()[1]) == 3
    (mirror / "mushrooms").unlink()
    assert len(load_mushrooms()[1]) == 3


def test_a_download_that_fails_says_where_files_may_lie(mirror):
    for load, layout in (
        (load_mushrooms, "ROOT/mushroom/agaricus-lepiota.data"),
        (lambda: load_uci("yacht"), "ROOT/uci/yacht/data.npz"),
    ):
        with pytest.raises(RuntimeError, match=f"could not download .*: without.*{layout}$"):
            load()
    with pytest.raises(FileNotFoundError, match="no .*unknown"):
        load_uci("unknown")
    with pytest.raises(FileNotFoundError):  # the user's folder is never written to
        load_uci("yacht", root=mirror)


@pytest.mark.data
@pytest.mark.parametrize("name", sorted(_tables._UCI_SHA256))
def test_a_downloaded_table_is_the_known_one_with_the_same_splits(mirror, real_root, name):
    expected = load_uci(name, root=real_root)
    table = read_uci(real_root / "uci" / name / "data.npz", dtype=torch.float64)
    columns = torch.cat([table.x, table.y[:, None]], 1)
    for file, numbers in (
        ("data.txt", columns.numpy()),
        ("index_features.txt", np.arange(table.x.shape[1])),
        ("index_target.txt", [table.x.shape[1]]),
    ):
        np.savetxt(mirror / f"{name}-{file}", numbers, fmt="%.17g")
    assert all(map(torch.equal, load_uci(name), expected))


# --- as_tensors ---


class Items(Dataset):
    """A map-style dataset that is no TensorDataset."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@pytest.mark.parametrize(
    "data",
    [
        [X, Y],
        (X.numpy()[::-1][::-1], Y),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(7)),
        Items([(X[i].numpy(), i) for i in range(7)]),
    ],
)
def test_every_kind_of_data_gives_the_same_tensors(data):
    x, y = as_tensors(data)
    torch.testing.assert_close((x, y), (X, Y), rtol=0, atol=0)


def test_dtypes_are_kept_tensors_not_copied_and_devices_changed():
    x, y = as_tensors((np.zeros((2, 3)), np.zeros(2, dtype=np.float32)))
    assert (x.dtype, y.dtype) == (torch.float64, torch.float32)
    assert as_tensors(TensorDataset(X, Y))[0] is X
    assert all(tensor.is_meta for tensor in as_tensors((X, Y.numpy()), device="meta"))


BAD_X = X.clone()
BAD_X[4, 1] = math.nan
BAD_X[5, 0] = math.inf


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((BAD_X, Y), "x must be finite, got NaN or infinity first in row 4"),
        ((BAD_X[5:], Y[5:]), "x must be finite, got NaN or infinity first in row 0"),
        ((X, BAD_X[:, 1].numpy()), "y must be finite.*row 4"),
    ],
)
def test_the_first_row_that_is_not_finite_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        as_tensors(data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_finite_numbers_may_have_a_sum_that_is_not(dtype):
    x = torch.full((7, 40), torch.finfo(dtype).max, dtype=dtype)
    assert not x.sum().isfinite()
    assert torch.equal(as_tensors((x, Y))[0], x)


# --- minibatches ---


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_an_epoch_has_every_row_once_with_its_target(batch_size, shuffle):
    batches = Minibatches(X, Y, batch_size, shuffle=shuffle)
    epoch = list(batches)
    assert len(epoch) == len(batches) == math.ceil(7 / batch_size)
    assert all(len(y) == min(batch_size, 7) for _, y in epoch[:-1])
    x, y = (torch.cat(column) for column in zip(*epoch, strict=True))
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


# --- split ---


def test_a_split_is_a_disjoint_cover_that_keeps_pairs():
    before = torch.get_rng_state()
    (x_a, y_a), (x_b, y_b) = split(X, Y, fraction=0.3, seed=0)
    assert torch.equal(split(X, Y, fraction=0.3, seed=0)[0][0], x_a)
    assert not torch.equal(split(X, Y, fraction=0.3, seed=1)[0][0], x_a)
    assert torch.equal(torch.get_rng_state(), before)
    assert (len(x_a), len(x_b)) == (5, 2)
    assert sorted(y_a.tolist() + y_b.tolist()) == Y.tolist()
    assert torch.equal(x_a, X[y_a]) and torch.equal(x_b, X[y_b])


# --- standardisation ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_are_standardised_as_by_scikit_learn(dtype):
    x = torch.tensor(load_diabetes(scaled=False).data, dtype=dtype) + 1e4
    scaled, scaling = data.standardize(x[:300])
    oracle = StandardScaler().fit(x[:300].double().numpy())
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-10}
    np.testing.assert_allclose(scaled, oracle.transform(x[:300].double().numpy()), **tolerance)
    np.testing.assert_allclose(
        scaling(x[300:]), oracle.transform(x[300:].double().numpy()), **tolerance
    )
    assert scaled.dtype == dtype and scaling.mean.dtype == torch.float64


def test_a_constant_column_becomes_0_and_rows_may_be_numbers():
    scaled, scaling = data.standardize(torch.tensor([[1.0, 0.1], [3.0, 0.1]]))
    assert scaled.tolist() == [[-1.0, 0.0], [1.0, 0.0]] and scaling.scale[1] == 1
    assert data.standardize(torch.tensor([0, 2]))[0].tolist() == [-1.0, 1.0]
    scaled, _ = data.standardize(torch.tensor([1e9, 1e9 + 1], dtype=torch.float64))
    assert scaled.tolist() == [-1.0, 1.0]  # small against its size, and no rounding


@pytest.mark.parametrize("power", [-960, 1020])
def test_columns_of_any_size_are_standardised_alike(power):
    """A power of 2 changes no digit, though its square is 0 or infinite."""
    x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    huge = x * 2.0**power
    expected, _ = data.standardize(x)
    scaled, scaling = data.standardize(torch.stack([huge, x], -1))
    assert torch.equal(scaled[..., 0], expected) and torch.equal(scaled[..., 1], expected)
    assert scaling.scale.isfinite().all()


def test_the_difference_of_the_largest_numbers_is_standardised():
    largest = torch.finfo(torch.float64).max
    x = torch.tensor([largest, largest, largest, -largest], dtype=torch.float64)
    expected = data.standardize(torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64))[0]
    torch.testing.assert_close(data.standardize(x)[0], expected)


def _radius(x, rows):
    """Largest distance to the nearest of the rows."""
    return torch.cdist(x, x[torch.as_tensor(rows)]).amin(-1).max()


def test_k_center_is_greedy_and_within_twice_the_best():
    x = torch.randn(14, 3, generator=torch.Generator().manual_seed(0)).double()
    for size in (1, 2, 3, 4):
        rows = data.k_center(x, size, seed=3).tolist()
        assert len(set(rows)) == size
        for i in range(1, size):
            near = torch.cdist(x, x[rows[:i]]).amin(-1)
            assert near[rows[i]] == near.max()
        best = min(_radius(x, centers) for centers in itertools.combinations(range(14), size))
        assert _radius(x, rows) <= 2 * best
    first = {int(data.k_center(x, 1, seed=seed)) for seed in range(50)}
    assert len(first) > 5 and data.k_center(x, 1).shape == (1,)


@pytest.mark.parametrize("shape", [(6,), (6, 1, 2, 2)])
def test_k_center_takes_equal_examples_once_each(shape):
    rows = data.k_center(torch.ones(shape), 6, seed=1)
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("layout", ["to_sparse", "scipy"])
def test_sparse_inputs_are_made_dense_up_to_a_gibibyte(layout):
    x = torch.eye(1024)
    thin = sparse.csr_array(x.numpy()) if layout == "scipy" else getattr(x, layout)()
    dense, _ = data.as_tensors((thin, torch.zeros(1024)))
    assert dense.layout == torch.strided and torch.equal(dense, x)
    size, none = 2**15, torch.zeros(2, 0, dtype=torch.long)
    wide = torch.sparse_coo_tensor(none, torch.zeros(0), (size, size), check_invariants=True)
    thin = sparse.csr_array((size, size), dtype="f4") if layout == "scipy" else wide
    call = "toarray" if layout == "scipy" else "to_dense"
    with pytest.raises(TypeError, match=f"at most 1 GiB when dense.*takes 4 GiB: pass x.{call}"):
        data.as_tensors((thin, torch.zeros(size)))
