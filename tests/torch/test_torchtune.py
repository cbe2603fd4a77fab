"""torchtune's own builders, losses and step (0.6.1), on meta tensors under the trace's recorder,
against its formulas.

It needs torchtune with what it imports (torchao, datasets, sentencepiece …), which the tests'
environment does not have; without it nothing runs here. Packed data is left out: FlexAttention has
no kernel without data.
"""

from __future__ import annotations

from typing import Any

import pytest

from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.tape import Tape

pytest.importorskip("torch")
pytest.importorskip("torchtune", exc_type=ImportError)
pytestmark = pytest.mark.torch

CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "embed_dim": 512,
    "intermediate_dim": 1408,
    "max_seq_len": 4096,
}


def model_of(name: str, job: Job) -> Any:
    from torchtune.models import llama3, qwen2
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    import torch
    from memfit.trace.program import DTYPES

    builders = {"llama": llama3._component_builders, "qwen2": qwen2._component_builders}[name]
    with torch.device("meta"):
        if job.adapters:
            make = getattr(builders, "lora_llama3" if name == "llama" else "lora_qwen2")
            model = make(
                lora_attn_modules=["q_proj", "v_proj"],
                lora_rank=job.rank,
                lora_alpha=16,
                lora_dropout=job.dropout,
                **SIZES,
            )
        else:
            model = getattr(builders, "llama3" if name == "llama" else "qwen2")(**SIZES)
    dtype = DTYPES[job.precision]
    for one in model.parameters():
        one.data = one.data.to(dtype)
    if job.adapters:
        set_trainable_params(model, get_adapter_params(model))
    return model


def traced(name: str, job: Job) -> Tape:
    """Two steps as full_finetune_single_device.py and lora_finetune_single_device.py take them."""
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.training import get_act_offloading_ctx_manager, set_activation_checkpointing

    import torch
    from memfit.trace import activation_offload, cuda, kernels_of, steps
    from memfit.trace.optimizers import optimizer_of
    from memfit.trace.paths import plain
    from memfit.trace.program import module_stack
    from memfit.trace.recorder import Recorder
    from memfit.trace.rules import References, learn

    device = cuda.Device(version=(2, 13))
    if not References.known[0]:
        learn(Recorder(device))
    kernels_of.install(device)
    model, recorder = (
        model_of(name, job),
        (Recorder if job.activation_offload == "none" else activation_offload.Away)(device),
    )
    loss_of: Any = torch.nn.CrossEntropyLoss(ignore_index=-100)
    if job.loss == "chunked":
        loss_of = CEWithChunkedOutputLoss()
        model.set_num_output_chunks(loss_of.num_output_chunks)
    if job.checkpointing == "full":
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    told = activation_offload.engaged(recorder, job, followed=False)
    with (
        cuda.pretended(device),
        kernels_of.forced(job.attention),
        told,
        module_stack(recorder),
        recorder,
    ):
        hooks = get_act_offloading_ctx_manager(model, job.activation_offload != "none")
        steps.load(recorder, model)
        steps.own(recorder, "weights", steps.weights(model))
        recorder.names = {id(module): plain(path) for path, module in model.named_modules()}
        optimizer = optimizer_of(model, job)
        ignored = torch.full((job.batch, 1), -100, device="cuda")
        for step in range(2):
            recorder.mark("prepare", step=step)
            tokens, labels = (
                torch.randint(0, CONFIG["vocab_size"], (job.batch, job.seq), device="cuda")
                for _ in range(2)
            )
            recorder.mark("forward")
            with hooks:
                logits = model(tokens=tokens)
            labels = torch.hstack((labels[..., 1:], ignored))
            if not isinstance(logits, list):
                labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
            loss = loss_of(logits, labels)
            del logits
            recorder.mark("backward")
            (loss * 8.0).backward()
            recorder.rest()
            recorder.mark("step")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return Tape(events=recorder.finished(), source="trace", versions={})


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "precision": "fp32"},
        {"optimizer": "adamw"},
        {"optimizer": "sgd", "loss": "chunked"},
        {"optimizer": "sgd", "checkpointing": "full"},
        {"optimizer": "sgd", "checkpointing": "full", "loss": "chunked"},
        {"optimizer": "sgd", "checkpointing": "full", "activation_offload": "streams"},
        {
            "checkpointing": "full",
            "activation_offload": "streams",
            "method": "lora",
            "rank": 8,
            "targets": "q_proj,v_proj",
            "loss": "chunked",
        },
        {"method": "lora", "rank": 8, "targets": "q_proj,v_proj"},
        {
            "method": "lora",
            "rank": 8,
            "targets": "q_proj,v_proj",
            "dropout": 0.1,
            "loss": "chunked",
        },
    ],
    ids=str,
)
def test_torchtune_as_the_real_code_allocates(name: str, fields: dict[str, Any]) -> None:
    job = Job(**{"framework": "torchtune", "batch": 2, "seq": 512, "packing": False, **fields})
    found = memory(lower(build({"model_type": name, **CONFIG}, name=name), job)).allocated
    assert found == pytest.approx(memory(traced(name, job)).allocated, rel=5e-4)
