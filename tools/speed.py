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

Errors of predicted training and generation speeds, on figures that other people measured and
published. Print it with `memfit accuracy --speed`. [Where the time comes from](concepts/time.md);
no constant is fitted to these runs.

{table}

Causes of the larger errors, as far as they are known:

- **SimuMax** is no blind test of matrix products: Transformer Engine's rates come from that
  project's own loops (configs/system/b200_bf16_ceperm.json), on that machine. They reach 0.45 to
  0.5 of the vendor's figure there, and others' 0.6. Its steps are not used. Tensor parallelism over
  eight of its GPUs is a quarter slower than predicted for the layers of a 70B, but not of a 405B.
- **torchtitan's** A100s are Meta's boards with 330 W instead of 400 W, which no rate covers.
- **llm-foundry's** tables were made with the first version of FlashAttention in Triton, as its
  `submit_benchmarks.py` of that date says.
- **FSDP1** with adapter matrices as separate units waits for the host at each of them. Full
  fine-tuning on two and four GPUs with full memory frees the allocator's cache in every step. Both
  are up to a half slower than predicted. The calls are not the cause: on one GPU, and on eight
  under llm-foundry, freeing 14 to 74 GiB in 200 to 250 pieces costs no visible time.
- **Generation**: contexts of ten thousand tokens and more are slower than predicted, by the same
  time per token and layer on an A100 as on an H20 with twice its bandwidth. GPTQ's 8-bit kernels
  are half as fast as predicted on newer hosts. AutoGPTQ's, five short ones per product, are 30 %
  faster on older hosts: each costs the host half of an average kernel.

## Decoding by llama.cpp and Ollama

One request alone. Rates of reading and launches are fitted to half of the sources
(`tools/llama_speed.py`), chosen by a hash of their names; these are the figures of the others.

{decoding}

{order}

{decoding_gpus}

Not compared:

{left_out}

Causes of the larger errors, as far as they are known:

- **M1 Max and M1 Ultra** as Ollama ran them in 2024 are up to a third slower than predicted.
- The 5090 reads mixtures, and the 4090 IQ1_M, faster than predicted: the cost of a launch is one
  figure for all GPUs, and no I-quant is among the figures that constants were fitted to.
- The RTX 5070's DeepSeek-Coder-V2-Lite and OLMo 2 13B have only just room on the card. Their
  collector chose how many layers lie on the CPU, and the row does not state it.

Layers and experts on the CPU have no held-out figure: of none is the CPU's bandwidth known. Of two
machines in the other half, whose rows state what the CPU computes, the constants are one rate of
reading each (46 and 24.6 GB/s) and 140 µs for a change to the CPU and back; ten rows of the one,
mixtures and dense models, are within 8 % but for two (+16, +23), six of the other within 6 %.

## Prompts of llama.cpp

Tokens per second of a prompt, on a GPU that holds the whole model, by the same halves of sources.

{prompts}

{prompts_order}

{prompts_gpus}

Not compared:

{prompts_left_out}

Causes of the larger errors, as far as they are known:

- The figures that rates of CUDA are fitted to are few: 55, most of one model, and three of
  mixtures. Kernels differ by type: those of Q5_0 and IQ4 are up to a fifth faster than K-quants'.
- The **GB10**'s micro-batches have 2,048 tokens, those of the fitted figures 512.
- No prompts of mixtures on Macs, nor of packed weights on A100, H100 and newer data-centre GPUs,
  were found; there is no answer for them.

## Training, by GPU

{gpus}

## Without an answer

{reasons}
"""


def page(found: Speeds) -> str:
    without = table(("rows", "because"), [(str(count), reason) for reason, count in reasons(found)])
    decoding = found.decoding
    return PAGE.format(
        decoding="\n".join(table(report.HEAD[:-1], report.decoding_rows(decoding))),
        decoding_gpus="\n".join(
            table(report.GPU_HEAD, report.decoding_rows(decoding, by_gpu=True))
        ),
        order=report.order_line(decoding),
        left_out="\n".join(table(("rows", "because"), report.left_out(decoding))),
        prompts="\n".join(table(report.HEAD[:-1], report.decoding_rows(found.prompts))),
        prompts_gpus="\n".join(
            table(report.GPU_HEAD, report.decoding_rows(found.prompts, by_gpu=True))
        ),
        prompts_order=report.order_line(found.prompts),
        prompts_left_out="\n".join(table(("rows", "because"), report.left_out(found.prompts))),
        table=report.markdown(found),
        gpus="\n".join(table(report.GPU_HEAD, report.gpu_rows(found.only(training=True)))),
        reasons="\n".join(without),
    )


if __name__ == "__main__":
    TARGET.write_text(page(speeds()), encoding="utf-8")
