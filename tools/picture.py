"""Writes real answers as they look in a terminal: docs/answer.svg for the README's first screen,
and the pictures of docs/gallery.md.

python tools/picture.py [--check] [names]
"""

from __future__ import annotations

import os
import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = {  # files in docs -> the command, and how many lines of its answer (0: all)
    "answer.svg": ("qwen3-8b --gpu rtx-4090", 0),
    "gallery/does-not-fit.svg": ("estimate llama-3.1-8b --method full --gpu rtx-4090", 0),
    "gallery/models.svg": ("qwen3 --gpu mac-16gb", 0),
    "gallery/study.svg": ("study qwen3-8b --gpu rtx-4090 --method lora,qlora", 0),
    "gallery/plan.svg": ("plan qwen3-0.6b --gpus 2xl4 --method full,lora --top 1", 5),
    "gallery/vllm.svg": ("estimate llama-3.1-8b --engine vllm --gpu h100 --max-model-len 8192", 0),
    "gallery/ollama.svg": ("estimate qwen3:14b --engine ollama --gpu rtx-3060-12gb", 0),
    "gallery/many-gpus.svg": (
        "estimate llama-3.1-70b --method lora --gpus 8xa100-sxm-80gb --use fsdp",
        0,
    ),
}
WIDTH = 100  # characters of the terminal
SIZE, LINE, LEFT, TOP = 14, 19, 18, 46  # pixels
INK, PAPER, DIM, GOOD, MARK = "#e6edf3", "#0d1117", "#8b949e", "#3fb950", "#d29922"


def answer(command: str, most: int) -> list[str]:
    program = "import sys; sys.argv[0] = 'memfit'; from memfit.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(WIDTH)},
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    lines = done.stdout.rstrip("\n").split("\n")
    shown = lines[:most] if most else lines
    return [f"$ memfit {command}", *shown, *(["…"] if len(shown) < len(lines) else [])]


def colour(number: int, line: str) -> str:
    if number == 0:
        return DIM
    if "does not fit" in line:
        return MARK
    return GOOD if number == 1 or line.startswith("* ") else INK


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
    stale = []
    names = [one for one in sys.argv[1:] if one != "--check"] or list(PICTURES)
    for name in names:
        target = ROOT / "docs" / name
        text = drawn(answer(*PICTURES[name]))
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            stale.append(f"docs/{name}")
            if "--check" not in sys.argv[1:]:
                target.parent.mkdir(exist_ok=True)
                target.write_text(text, encoding="utf-8")
    if "--check" in sys.argv[1:] and stale:
        print(f"{', '.join(stale)}: out of date, run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
