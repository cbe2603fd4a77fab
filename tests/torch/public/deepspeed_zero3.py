# memfit: deepspeed --num_gpus 2 -- --steps 3
"""A ZeRO-3 script under DeepSpeed's launcher: the model is made inside `zero.Init`, the engine
takes its configuration, scales, accumulates, steps and saves."""

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": 100_000,
        "stage3_param_persistence_threshold": 1000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=3)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.cuda.set_device(args.local_rank)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=2048,
                hidden_size=256,
                intermediate_size=768,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
            )
        )
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=CONFIG
    )
    for step in range(args.steps * CONFIG["gradient_accumulation_steps"]):
        ids = torch.randint(0, 2048, (2, 128), device=engine.device)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    engine.save_checkpoint("out", tag="last")


if __name__ == "__main__":
    main()
