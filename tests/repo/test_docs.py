# SPDX-License-Identifier: Apache-2.0
"""The documentation: the site builds strictly, its links lead somewhere, its code runs."""

import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType, SimpleNamespace

import matplotlib.pyplot as plt
import pytest

import pyro_bbb
from pyro_bbb._utils.pages import _TITLES, read_on
from tests._support import doc_runner as blocks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyro_bbb"

# --- the site ---


# what a browser fetches without being asked, from another host
FOREIGN = re.compile(r"<(?!a\b)\w+\b[^>]*\s(?:href|src)=[\"']?(?:https?:)?//[^>]*>")


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_host(tmp_path):
    """Strictly: a link or an anchor that leads nowhere is an error, see ``mkdocs.yml``."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [path.read_text("utf-8") for path in tmp_path.rglob("*.html")]
    assert len(pages) > 60
    assert not [match for page in pages for match in FOREIGN.findall(page)]
    assert not [page for page in pages if "<p>| " in page], "rows of a table without a head"
    assert FOREIGN.search('<script async src="https://host/x.js">')


def test_every_warning_names_a_page_by_its_title():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page, title in _TITLES.items():
        assert f"- {title}: {page}.md\n" in navigation
        assert f'"{title}", docs/{page}.md' in read_on(page)
    warners = [p for p in PACKAGE.rglob("*.py") if "warnings.warn(" in p.read_text("utf-8")]
    assert len(warners) > 6
    for module in warners:
        assert "read_on(" in module.read_text("utf-8"), f"{module} warns without a page"


# --- the reference ---


def public_modules():
    """The package, its public modules and packages, and the modules that these list."""
    names = [info.name for info in pkgutil.iter_modules(pyro_bbb.__path__, "pyro_bbb.")]
    modules = [pyro_bbb, *map(importlib.import_module, names)]
    public = [module for module in modules if not module.__name__.split(".")[-1].startswith("_")]
    for module in public:
        yield module
        listed = (getattr(module, name) for name in getattr(module, "__all__", ()))
        yield from (value for value in listed if isinstance(value, ModuleType))


def public_names():
    """Every public object, by each of its names."""
    names = {}
    for module in public_modules():
        for name in getattr(module, "__all__", None) or own(module):
            if not isinstance(getattr(module, name), ModuleType):
                names.setdefault(id(getattr(module, name)), set()).add(f"{module.__name__}.{name}")
    return list(names.values())


def own(module):
    """Functions and classes that a module without ``__all__`` defines or passes on by ``as``."""
    source = Path(module.__file__).read_text("utf-8")
    passed_on = set(re.findall(r"import (\w+) as \1$", source, flags=re.MULTILINE))
    for name, value in vars(module).items():
        if (isclass(value) or isfunction(value)) and not name.startswith("_"):
            if value.__module__ == module.__name__ or name in passed_on:
                yield name


def test_every_public_name_is_in_the_reference_once():
    pages = [path.read_text("utf-8") for path in blocks.PAGES]
    shown = Counter(name for page in pages for name in re.findall(r"^::: (\S+)", page, flags=re.M))
    public = public_names()
    assert len(public) > 100
    assert not [names for names in public if sum(shown[name] for name in names) != 1]
    assert not set(shown) - set().union(*public)


# --- the code ---


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in; another is the home, so that nothing is written elsewhere."""
    for name in ("here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("PYRO_BBB_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "page", None)  # taken out again afterwards
    yield tmp_path / "here"
    plt.close("all")


def name_of(page):
    return page.relative_to(ROOT / "docs").with_suffix("").as_posix()


RUN = [page for page in blocks.PAGES if any(block.reason is None for block in blocks.blocks(page))]


# packages that a page needs and some installation of `dev` may not have
NEEDS = {
    "guide/search_settings": "optuna",
    "guide/bayesian_optimization": "botorch",
    "tutorial": "fastapi",
    "guide/large_networks": "peft",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name_of)
@pytest.mark.filterwarnings("ignore:targets have mean")  # one page has them on purpose
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_the_code_runs(page, elsewhere, capsys):
    if page.parent.name == "migrate":  # from another library, which conda-forge may not have
        pytest.importorskip(page.stem)
    if name_of(page) in NEEDS:
        pytest.importorskip(NEEDS[name_of(page)])
    assert blocks.run_page(page, elsewhere, capsys)


def test_a_block_is_left_out_for_a_good_reason_only():
    for page in blocks.PAGES:
        blocks.check_reasons(page)


# --- the guide's order ---


def test_each_page_of_the_guide_names_the_next():
    """In the order of the navigation in ``mkdocs.yml``; the last page names none."""
    order = re.findall(r": (guide/\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert set(order) == {f"guide/{page.name}" for page in (ROOT / "docs" / "guide").glob("*.md")}
    *texts, last = [(ROOT / "docs" / page).read_text("utf-8") for page in order]
    for text, following, page in zip(texts, [*texts[1:], last], order[1:], strict=True):
        title = following.splitlines()[0].removeprefix("# ")
        assert text.endswith(f"\n\nNext: [{title}]({Path(page).name})\n"), page
    assert "\nNext: [" not in last


# --- what the site adds to the pages ---


@pytest.fixture(scope="module")
def hooks():
    """The module that MkDocs runs."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[a](../../README.md#more)", "[a](../project/readme.md#more)"),
        ("[a](../../experiments/quickstart.py)", "[a](../experiments/quickstart.md)"),
        ("![a](../images/votes_unsure.png)", "![a](../images/votes_unsure.png)"),
        ("[a](../../LICENSE), [b](../results)", "a, b"),
        ("[a](https://pyro.ai/x), [b](gone.md), x[0](y)", None),
    ],
)
def test_links_between_files_become_links_between_pages(hooks, link, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/choose.md"))
    changed = hooks.on_page_markdown(link, page, None, None)
    assert changed == (link if shown is None else shown)


def test_pages_that_the_reference_cites_become_links_or_an_error(hooks):
    page = SimpleNamespace(url="api/training/")
    cited = hooks.on_page_content("<code>docs/guide/trained.md</code>", page, None, None)
    assert cited == '<a href="../../guide/trained/"><code>docs/guide/trained.md</code></a>'
    with pytest.raises(ValueError, match="cites <code>docs/no.md</code>, which does not exist"):
        hooks.on_page_content("<code>docs/no.md</code>", page, None, None)


def test_equations_become_mathml_or_an_error(hooks):
    at = SimpleNamespace(url="guide/choose/")
    page = r'<span class="arithmatex">\(\ln q \sim x &lt; 1\)</span>'
    written = hooks.on_page_content(page, at, None, None)
    assert written.startswith("<math") and "<mo>∼</mo>" in written and "mspace" in written
    for latex in r"\nothing x", r"\begin{aligned}a &amp;= b\end{aligned}":
        with pytest.raises(ValueError, match="not understood: "):
            hooks.on_page_content(rf'<div class="arithmatex">\[{latex}\]</div>', at, None, None)
