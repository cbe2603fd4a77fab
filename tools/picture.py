"""Writes docs/answer.svg: a real answer as it looks in a terminal, for the README's first screen.

python tools/picture.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "answer.svg"
COMMAND = ("qwen3-8b", "--gpu", "rtx-4090")
SIZE, LINE, LEFT, TOP = 14, 19, 18, 46  # pixels
INK, PAPER, DIM, GOOD, MARK = "#e6edf3", "#0d1117", "#8b949e", "#3fb950", "#d29922"


def answer() -> list[str]:
    program = "import sys; sys.argv[0] = 'memfit'; from memfit.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMAND],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return [f"$ memfit {' '.join(COMMAND)}", *done.stdout.rstrip("\n").split("\n")]


def colour(number: int, line: str) -> str:
    if number == 0:
        return DIM
    if number == 1 or line.startswith("* "):
        return GOOD
    return MARK if "does not fit" in line else INK


def drawn(lines: list[str]) -> str:
    wide = max(map(len, lines)) * SIZE * 0.602 + 2 * LEFT
    high = TOP + LINE * len(lines) + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high}" '
        f'viewBox="0 0 {wide:.0f} {high}" role="img" aria-label="{escape(lines[0][2:])}">'
    )
    dots = "".join(
        f'<circle cx="{LEFT + 6 + 20 * at}" cy="20" r="6" fill="{fill}"/>'
        for at, fill in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    rows = "".join(
        f'<text x="{LEFT}" y="{TOP + LINE * at + 4}" fill="{colour(at, line)}" '
        f'xml:space="preserve">{escape(line)}</text>\n'
        for at, line in enumerate(lines)
    )
    font = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
    return (
        f'{head}<rect width="100%" height="100%" rx="10" fill="{PAPER}"/>{dots}'
        f'<g font-family="{font}" font-size="{SIZE}">\n{rows}</g></svg>\n'
    )


def main() -> int:
    text = drawn(answer())
    if "--check" in sys.argv[1:]:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text:
            print("docs/answer.svg is out of date: run `make docs`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
