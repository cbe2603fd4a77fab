"""Docs cannot drift: their transcripts are run again, their Python examples are doctests, their
links lead somewhere."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


def transcripts(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools" / "transcripts.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


def page(path: Path, marker: str, body: str = "stale\n") -> Path:
    path.write_text(f"# A page\n\n{marker}\n```console\n{body}```\n\nand more\n", encoding="utf-8")
    return path


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_transcripts_are_what_the_commands_print(path: Path) -> None:
    assert transcripts("--check", path) == (0, "")


@pytest.mark.parametrize(
    "path", [path for path in PAGES if ">>> " in path.read_text(encoding="utf-8")], ids=name
)
def test_python_examples_are_true(path: Path) -> None:
    # A closing fence would be taken for output, so it is made a blank line.
    text = re.sub(r"^```.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(
        text, {"__name__": "__main__"}, path.name, str(path), 0
    )
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=report.append)
    assert result.attempted
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_to_files(path: Path) -> None:
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_architecture_names_every_module_and_every_dependency() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    modules = [
        path
        for path in (ROOT / "src" / "memfit").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    absent = [
        path.name
        for path in modules
        if not path.name.startswith("__") and f"`{path.name}" not in page
    ]
    assert absent == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[^\w-]", one)[0] for one in wanted} - {"memfit", "types-PyYAML"}
    assert [one for one in sorted(names) if one not in page] == []


IMPORTED = {"PyYAML": "yaml", "nvidia-ml-py": "pynvml"}


def test_every_dependency_is_imported() -> None:
    """rich was declared for months and used by nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        one
        for name, extra in project["optional-dependencies"].items()
        if name != "dev"
        for one in extra
    ]
    names = {re.split(r"[^\w-]", one)[0] for one in [*project["dependencies"], *extras]}
    names -= {"memfit"}
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    found = {
        name
        for name in names
        if re.search(
            rf"^\s*(import|from) {IMPORTED.get(name, name)}\b|\"{IMPORTED.get(name, name)}\"",
            code,
            re.M,
        )
    }
    assert names - found == set()


def test_contributing_fits_a_screen_or_two() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_a_stale_transcript_is_found_and_refreshed(tmp_path: Path) -> None:
    stale = page(tmp_path / "page.md", '<!-- run: python -c "print(6 * 7)" -->')
    status, said = transcripts("--check", stale)
    assert status == 1
    assert "drifted" in said
    assert "stale" in stale.read_text()
    assert transcripts(stale)[0] == 0
    assert stale.read_text() == (
        '# A page\n\n<!-- run: python -c "print(6 * 7)" -->\n```console\n$ python -c '
        '"print(6 * 7)"\n42\n```\n\nand more\n'
    )
    assert transcripts("--check", stale) == (0, "")


def test_what_only_a_slow_machine_says_is_no_part_of_a_transcript(tmp_path: Path) -> None:
    said = ["QLoRA, 8 of 8, 10 s", "tracing: forward, step 1, 9 events, 12 s", "[██░] 60 % plans"]
    code = f"print(*{[*said, 'fits, 3 of 8 s']!r}, sep=chr(10))"
    slow = page(tmp_path / "page.md", f'<!-- run: python -c "{code}" -->')
    assert transcripts(slow)[0] == 0
    text = slow.read_text().partition("```console")[2]
    assert not [line for line in text.splitlines() if line in said]
    assert "fits, 3 of 8 s" in text.splitlines()


def test_commands_run_plain_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = "COLUMNS NO_COLOR HF_HUB_OFFLINE HF_TOKEN FORCE_COLOR"
    code = f"import os; print(*(os.environ.get(key) for key in '{shown}'.split()))"
    path = page(tmp_path / "page.md", f'<!-- run: python -c "{code}" -->')
    assert transcripts(path)[0] == 0
    assert "\n80 1 1 None None\n" in path.read_text()


def test_only_the_head_is_shown_when_asked_for(tmp_path: Path) -> None:
    path = page(
        tmp_path / "page.md",
        '<!-- run exit=3 head=2: python -c "print(1, 2, 3, 4, sep=chr(10)); exit(3)" -->',
    )
    assert transcripts(path)[0] == 0
    assert path.read_text().endswith("\n1\n2\n…\n```\n\nand more\n")


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        ('<!-- run: python -c "exit(3)" -->', "exits with 3, not 0"),
        ("<!-- run: rm -rf nothing -->", "neither `memfit"),
        ("<!-- run exit=x: python -V -->", "is no marker"),
        ("<!-- run last=2: python -V -->", "unknown options: last"),
        ("<!-- run: python -V -->\n\nno block follows\n", "no code block below it"),
    ],
)
def test_a_block_that_cannot_be_trusted_is_an_error(tmp_path: Path, marker: str, why: str) -> None:
    path = page(tmp_path / "page.md", marker)
    before = path.read_text()
    status, said = transcripts(path)
    assert status == 2
    assert why in said
    assert path.read_text() == before
