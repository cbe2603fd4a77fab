"""What people install: the wheel and the sdist are built, the wheel goes into an empty environment,
and the documentation builds as a site without a broken link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.errors import InputError
from memfit.model.families import _graph_files

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LARGEST = 5_000_000  # bytes of the wheel
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(one) for one in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=CLEAN,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has nothing but the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    places = folder / ("Scripts" if os.name == "nt" else "bin")
    run(places / "python", "-m", "pip", "install", "--quiet", next(built.glob("*.whl")))
    return places


def test_the_wheel_is_small_and_complete(built: Path) -> None:
    wheel = next(built.glob("*.whl"))
    assert wheel.stat().st_size <= LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert {"memfit/py.typed", "memfit/__init__.pyi", "memfit/hardware/gpus.toml"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "records/"))]


def test_the_wheel_has_the_graphs_of_every_family(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed there, and read as the files of a checkout are."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    assert not list((tmp_path / "memfit" / _graph_files.HERE).glob("*.json"))
    here = resources.files("memfit") / _graph_files.HERE
    known = sorted(one.name.removesuffix(".json").partition(".") for one in here.iterdir())
    wanted = {
        (name, setting): _graph_files.read_graphs(name, setting) for name, _, setting in known
    }
    monkeypatch.setattr(_graph_files, "files", lambda _: tmp_path / "memfit")
    _graph_files.unpacked.cache_clear()
    try:
        found = {key: _graph_files.read_graphs(*key) for key in wanted}
        settings = tuple({setting for _, setting in wanted})
        kept = {name: _graph_files.stored_settings(name, settings) for name, _ in wanted}
        _graph_files.unpacked.cache_clear()
        monkeypatch.setitem(sys.modules, "lzma", None)
        with pytest.raises(InputError, match="has no `lzma` module"):
            _graph_files.read_graphs(*next(iter(wanted)))
    finally:
        _graph_files.unpacked.cache_clear()
    assert found == wanted
    assert {(name, one) for name, each in kept.items() for one in each} == set(wanted)


def test_the_sdist_holds_the_sources(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/memfit/cli/app.py"} <= names


def test_versions_agree() -> None:
    assert memfit.__version__ == PROJECT["version"]


def test_the_changelog_has_this_version_in_short_entries() -> None:
    """Under a heading with its date, one or two lines each."""
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, *versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(memfit.__version__)}\] - \d{{4}}-\d\d-\d\d", versions[0])
    released = text.partition(f"## {versions[0]}")[2]
    entries = re.findall(r"^- .*(?:\n  .*)*", released, re.MULTILINE)
    assert len(entries) > 50
    assert not [one[:60] for one in entries if one.count("\n") > 1]


def test_the_command_works_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "memfit", "--version") == f"memfit {memfit.__version__}\n"
    job = ROOT / "examples" / "job.yaml"
    assert "fits" in run(installed / "memfit", "estimate", job, "--offline", cwd=tmp_path)
    modules = run(installed / "python", "-c", "import memfit, sys; print(*sys.modules)")
    assert not {"torch", "transformers", "numpy"} & set(modules.split())


def test_every_extra_is_one_that_the_code_needs() -> None:
    assert set(PROJECT["optional-dependencies"]) == {"trace", "measure", "plot", "dev"}


def commands(workflow: dict[str, Any]) -> list[str]:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_the_example_workflow_asks_what_memfit_answers() -> None:
    import yaml

    text = (ROOT / "examples" / "memfit-check.yml").read_text(encoding="utf-8")
    asked = [one for one in commands(yaml.safe_load(text)) if one.startswith("memfit ")]
    assert len(asked) == 1
    run(sys.executable, "-m", *asked[0].split(), "--offline")


def test_the_readme_is_short_and_its_picture_is_a_real_answer() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    quick = ("does-not-fit", "vllm", "ollama")  # of the gallery; `make docs` draws all
    names = ["answer.svg", *(f"gallery/{one}.svg" for one in quick)]
    run(sys.executable, ROOT / "tools" / "picture.py", "--check", *names)


def test_every_picture_of_the_gallery_is_drawn_and_shown() -> None:
    tools = (ROOT / "tools" / "picture.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r'"(gallery/[a-z-]+\.svg)"', tools))
    assert drawn == set(re.findall(r"\((gallery/[a-z-]+\.svg)\)", page))
    assert drawn == {f"gallery/{one.name}" for one in (ROOT / "docs" / "gallery").iterdir()}


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = {**CLEAN, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "index.html").is_file()
