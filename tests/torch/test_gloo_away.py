"""What hooks on saved tensors are handed on two real ranks of the CPU: every byte of it beside the
formulas, and which weights look like parameters."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.gloo import ranks  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.tape import Comm, Mark, Tape  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = 0.002  # of what is handed
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
BATCH, SEQ = 2, 32
MATRICES = (
    2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 512 * 64
)  # values, the head's among them
NORMS = 5 * 64


def handed(use: str, checkpointing: bool) -> tuple[int, int, int]:
    """Bytes of everything, of `nn.Parameter`s, and of matrices in another guise, in one step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**LLAMA), attn_implementation="eager"
    )
    matrices = {tuple(reversed(one.shape)) for one in model.parameters() if one.dim() == 2} - {
        (64, 64)
    }
    model.train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = spread(model, use)
    found = [0, 0, 0]

    def pack(tensor: Any) -> Any:
        size = tensor.numel() * tensor.element_size()
        found[0] += size
        found[1] += size * isinstance(tensor, torch.nn.Parameter)
        found[2] += size * (
            not isinstance(tensor, torch.nn.Parameter) and tuple(tensor.shape) in matrices
        )
        return tensor

    tokens = torch.randint(0, 512, (BATCH, SEQ))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        wrapped(
            input_ids=tokens, labels=tokens, position_ids=torch.arange(SEQ)[None]
        ).loss.backward()
    return found[0], found[1], found[2]


def spread(model: Any, use: str) -> Any:
    if use.startswith("ddp"):
        return torch.nn.parallel.DistributedDataParallel(model)
    if "version=1" in use:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def written(use: str, checkpointing: bool) -> int:
    job = Job(
        batch=BATCH,
        seq=SEQ,
        precision="fp32",
        attention="eager",
        activation_offload="all",
        checkpointing="full" if checkpointing else "none",
        optimizer="sgd",
        packing=False,
    )
    return sent(lower(build(LLAMA), job, strategy_from([use], None)))


def sent(tape: Tape) -> int:
    """In the last step."""
    step, found = -1, 0
    for event in tape:
        if type(event) is Mark and event.step != step:
            step, found = event.step, 0
        elif type(event) is Comm and event.op == "to_host":
            found += event.size
    return found


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["none", "full"])
@pytest.mark.parametrize("use", ["ddp=2", "fsdp=2", "fsdp=2,version=1"])
def test_real_ranks_hand_as_much(use: str, checkpointing: bool) -> None:
    """FSDP2 and DDP hand parameters and transposes of them, FSDP1 views of a flat one."""
    first, second = ranks(2, handed, use, checkpointing)
    assert first == second
    everything, parameters, others = first
    assert everything == pytest.approx(written(use, checkpointing), rel=CLOSE)
    if not checkpointing:
        assert parameters == (0 if "version=1" in use else 4 * NORMS)
        assert others >= 4 * (MATRICES - 4 * 64 * 64)  # all but the square ones, which look alike
