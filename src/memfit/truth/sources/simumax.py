"""SimuMax's measured stages: Megatron-LM 23e00ed0 with TE 2.11 on eight B200, layers of Llama-3 and
DeepSeek cut to a few (docs/b200 and simu_tools/megatron_scripts of MooreThreads/SimuMax: sequence
parallelism, the distributed optimizer, TE's cross-entropy, all-to-all context parallelism; no
recomputation, since `--recompute-num-layers` is 0). Ranks of a stage follow one another, the first
stage first; a figure is the most that any of a stage reports."""

from __future__ import annotations

import json
import re
from typing import Any

from memfit.strategy import CP, DDP, EP, PP, TP, Strategy
from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import LARGEST, Row, count

LAYOUT = re.compile(
    r"tp(\d{1,4}) \(sequence parallel\) cp(\d{1,4}) pp(\d{1,4}) dp(\d{1,4}) ep(\d{1,4});"
)
END = (
    1  # NullTokenizer's own token behind the vocabulary (megatron/training/tokenizer/tokenizer.py)
)
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


@reader("MooreThreads/SimuMax", layouts=True)
def read(row: Row) -> Reading:
    strategy, stages = layout(row)
    micro = count(row.more("micro_batches_per_step"))
    length = count(row.seq)
    if length is None or micro is None:
        raise Unfit("the length of the longest sequence is not stated", row.seq)
    options: dict[str, Any] = {
        "task": "pretrain",
        "framework": "megatron",
        "batch": words.batch(row),
        "seq": length,
        "precision": "bf16-master",
        "loss": "te",
        "optimizer": "adam_fused",
        "clip": 1.0,
        "accumulate": micro,
    }
    reading = Reading(options=options, strategy=strategy, config=config(row))
    if row.value in (None, LARGEST) and row.more("pipeline_stage") is None:  # a speed alone
        return reading
    stage = {"first": 0, "only": 0, "last": stages - 1}.get(str(row.more("pipeline_stage")))
    if stage is None:
        raise Unfit("whose memory it is, is not stated", row.more("pipeline_stage"))
    reading.rank, reading.alike = stage * (strategy.ranks // stages), strategy.ranks // stages
    reading.notes += ["the stage that the publisher names, not the worst"] * (stages > 1)
    return reading


def layout(row: Row) -> tuple[Strategy, int]:
    """The layouts, and the number of stages."""
    found = LAYOUT.match(row.text("parallel"))
    if found is None:
        raise Unfit("the layout is not stated", row.parallel)
    tp, cp, pp, dp, ep = (int(one) for one in found.groups())
    routed = '"experts"' in str(row.model)
    return Strategy(
        ep=EP(size=ep, capacity=1.0, padded=True, fused=True) if routed else None,
        tp=TP(size=tp, sequence=True) if tp > 1 else None,
        cp=CP(size=cp, style="ulysses") if cp > 1 else None,
        pp=PP(size=pp) if pp > 1 else None,
        ddp=DDP(size=dp, distributed=True),
    ), pp


def config(row: Row) -> str:
    """Llama's or DeepSeek-V2's, in the sizes that the row names behind its model."""
    _, _, text = str(row.model).partition(": ")
    try:
        shape = json.loads(text)
        if "mla" in shape:
            return json.dumps(deepseek(row, shape), sort_keys=True)
        layers, hidden, heads, groups, head, ffn, vocabulary = (int(shape[name]) for name in SHAPE)
    except (ValueError, KeyError, TypeError):
        raise Unfit("no config of the model", row.model) from None
    return json.dumps(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": head,
            "intermediate_size": ffn,
            "vocab_size": vocabulary + END,
            "tie_word_embeddings": bool(shape.get("tied")),
            "max_position_embeddings": count(row.seq) or 4096,
        },
        sort_keys=True,
    )


def deepseek(row: Row, shape: dict[str, Any]) -> dict[str, Any]:
    """The script routes by softmax within groups, as V2 does, whatever the sizes
    (run_pretrain_deepseekv2.sh): groups are the ranks of experts, of which three are open."""
    latent, (experts, chosen) = shape["mla"], (int(shape[name]) for name in ("experts", "topk"))
    found = LAYOUT.match(row.text("parallel"))
    assert found is not None
    return {
        "model_type": "deepseek_v2",
        "num_hidden_layers": int(shape["layers"]),
        "hidden_size": int(shape["hidden"]),
        "num_attention_heads": int(shape["heads"]),
        "num_key_value_heads": int(shape["heads"]),
        "q_lora_rank": int(latent["q_lora"]),
        "kv_lora_rank": int(latent["kv_lora"]),
        "qk_nope_head_dim": int(latent["qk_nope"]),
        "qk_rope_head_dim": int(latent["qk_rope"]),
        "v_head_dim": int(latent["v"]),
        "first_k_dense_replace": int(shape["dense_layers"]),
        "intermediate_size": int(shape["dense_ffn"]),
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": int(shape["expert_ffn"]),
        "n_shared_experts": int(shape["shared_ffn"]) // int(shape["expert_ffn"]),
        "topk_method": "group_limited_greedy",
        "n_group": int(found[5]),
        "topk_group": 3,
        "vocab_size": int(shape["vocab"]) + END,
        "tie_word_embeddings": bool(shape.get("tied")),
        "max_position_embeddings": count(row.seq) or 4096,
    }
