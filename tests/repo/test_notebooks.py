# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs on small data, and is committed as it was when it had run in full."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = {  # with the parameters of a run of seconds
    "active_learning": "STEPS = 2; MOST = 30",
    "adapt_a_network": "LABELS = 50; PASSES = 2; EPOCHS = 2; DRAWS = 3",
    "any_network": "EPOCHS = 2; DRAWS = 3",
    "estimators": "DRAWS = 5; EPOCHS = 2; SEEDS = range(1); EVERY = 1; GRADIENTS = 2; REPEATS = 3",
    "fashion_mnist": "EPOCHS = 1; DRAWS = 5",
    "learning_in_sequence": "EPOCHS = 2; SAMPLES = 3",
    "lenet5_mnist": "EPOCHS = 2; DRAWS = 3",
    "mnist_mlp": "EPOCHS = 2; PASSES = 3",
    "mushroom_bandit": "ROUNDS, AT_ONCE = 6, 10; NUM_BATCHES = 2",
    "paper_mnist": "EPOCHS = 1; WIDTH = 32; DRAWS = 5",
    "paper_pruning": "EPOCHS = 1; WIDTH = 32",
    "paper_regression": "STEPS = 5; DRAWS = 20",
    "sine_regression": "STEPS = 2; LENGTH = 5; DEPTH = 3",
    "swap_guides_and_priors": "STEPS = 2; DRAWS = 8; LENGTH = 8; DEPTH = 3",
    "uci_regression": "STEPS = 5",
    "which_posterior": "IMAGES = 400; EPOCHS = 2; DRAWS = 4",
}
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|Users|root|tmp|mnt|opt|usr|var|work|workspace|content)/|[A-Z]:\\\\?Users"
)

each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def faults(cells):
    """Outputs that no reader should see: errors, and what was written to stderr."""
    outputs = [output for cell in cells for output in cell.outputs]
    return [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def texts(notebook):
    """All that a reader sees as text: sources and outputs without the pictures."""
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield "\n".join(output.get("traceback", []))
            data = output.get("data", {}).items()
            yield from (value for mime, value in data if mime.startswith("text/"))


def test_every_notebook_is_listed():
    assert sorted(path.stem for path in FOLDER.rglob("*.ipynb")) == sorted(NOTEBOOKS)


def test_every_notebook_is_in_the_gallery():
    gallery = (ROOT / "docs" / "notebooks" / "index.md").read_text("utf-8")
    assert sorted(re.findall(r"\*\*\[[^]]*]\((\w+)\.md\)\*\*", gallery)) == sorted(NOTEBOOKS)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One kernel for all notebooks: half of the time of each was importing torch and Pyro."""
    folder = tmp_path_factory.mktemp("kernel")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name))
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel()
        yield manager
        manager.shutdown_kernel(now=True)


# the state that notebooks share is as at the start of a kernel, and so are the names that they see
ANEW = """import os, warnings, matplotlib, pyro, torch
os.chdir({folder!r})
pyro.clear_param_store()
torch.seed()
matplotlib.rcdefaults()
warnings.filterwarnings("ignore", "training ended at")  # with the settings of a test
from tests._support import small_data
small_data.install()
%matplotlib inline
%reset -f"""


@pytest.mark.slow
@each_notebook
def test_it_runs(name, kernel, tmp_path):
    notebook = read(name)
    notebook.cells.insert(1 + parameters(notebook), nbformat.v4.new_code_cell(NOTEBOOKS[name]))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(ANEW.format(folder=str(tmp_path))))
    client = NotebookClient(notebook, km=kernel, timeout=120)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    assert not faults(code_cells(notebook))
    assert not list(tmp_path.iterdir()), "it left files behind"


@each_notebook
def test_it_is_committed_with_its_outputs(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[-1].outputs and not faults(cells)
    silent = [cell.source for cell in cells if not cell.outputs and shows(cell.source)]
    assert not silent


def shows(source):
    """Whether a cell prints, draws, or ends in an expression."""
    last = source.rstrip().splitlines()[-1]
    ends_in_a_call = re.match(r"[a-z]\w*\(|Markdown\(|display\(", last) is not None
    return "plt.show()" in source or re.search(r"^\s*print\(", source, re.M) or ends_in_a_call


def parameters(notebook):
    """Index of the cell that has the tag `parameters`, after which others are injected."""
    (index,) = (
        i for i, cell in enumerate(notebook.cells) if cell.metadata.get("tags") == ["parameters"]
    )
    return index


@each_notebook
def test_nothing_tells_whose_machine_it_was(name):
    notebook = read(name)
    assert not [text for text in texts(notebook) if MACHINE_PATH.search(text)]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert notebook.metadata.language_info == {"name": "python"}
    tagged = parameters(notebook)
    assert not any(cell.metadata for i, cell in enumerate(notebook.cells) if i != tagged)
