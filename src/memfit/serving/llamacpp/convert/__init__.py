"""A config.json as the GGUF file that llama.cpp's converter would write.

`CONVERTERS`: a function for each `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memfit.errors import InputError
from memfit.serving.llamacpp.convert import dense, encoder_decoder, older, recurrent, routed, varied
from memfit.serving.llamacpp.convert.sheet import Sheet
from memfit.serving.llamacpp.model import GgufModel, GgufTensor
from memfit.serving.llamacpp.quantize import TYPES, quantized

# Matrices that the converter keeps in 32 bits: routers, norms of heads, biases of experts.
SMALL = (
    ".bias",
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "ssm_conv1d.weight",
    "ssm_norm.weight",
    "ssm_a",
    "ssm_d",
    "shortconv.conv.weight",
    "indexer.proj.weight",
    "altup_correct_coef.weight",
    "altup_predict_coef.weight",
)

CONVERTERS: Mapping[str, Callable[[Sheet], str]] = {
    "llama": dense.llama,
    "mistral": dense.llama,
    "mistral3": dense.mistral3,
    "ministral3": dense.mistral3,
    "llava": dense.llava,
    "iquestcoder": dense.llama,
    "baichuan": dense.baichuan,
    "internlm2": dense.internlm2,
    "minicpm": dense.minicpm,
    "arcee": dense.arcee,
    "qwen": dense.qwen,
    "qwen2": dense.qwen2,
    "mimo": dense.qwen2,
    "qwen2_vl": dense.qwen2vl,
    "qwen2_5_vl": dense.qwen2vl,
    "qwen3": dense.qwen3,
    "qwen3_vl": dense.qwen3vl,
    "seed_oss": dense.seed_oss,
    "smollm3": dense.smollm3,
    "ernie4_5": dense.ernie4_5,
    "hunyuan_v1_dense": dense.hunyuan_dense,
    "granite": dense.granite,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3": dense.gemma3,
    "gemma3_text": dense.gemma3,
    "gemma3n_text": varied.gemma3n,
    "gemma3n": varied.gemma3n,
    "gemma4": dense.gemma4,
    "gemma4_unified": dense.gemma4,
    "phi": dense.phi2,
    "phi3": dense.phi3,
    "starcoder2": dense.starcoder2,
    "nemotron": dense.nemotron,
    "stablelm": dense.stablelm,
    "olmo": dense.olmo,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo2,
    "exaone": dense.exaone,
    "exaone4": dense.exaone4,
    "cohere": dense.cohere,
    "cohere2": dense.cohere2,
    "glm": dense.chatglm,
    "glm4": dense.glm4,
    "glm4v": dense.glm4v,
    "gpt2": older.gpt2,
    "gpt_bigcode": older.starcoder,
    "gpt_neox": older.gptneox,
    "bloom": older.bloom,
    "jais2": older.jais2,
    "mpt": older.mpt,
    "falcon": older.falcon,
    "nemotron-nas": varied.deci,
    "mimo_v2_flash": varied.mimo2,
    "step3p5": varied.step35,
    "step3p7": varied.step35,
    "mamba": recurrent.mamba,
    "falcon_mamba": recurrent.mamba,
    "mamba2": recurrent.mamba2,
    "nemotron_h": recurrent.nemotron_h,
    "granitemoehybrid": recurrent.granitehybrid,
    "jamba": recurrent.jamba,
    "lfm2": recurrent.lfm2,
    "qwen3_next": recurrent.qwen3next,
    "qwen3_5": recurrent.qwen35,
    "qwen3_5_moe": recurrent.qwen35moe,
    "bert": older.bert,
    "roberta": older.bert,
    "xlm-roberta": older.bert,
    "distilbert": older.bert,
    "nomic_bert": older.nomic_bert,
    "modernbert": older.modern_bert,
    "t5": encoder_decoder.t5,
    "mt5": encoder_decoder.t5,
    "mixtral": routed.mixtral,
    "phimoe": routed.phimoe,
    "qwen2_moe": routed.qwen2moe,
    "qwen3_moe": routed.qwen3moe,
    "qwen3_vl_moe": routed.qwen3vlmoe,
    "olmoe": routed.olmoe,
    "granitemoe": routed.granitemoe,
    "granitemoeshared": routed.granitemoe,
    "gpt_oss": routed.gpt_oss,
    "deepseek": routed.deepseek,
    "deepseek_v2": routed.deepseek2,
    "deepseek_v3": routed.deepseek2,
    "kimi_k2": routed.deepseek2,
    "kimi_k25": routed.deepseek2,
    "glm4_moe_lite": routed.deepseek2,
    "deepseek_v32": routed.deepseek32,
    "glm_moe_dsa": routed.glm_dsa,
    "glm4_moe": routed.glm4moe,
    "minimax_m2": routed.minimax_m2,
    "dots1": routed.dots1,
    "ernie4_5_moe": routed.ernie4_5_moe,
    "hunyuan_v1_moe": routed.hunyuan_moe,
    "dbrx": routed.dbrx,
    "llama4": routed.llama4,
    "grok-1": routed.grok,
}


def converted(config: Mapping[str, Any], name: str, quantization: str = "") -> GgufModel:
    """The model of a config, with the types of a quantization by name (else 16 bits)."""
    kind = str(config.get("model_type", ""))
    convert = CONVERTERS.get(kind)
    if convert is None:
        raise InputError.one(
            f"models of type `{kind[:40]}` are not supported by llama.cpp, or not yet by memfit",
            where="model",
            hint="name a GGUF file of it",
        )
    sheet = Sheet(config, name)
    arch = convert(sheet)
    sheet.done()
    full, half = TYPES["F32"], TYPES["F16"]
    tensors = tuple(
        GgufTensor(
            name=one,
            sizes=sizes,
            type=TYPES[sheet.types[one]]
            if one in sheet.types
            else full
            if len(sizes) < 2 or one.endswith(SMALL)
            else half,
        )
        for one, sizes in sheet.shapes.items()
    )
    model = GgufModel(name=name, arch=arch, facts=sheet.facts, tensors=tensors)
    return quantized(model, quantization or "F16")
