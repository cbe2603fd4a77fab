"""The loops: load a model, train it for some steps, as a plain Trainer does."""

from __future__ import annotations

from typing import Any

import torch

from memfit.job import Job
from memfit.trace.recorder import Recorder


def load(recorder: Recorder, model: Any) -> None:
    """Every parameter and buffer arrives on the GPU once, in the model's order; tied ones share their storage."""
    recorder.mark("load")
    for part, named in (("weights", model.named_parameters()), ("buffers", model.named_buffers())):
        for name, tensor in named:
            storage = tensor.untyped_storage()
            if storage._cdata in recorder.blocks or storage.nbytes() == 0:
                continue
            recorder.modules.append(name.rpartition(".")[0])
            block = recorder.block(storage.nbytes(), "load", tensor)
            recorder.modules.pop()
            block.part = part
            recorder.adopt(storage._cdata, storage, block)


def optimizer_of(model: Any, job: Job) -> Any:
    """The optimizer by its name, over the trainable parameters."""
    from memfit.optimizers import OPTIMIZERS

    parameters = [one for one in model.parameters() if one.requires_grad]
    name = OPTIMIZERS.find(job.optimizer).name
    optim = torch.optim
    makers: dict[str, Any] = {
        "adamw": lambda: optim.AdamW(parameters),
        "adamw_fused": lambda: optim.AdamW(parameters, fused=True),
        "adamw_loop": lambda: optim.AdamW(parameters, foreach=False),
        "adam": lambda: optim.Adam(parameters),
        "adam_fused": lambda: optim.Adam(parameters, fused=True),
        "sgd": lambda: optim.SGD(parameters, lr=1e-3),
        "sgd_momentum": lambda: optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "rmsprop": lambda: optim.RMSprop(parameters),
        "adagrad": lambda: optim.Adagrad(parameters),
    }
    return makers[name]()


def train(recorder: Recorder, model: Any, job: Job, options: Any) -> None:
    """Forward, backward, step, zero_grad; outputs are dropped before backward unless `keep_outputs`."""
    model.train()
    model.config.use_cache = False
    if job.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": job.reentrant})
    optimizer = optimizer_of(model, job)
    vocabulary = model.config.get_text_config().vocab_size
    for step in range(options.steps):
        for _ in range(job.accumulate):
            recorder.mark("prepare", step=step)
            ids = torch.randint(0, vocabulary, (job.batch, job.seq), device=recorder.device.type)
            recorder.mark("forward")
            outputs = model(input_ids=ids, labels=ids)
            loss = outputs.loss
            if not options.keep_outputs:
                del outputs
            loss = loss / job.accumulate if job.accumulate > 1 else loss
            recorder.mark("backward")
            loss.backward()
            recorder.last_node = (0, "")
            outputs = loss = None
            owned(recorder, "gradients", (one.grad for one in model.parameters() if one.grad is not None))
        recorder.mark("step")
        if job.clip:
            torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], job.clip)
        optimizer.step()
        owned(recorder, "optimizer", (one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)))
        optimizer.zero_grad(set_to_none=True)


def owned(recorder: Recorder, part: Any, tensors: Any) -> None:
    for tensor in tensors:
        block = recorder.owned(tensor)
        if block is not None and block.part != "weights":
            block.part = part
