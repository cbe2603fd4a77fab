"""torchtitan's own mixture of experts on real tensors of the CPU, beside its formulas: forward and
backward of one module, on one rank and with experts over two (another's rows are taken to be like
this one's)."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from tests.conformance.layouts_ep import SPREADABLE  # noqa: E402
from tests.torch.watch import Watch  # noqa: E402

from memfit.formats import BF16  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.libraries.torchtitan.experts import experts  # noqa: E402
from memfit.lower import programmed  # noqa: E402
from memfit.lower.bound import Bound  # noqa: E402
from memfit.lower.context import context  # noqa: E402
from memfit.lower.frameworks import programs_of  # noqa: E402
from memfit.lower.recorder import Recorder  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.model.modules import MoE  # noqa: E402
from memfit.tape import Alloc, Free  # noqa: E402
from memfit.trace.ranks import group  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

BATCH, SEQ = 2, 256
CONFIG = SPREADABLE["qwen3_moe"]


def module(spread: int) -> Any:
    """The module as torchtitan's Qwen3 builds it, in bf16, its router in fp32, for which CPUs have
    no autocast."""
    # Triton's kernels, of a dispatcher that is not used here
    name = "torchtitan.distributed.minimal_async_ep"
    if name not in sys.modules:
        unused = types.ModuleType(name)
        for one in ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata"):
            setattr(unused, one, object)
        sys.modules[name] = unused
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    class Alike(AllToAllTokenDispatcher):
        def _token_count_exchange(self, counts: Any, pg: Any, ep_size: int) -> Any:
            return counts.view(ep_size, -1)[:1].expand(ep_size, -1).contiguous()

    width, inner, count = (
        CONFIG["hidden_size"],
        CONFIG["moe_intermediate_size"],
        CONFIG["num_experts"] // spread,
    )
    still = {"weight": torch.nn.init.zeros_}
    stacks = {f"{one}": torch.nn.init.zeros_ for one in ("w1_EFD", "w2_EDF", "w3_EFD")}
    router = make.make_router_config(
        dim=width,
        num_experts=CONFIG["num_experts"],
        gate_param_init=still,
        top_k=CONFIG["num_experts_per_tok"],
        score_func="softmax",
        route_norm=True,
    )
    router._debug_force_load_balance = True
    routed = make.make_routed_experts_config(
        dim=width,
        hidden_dim=inner,
        num_experts=count,
        top_k=CONFIG["num_experts_per_tok"],
        param_init=stacks,
        comm_backend="standard",
    )
    made = make.make_moe_config(
        num_experts=CONFIG["num_experts"], router=router, routed_experts=routed
    ).build()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    made.to(torch.bfloat16)
    for buffer in ("expert_bias_E", "tokens_per_expert_E"):
        setattr(made, buffer, torch.zeros(CONFIG["num_experts"]))
    gate = made.router.gate
    gate.forward = lambda x: torch.nn.functional.linear(x.float(), gate.weight.float())
    if spread > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend

        set_spmd_backend("default")
        made.routed_experts.token_dispatcher.__class__ = Alike
        made.routed_experts.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (spread,)))
    return made


def real(spread: int) -> tuple[int, int, int]:
    """Bytes that live more than at the start: at most in the forward, after it, at most in the
    backward."""
    made = module(spread)
    x = torch.randn(BATCH, SEQ, CONFIG["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones_like(x)
    with Watch() as watch:
        torch.add(x.detach()[0, 0], made.router.gate.weight.detach()[0])
        for one in [*made.parameters(), *made.buffers(), x, grad]:
            one.detach().view(-1)
        start = watch.live()
        watch.phase = "forward"
        out = made(x)
        after = watch.live()
        watch.phase = "backward"
        out.backward(grad)
    return watch.peaks["forward"] - start, after - start, watch.peaks["backward"] - start


def written(spread: int) -> tuple[int, int, int]:
    """The same of the formulas."""
    job = Job(framework="torchtitan", batch=BATCH, seq=SEQ, task="pretrain", attention="sdpa")
    strategy = strategy_from([f"fsdp={spread}", f"ep={spread}"] if spread > 1 else [], None)
    program = programmed(build(CONFIG), job, None, strategy, False)
    mixer = next(
        block.mixer for block in program.model.layers[0].blocks if isinstance(block.mixer, MoE)
    )
    r = Recorder()
    bound = Bound(r, program, "model.layers.0")
    bound.load(mixer.weights(), ())
    x = r.leaf((BATCH, SEQ, CONFIG["hidden_size"]), BF16, "x", "activations", True)
    ctx = context(r, program, programs_of(program), (BATCH, SEQ), keys=SEQ, training=True)
    grad = r.like(x, "ones_like")
    start = len(r.events)
    out = experts(x, mixer, bound, ctx)
    middle = len(r.events)
    r.backward(out, grad)
    lived = list(live(r.events))
    return (
        max(lived[start:middle]) - lived[start - 1],
        lived[middle - 1] - lived[start - 1],
        max(lived[middle:]) - lived[start - 1],
    )


def live(events: list[Any]) -> Iterator[int]:
    """After each event; what kernels take for themselves the dispatcher does not see."""
    sizes: dict[int, int] = {}
    for event in events:
        if type(event) is Alloc and event.part != "workspace":
            sizes[event.id] = event.size
        elif type(event) is Free:
            sizes.pop(event.id, 0)
        yield sum(sizes.values())


@pytest.mark.parametrize("spread", [1, 2])
def test_forward_and_backward_hold_what_the_real_module_does(spread: int) -> None:
    with group(strategy_from([f"fsdp={spread}"], None), "cpu"):
        truth = real(spread)
    found = written(spread)
    assert found == pytest.approx(truth, abs=64)  # the numbers of rows for each expert
