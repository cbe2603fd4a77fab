"""IBM's fms-acceleration benchmarks: TRL's SFTTrainer on A100s, read at commit 876e2ed
(scripts/benchmarks, sample-configurations)."""

from __future__ import annotations

from memfit.strategy import FSDP, ONE, Strategy
from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row, count

# The requirements file beside each table. a100_80gb_pf.csv was renewed together with
# refs_orca/requirements.txt (3cf092a).
VERSIONS = {
    "refs/a100_80gb.csv": (
        "transformers=4.48.1,torch=2.4.1,peft=0.13.2,accelerate=1.0.1,"
        "bitsandbytes=0.43.3,flash-attn=2.7.3,trl=0.13.0"
    ),
    "refs/a100_80gb_granite.csv": (
        "transformers=4.45.2,torch=2.4.1,peft=0.12.0,accelerate=0.34.2,"
        "bitsandbytes=0.43.3,flash-attn=2.6.3,trl=0.11.0"
    ),
    "refs/a100_80gb_liger.csv": (
        "transformers=4.45.2,torch=2.4.1,peft=0.13.2,accelerate=1.0.1,"
        "bitsandbytes=0.43.3,flash-attn=2.7.0,trl=0.11.4"
    ),
    "refs/a100_80gb_moe.csv": (
        "transformers=4.52.4,torch=2.6.0,peft=0.14.0,accelerate=1.6.0,"
        "bitsandbytes=0.45.1,flash-attn=2.7.4,trl=0.17.0"
    ),
    "refs_orca/a100_80gb_pf.csv": (
        "transformers=4.43.3,torch=2.4.1,peft=0.12.0,accelerate=0.33.0,"
        "bitsandbytes=0.43.3,flash-attn=2.6.3,trl=0.10.1"
    ),
    "refs_orca/a100_80gb_mp.csv": (
        "transformers=4.44.0,torch=2.4.0,peft=0.12.0,accelerate=0.33.0,"
        "bitsandbytes=0.43.3,flash-attn=2.6.3,trl=0.10.1"
    ),
}
# Tokens that fms-hf-tuning adds to a model's tokenizer, whose embeddings and head it then makes as
# large as that (tuning/sft_trainer.py at 2.5.0, b33634c and 398c2a8, which the tables' requirements
# name; embedding_size_multiple_of is 1 in all three): a `<pad>` to Llama's tokenizers, `<PAD>` and
# `<unk>` to those that have neither. Granite's has both. Santacoder's size was not at hand.
ADDED = {
    "meta-llama/Llama-2-70b-hf": 1,
    "meta-llama/Meta-Llama-3-8B": 2,
    "mistralai/Mistral-7B-v0.1": 1,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 1,
}


@reader("foundation-model-stack/fms-acceleration", layouts=True)
def read(row: Row) -> Reading:
    """Defaults of the harness: Trainer's clipping at 1.0 and, where none is named, reentrant
    checkpointing (transformers 4.48 training_args.py, modeling_utils.py
    gradient_checkpointing_enable)."""
    if row.metric == "oom" and "out of memory" not in row.text("notes"):
        raise Unfit("a run that failed, by what is not stated")
    plugin = str(row.more("plugin") or "").lower()
    if "scattermoe" in plugin or "padding-free" in plugin:
        raise Unfit("kernels without formula", plugin)
    options = words.numbers(row.text("dtype")) | words.adapters(row)
    if options["method"] == "qlora":
        options["targets"] += (
            ",c_attn"  # scenarios.yaml accelerated-peft-bnb: for the model that has no q_proj
        )
    table = next((versions for name, versions in VERSIONS.items() if name in row.source), None)
    if table is None:
        raise Unfit("the versions of the table are not known", row.source)
    options |= {
        "framework": "trl",
        "task": "finetune",
        "batch": words.batch(row),
        "seq": words.length(row.seq),
        "versions": table,
        "optimizer": words.optimizer(row.text("optimizer")),
        "checkpointing": words.checkpointing(row.grad_checkpointing),
        "attention": words.attention(row.text("attention")),
        "reentrant": True,
        "clip": 1.0,
        "accumulate": int(row.more("grad_accum") or 1),
    }
    if "foak" in plugin:
        options |= kernels("liger" in plugin, options["method"] == "qlora")
    if options["method"] == "qlora":
        # framework_plugin_bnb.py: double quantization always; a preparation of its own that casts
        # nothing up, but for the baseline, which leaves it to TRL and so to peft, and TRL lets a
        # model alone that is to be sharded (trl 0.11 and 0.13 sft_trainer.py)
        options |= {
            "double_quant": True,
            "prepare_kbit": "baseline" in plugin and count(row.gpus) == 1,
        }
    return Reading(
        options=options, strategy=shards(row), added_tokens=ADDED.get(words.model(row), 0)
    )


def shards(row: Row) -> Strategy:
    """Several GPUs run FSDP1 by accelerate, each decoder layer a unit, the next one gathered before
    the backward of each (scripts/benchmarks/accelerate.yaml), reduced once a step. Fused adapters
    would be ignored by FSDP (fms_acceleration_foak utils.py lora_adapters_switch_ddp_from_fsdp);
    what the tables say of memory at rest is that they were sharded like others."""
    gpus, parallel = count(row.gpus) or 1, row.text("parallel")
    if gpus == 1 and parallel in ("", "none"):
        return ONE
    if not parallel.startswith("fsdp") or "expert parallel" in parallel:
        raise Unfit("a strategy for several GPUs: not yet", parallel)
    return Strategy(fsdp=FSDP(size=gpus, version=1, backward_prefetch="pre", sync=False))


def kernels(liger: bool, quantized: bool) -> words.Options:
    """What the sample configurations switch on. Over quantized weights adapters are fused too. With
    Liger's loss the norms' key is misspelt there (`fast_rsm_layernorm`), and yet they were fused:
    the key's default was `True` up to that table's own commit (733992a), whose memory and speed say
    the same. The loss is a copy of Liger's of 0.4."""
    names = ["rotary", "norms", *([] if liger else ["loss"]), *(["adapters"] if quantized else [])]
    return {"unsloth": ",".join(names), "loss": "liger" if liger else "plain"}
