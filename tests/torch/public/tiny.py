"""A small Llama and a tokenizer made on the spot, for scripts that take both from a hub."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
ARGUMENTS = {  # of TRL's trainers of preferences
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "max_length": 128,
    "max_steps": 3,
    "gradient_checkpointing": False,
    "bf16": False,
    "report_to": "none",
}
TEMPLATE = "{% for one in messages %}{{ one['content'] + ' ' }}{% endfor %}"


def model(labels=0):
    torch.manual_seed(0)
    kind = LlamaForSequenceClassification if labels else LlamaForCausalLM
    return kind(LlamaConfig(**CONFIG, **({"num_labels": labels} if labels else {})))


def tokenizer():
    words = {f"w{place}": place for place in range(CONFIG["vocab_size"])}
    words = {
        {0: "<unk>", 1: "<pad>", 2: "<s>", 3: "</s>"}.get(place, name): place
        for name, place in words.items()
    }
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def text(count, start=4):
    return " ".join(f"w{start + place}" for place in range(count))
