"""Other people's tools themselves, where they are installed: asked through their own Python
functions, on the model's config. Each is imported only when it is asked, and none is ever part of
an estimate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from memfit.hardware import GPU
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Latent
from memfit.strategy import Strategy
from memfit.truth.baselines.base import Baseline, width


@dataclass(frozen=True, kw_only=True)
class Peer(Baseline):
    """`package`: what has to be there to ask it; `install`: what to tell pip."""

    package: str
    install: str

    @property
    def installed(self) -> bool:
        """Nothing is imported to find out."""
        try:
            return all(find_spec(one) is not None for one in self.package.split(","))
        except (ImportError, ValueError):
            return False


def full_adam(job: Job) -> bool:
    return (
        job.training
        and job.method == "full"
        and job.optimizer.startswith(("adam", "adamw"))
        and job.quantization == "none"
    )


def config_of(model: Model) -> Any:
    """transformers' own config object of the bundled config.json."""
    from transformers import AutoConfig

    values = {
        key: value
        for key, value in model.config.items()
        if key not in ("model_type", "quantization_config", "auto_map")
    }
    return AutoConfig.for_model(str(model.config["model_type"]), **values)


_SIZES: dict[str, int] = {}


def full_precision(model: Model) -> int:
    """Bytes of the empty fp32 model, as the command counts them (accelerate commands/estimate.py
    create_empty_model, gather_data)."""
    if model.name not in _SIZES:
        from accelerate import init_empty_weights
        from accelerate.utils import calculate_maximum_sizes
        from transformers import AutoModel

        import torch

        with init_empty_weights():
            empty = AutoModel.from_config(config_of(model), dtype=torch.float32)
        _SIZES[model.name] = int(calculate_maximum_sizes(empty)[0])
    return _SIZES[model.name]


def accelerate(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """`accelerate estimate-memory`: the total size to load, or the peak of training with Adam."""
    if job.training and not full_adam(job):
        return None
    from accelerate.commands.estimate import estimate_training_usage

    size = full_precision(model)
    if job.training:
        return int(
            max(
                estimate_training_usage(
                    size, "float32" if job.precision == "fp32" else "bfloat16"
                ).values()
            )
        )
    share = {"int8": 4, "nf4": 8, "fp4": 8}.get(job.quantization, 4 // width(job))
    return size // share


def deepspeed(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """`estimate_zero2_model_states_mem_needs` on one GPU, without offloading: states alone, as it
    says itself."""
    if not full_adam(job):
        return None
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    return int(
        estimate_zero2_model_states_mem_needs(
            model.parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=False
        )[1]
    )


def llm_analysis(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """`LLMAnalysis.training` and `.inference` with everything that its configs can say of the model
    and nothing more."""
    if job.training and not full_adam(job):
        return None
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig

    mixers = [block.mixer for layer in model.layers for block in layer.blocks]
    attention = next((one for one in mixers if isinstance(one, (Attention, Latent))), None)
    mlp = next((one for one in mixers if isinstance(one, MLP)), None)
    if attention is None or mlp is None:
        return None
    gated, bits = mlp.gate is not None or mlp.fused, 8 * width(job)
    config = ModelConfig(
        name=model.name,
        num_layers=len(model.layers),
        n_head=attention.heads,
        hidden_dim=model.width,
        vocab_size=model.vocab,
        num_key_value_heads=getattr(attention, "kv_heads", attention.heads),
        ffn_embed_dim=mlp.width,
        expansion_ratio=mlp.width / model.width,
        max_seq_len=max(model.positions or 0, job.seq + job.new_tokens),
    )
    device = GPUConfig(
        "endless", 1e6, 1.0, 1.0, 1.0, 1.0
    )  # on one that is too small it raises, and its figure is what is wanted
    weights = {"int8": 8, "nf4": 4, "fp4": 4}.get(job.quantization, bits)
    asked = LLMAnalysis(
        config,
        device,
        DtypeConfig("memfit", weights, bits, bits),
        flops_efficiency=0.5,
        hbm_memory_efficiency=0.5,
    )
    if job.training:
        found = asked.training(
            batch_size_per_gpu=job.batch,
            seq_len=job.seq,
            total_num_tokens=job.batch * job.seq,
            mlp_gated_linear_units=gated,
            activation_recomputation=ActivationRecomputation.FULL
            if job.checkpointing == "full"
            else ActivationRecomputation.NONE,
            flash_attn=job.attention not in ("eager", "math"),
        )
        return int(found["(weight+op_state+grad+act)_memory_per_gpu"])
    found = asked.inference(
        batch_size_per_gpu=job.batch, seq_len=job.seq, num_tokens_to_generate=max(1, job.new_tokens)
    )
    parts = (
        "weight_memory_per_gpu",
        "kv_cache_memory_per_gpu",
        "prefill_activation_memory_per_gpu",
    )
    return int(sum(found[name] for name in parts))


def hf_mem(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """`hf-mem` reads the safetensors headers of the model's repository, so it needs a network and
    says nothing without."""
    if job.training or job.quantization != "none":
        return None
    return _asked(model.name, job.batch, job.seq + job.new_tokens)


@cache
def _asked(name: str, batch: int, tokens: int) -> int | None:
    from hf_mem.run import run

    try:
        total = run(
            model_id=name, experimental=True, max_model_len=tokens, batch_size=batch
        ).total_memory
        return None if total is None else int(total)
    except (OSError, RuntimeError, ValueError, TypeError):
        return None


def mem_tracker(model: Model, job: Job, gpu: GPU | None) -> int | None:
    """torch's MemTracker around one step on fake tensors: half a minute for 8 B parameters."""
    if not full_adam(job) or job.precision not in ("bf16", "fp32") or not job.hugging:
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoModelForCausalLM

    import torch

    with FakeTensorMode():
        real = AutoModelForCausalLM.from_config(
            config_of(model), dtype=torch.bfloat16 if job.precision == "bf16" else torch.float32
        )
        real.config.use_cache = False
        if job.checkpointing == "full":
            real.gradient_checkpointing_enable()
        real.train()
        optimizer, tracker = torch.optim.AdamW(real.parameters()), MemTracker()
        tracker.track_external(real, optimizer)
        ids = torch.randint(0, model.vocab, (job.batch, job.seq))
        with tracker:
            for step in range(
                2
            ):  # the optimizer's states stand beside the activations from the second on
                if step:
                    tracker.reset_mod_stats()
                real(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return int(sum(max(parts.values()) for parts in tracker.get_tracker_snapshot("peak").values()))


def peer(
    name: str,
    package: str,
    install: str,
    cite: str,
    estimate: Callable[[Model, Job, GPU | None], int | None],
) -> Peer:
    return Peer(name=name, package=package, install=install, cite=cite, estimate=estimate)


PEERS: tuple[Peer, ...] = (
    peer(
        "accelerate estimate-memory",
        "accelerate,transformers",
        "accelerate transformers",
        "accelerate commands/estimate.py",
        accelerate,
    ),
    peer(
        "DeepSpeed ZeRO estimator",
        "deepspeed",
        "deepspeed",
        "deepspeed 0.19 runtime/zero/stage_1_and_2.py",
        deepspeed,
    ),
    peer(
        "llm-analysis",
        "llm_analysis",
        "llm-analysis",
        "llm-analysis 0.2.2 analysis.py",
        llm_analysis,
    ),
    peer("hf-mem", "hf_mem", "hf-mem", "hf-mem 0.5.6 run.py", hf_mem),
    peer(
        "torch MemTracker",
        "torch,transformers",
        "torch transformers",
        "torch distributed/_tools/mem_tracker.py",
        mem_tracker,
    ),
)


def asked() -> tuple[Peer, ...]:
    """Those that are there."""
    return tuple(one for one in PEERS if one.installed)


def say(
    model: Model, job: Job, place: tuple[GPU | None, Strategy], one: Baseline
) -> int | str | None:
    """Its figure, or nothing where it does not apply; words where other people's code failed."""
    gpu, strategy = place
    try:
        if not strategy:
            return one.estimate(model, job, gpu)
        return None if one.spread is None else one.spread(model, job, gpu, strategy)
    except Exception as failure:
        if not isinstance(one, Peer):
            raise
        return f"{type(failure).__name__}: {str(failure)[:120]}"


__all__ = ["PEERS", "Peer", "asked", "say"]
