"""DeepSpeed, where it is installed, imported as on a machine without a GPU: what the ranks of real
DeepSpeed are forked from has it. What is there stays there: their collections need not look through
it."""

import contextlib
import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"
with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
gc.collect()
gc.freeze()
