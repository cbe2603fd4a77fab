"""TRL's SFTTrainer on ready token ids, with a tokenizer made on the spot."""

from datasets import Dataset
from model import CONFIG, SEQ, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {f"w{index}": index for index in range(CONFIG["vocab_size"])}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
)
data = Dataset.from_dict({"input_ids": [list(range(3, SEQ + 3))] * 64})
arguments = SFTConfig(
    output_dir="never-written",
    per_device_train_batch_size=2,
    bf16=True,
    gradient_checkpointing=False,
    max_length=SEQ,
    report_to="none",
    logging_steps=1,
)
SFTTrainer(model=build(), args=arguments, train_dataset=data, processing_class=tokenizer).train()
