"""Real training steps on the CPU under torch's profiler, which records every event of the allocator: the truth for a trace without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

import torch
from memfit.tape import Alloc, Free, Mark, Tape

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 512}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **MOE,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama"},
    "llama-biased-tied": {**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral-window": {**SMALL, "model_type": "mistral", "sliding_window": 32},
    "mixtral": {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**SMALL, "model_type": "qwen2"},
    "qwen2_moe": {**SMALL, "model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 64, **MOE},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {**SMALL, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, **MOE},
    "gemma": {**SMALL, "model_type": "gemma", "head_dim": 16},
    "gemma2": {**SMALL, "model_type": "gemma2", "head_dim": 16, "sliding_window": 32},
    "gemma3_text": {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32},
    "phi": {**SMALL, "model_type": "phi"},
    "phi3": {**SMALL, "model_type": "phi3", "pad_token_id": 0},
    "deepseek_v2": {**SMALL, "model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 1, "topk_group": 1, **MLA},
    "deepseek_v3": {**SMALL, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, **MLA},
    "gpt_oss": {**SMALL, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "gpt2": {**OLD, "model_type": "gpt2"},
    "gpt_bigcode": {**OLD, "model_type": "gpt_bigcode"},
    "codegen": {**OLD, "model_type": "codegen", "rotary_dim": 8, "n_ctx": 512},
    "gptj": {**OLD, "model_type": "gptj", "rotary_dim": 8},
    "gpt_neo": {
        "model_type": "gpt_neo",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 32,
    },
    "gpt_neox": {**SMALL, "model_type": "gpt_neox"},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "falcon": {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000},
    "mpt": {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 1000},
    "biogpt": {**SMALL, "model_type": "biogpt"},
    "olmo": {**SMALL, "model_type": "olmo"},
    "olmo2": {**SMALL, "model_type": "olmo2"},
    "granite": {**SMALL, "model_type": "granite"},
    "cohere": {**SMALL, "model_type": "cohere"},
    "stablelm": {**SMALL, "model_type": "stablelm"},
    "starcoder2": {**SMALL, "model_type": "starcoder2"},
    "glm": {**SMALL, "model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "smollm3": {**SMALL, "model_type": "smollm3", "pad_token_id": 0},
    "llama4_text": {
        **SMALL,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 128,
        "pad_token_id": 0,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "state_size": 8},
    "qwen3_next": {
        **SMALL,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 4,
        **MOE,
        **LINEAR,
    },
}


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Bytes alive before the first step, and every change after, in order: positive when allocated."""

    before: int
    changes: tuple[int, ...]

    @property
    def peak(self) -> int:
        return self.before + max(itertools.accumulate(self.changes))

    def allocations(self, smallest: int) -> list[int]:
        return [one for one in self.changes if one >= smallest]


def real(config: Mapping[str, Any], *, batch: int = 2, seq: int = 64, steps: int = 2, accumulate: int = 1, checkpoint: dict[str, Any] | None = None,
         lora: dict[str, Any] | None = None, optimizer: Any = torch.optim.AdamW, attention: str | None = None, clip: float = 0.0,
         autocast: bool = False, frozen: str = "",
         builder: str = "AutoModelForCausalLM", given: Callable[[Any, int, int], dict[str, Any]] | None = None) -> Changes:  # fmt: skip
    """A plain training loop in fp32, written without memfit; `given`: other inputs than token ids and labels; `frozen`: parameters whose
    name lacks this are."""
    import transformers
    from accelerate.utils.operations import convert_outputs_to_fp32
    from transformers import AutoConfig

    values = dict(config)
    wanted = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.backends.mkldnn.flags(enabled=False), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model: Any = getattr(transformers, builder).from_config(wanted, dtype=torch.float32, attn_implementation=attention)
        model.train()
        model.config.use_cache = False
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(**lora))
        if checkpoint is not None:
            model.gradient_checkpointing_enable(checkpoint)
        for name, one in model.named_parameters():
            one.requires_grad_(one.requires_grad and frozen in name)
        forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model)) if autocast else model
        trained = [one for one in model.parameters() if one.requires_grad]
        stepper = optimizer(trained)
        before = held(*model.parameters(), *model.buffers(), *(one for state in stepper.state.values() for one in state.values()))
        with record_function("first step"):
            pass
        for _ in range(steps):
            for _ in range(accumulate):
                inputs = (given or written)(model, batch, seq)
                loss = forward(**inputs).loss
                (loss / accumulate if accumulate > 1 else loss).backward()
                del loss
            if clip:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            stepper.step()
            stepper.zero_grad()
    return split(profiler, before)


def written(model: Any, batch: int, seq: int) -> dict[str, Any]:
    ids, labels = (torch.randint(0, model.config.get_text_config().vocab_size, (batch, seq)) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def generated(config: Mapping[str, Any], *, batch: int = 2, seq: int = 64, new: int = 4, **settings: Any) -> Changes:
    """A prompt and some tokens by `generate`, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    wanted = AutoConfig.for_model(values.pop("model_type"), **values)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model: Any = AutoModelForCausalLM.from_config(wanted, dtype=torch.float32)
        model.eval()
        model.generation_config.eos_token_id = None
        before = held(*model.parameters(), *model.buffers())
        with record_function("first step"):
            pass
        prompt = torch.randint(1, wanted.get_text_config().vocab_size, (batch, seq))
        answer = model.generate(prompt, max_new_tokens=new, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **settings)
        del answer
    return split(profiler, before)


def held(*values: Any) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in values if isinstance(one, torch.Tensor)}
    return sum(storages.values())


def split(profiler: Any, before: int) -> Changes:
    events = profiler.profiler.kineto_results.events()
    start = next(one.start_ns() for one in events if one.name() == "first step")
    memory = sorted(((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"), key=lambda one: one[0])
    return Changes(before=before, changes=tuple(size for at, size in memory if at >= start))


def traced(tape: Tape) -> Changes:
    """The same view of a tape: everything before the first `prepare` is the model."""
    sizes: dict[int, int] = {}
    before, changes, started = 0, [], False
    for event in tape.events:
        if isinstance(event, Mark):
            started = started or event.phase == "prepare"
        elif isinstance(event, (Alloc, Free)):
            if isinstance(event, Alloc):
                sizes[event.id] = event.size
            change = sizes[event.id] if isinstance(event, Alloc) else -sizes[event.id]
            if started:
                changes.append(change)
            else:
                before += change
    return Changes(before=before, changes=tuple(changes))
