"""The model and the data that the scripts here train: a small Llama, random tokens."""

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SEQ = 256
NEW = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
DTYPE = "dtype" if NEW else "torch_dtype"  # what the argument is called


def build(dtype=torch.float32):
    return LlamaForCausalLM._from_config(LlamaConfig(**CONFIG), **{DTYPE: dtype})


def batches(size):
    while True:
        ids = torch.randint(0, CONFIG["vocab_size"], (size, SEQ))
        yield {"input_ids": ids, "labels": ids}


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, CONFIG["vocab_size"], (SEQ,))
        return {"input_ids": ids, "labels": ids}
