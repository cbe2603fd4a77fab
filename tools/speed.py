"""Writes docs/speed.md: how far predicted speeds are off. `python tools/speed.py`, a minute."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memfit.report import speed as report  # noqa: E402
from memfit.report.markdown import table  # noqa: E402
from memfit.truth.speed import Speeds, reasons, speeds  # noqa: E402

TARGET = ROOT / "docs" / "speed.md"
PAGE = """\
# Speed

<!-- Written by tools/speed.py (`make docs`); changes made here are lost. -->

How far predicted speeds of training and generation are off figures that other people measured and
published. Print it with `memfit accuracy --speed`. [Where the time comes from](concepts/time.md);
no constant is fitted to these runs.

{table}

What is behind the larger errors, as far as is known: SimuMax's runs are no blind test of
products, for those of Transformer Engine are known from that project's own loops alone
(configs/system/b200_bf16_ceperm.json), on that machine, where they reach 0.45 to 0.5 of the
vendor's figure and others' 0.6; its steps are not used. Tensor parallelism over eight of its GPUs
is slower than said by a quarter in a 70B's layers, not in a 405B's. torchtitan's A100s are Meta's
boards of 330 W in place of 400, which no rate here knows of. llm-foundry's tables were made with
FlashAttention's first version in Triton, as its `submit_benchmarks.py` of that day says. FSDP1
with an adapter's matrices as units of their own waits for the host at each of them, and full
fine-tuning on two and four GPUs beside full memory gives the allocator's cache back in every
step: both are slower than said, by up to a half. It is not the calls: on one GPU, and on eight
under llm-foundry, 14 to 74 GiB given back in 200 to 250 pieces cost nothing that shows. In
generation, contexts of ten thousand tokens and more are slower than said, by as much a token and
layer on an A100 as on an H20 of twice its bandwidth; GPTQ's kernels of 8 bits are half as fast as
said on newer hosts, and those of AutoGPTQ, five short ones for a product, are 30 % quicker on
older: each costs the host half of an average kernel.

## Training, by GPU

{gpus}

## Without an answer

{reasons}
"""


def page(found: Speeds) -> str:
    without = table(("rows", "because"), [(str(count), reason) for reason, count in reasons(found)])
    return PAGE.format(
        table=report.markdown(found),
        gpus="\n".join(table(report.GPU_HEAD, report.gpu_rows(found.only(training=True)))),
        reasons="\n".join(without),
    )


if __name__ == "__main__":
    TARGET.write_text(page(speeds()), encoding="utf-8")
