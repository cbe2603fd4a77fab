"""Asks the GPU about everything a program may ask about, and believes the answers only if they fit
together."""

import torch
from torch.utils.data import DataLoader

MIB = 2**20
gpu = torch.device("cuda", 0)
assert (
    torch.cuda.is_available()
    and torch.cuda.device_count() == 1
    and torch.cuda.current_device() == 0
)
assert (
    torch.version.cuda
    and torch.backends.cudnn.is_available()
    and torch.backends.cudnn.version() > 8000
)
properties = torch.cuda.get_device_properties(0)
assert (
    properties.name
    == torch.cuda.get_device_name()
    == torch.cuda.get_device_name(gpu)
    == "NVIDIA A100-SXM4-80GB"
)
assert (properties.major, properties.minor) == torch.cuda.get_device_capability("cuda:0") == (8, 0)
assert properties.multi_processor_count == 108 and torch.cuda.is_bf16_supported()
free, total = torch.cuda.mem_get_info()
assert free <= total == properties.total_memory

before = torch.cuda.memory_allocated()
block = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
assert block.is_cuda and block.device == gpu and block.get_device() == 0 and block.device.index == 0
assert torch.cuda.memory_allocated() - before == 3 * MIB
assert (
    torch.cuda.memory_reserved()
    == 20 * MIB
    == torch.cuda.memory_stats()["reserved_bytes.all.current"]
)
assert torch.cuda.mem_get_info()[0] == free - 20 * MIB
del block
assert (
    torch.cuda.memory_allocated() == before
    and torch.cuda.max_memory_allocated() == before + 3 * MIB
)
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == before
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == 0 and "reserved_bytes" in torch.cuda.memory_summary()
if hasattr(torch, "accelerator"):
    assert (
        torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    )

torch.manual_seed(1)
torch.cuda.manual_seed_all(1)
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
generator = torch.Generator(device="cuda")
generator.manual_seed(3)
assert isinstance(generator, torch.Generator)
assert torch.randn(4, device="cuda", generator=generator).is_cuda

stream, start, end = (
    torch.cuda.Stream(),
    torch.cuda.Event(enable_timing=True),
    torch.cuda.Event(enable_timing=True),
)
start.record()
with torch.cuda.stream(stream), torch.cuda.device(0):
    x = torch.ones(8).pin_memory().to("cuda", non_blocking=True)
end.record()
torch.cuda.current_stream().wait_stream(stream)
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0

ids = torch.arange(6).cuda()
assert (
    ids.tolist() == [0, 1, 2, 3, 4, 5] and ids.cpu().numpy().sum() == 15 and int(ids[2]) == 2
)  # small whole numbers are known
assert x.to("cpu").device.type == "cpu" and x.cpu().numpy().shape == (8,)

model = torch.nn.Linear(64, 64).to(0)
assert next(model.parameters()).is_cuda
state = {name: value.cpu() for name, value in model.state_dict().items()}
model.load_state_dict(state)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler()
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
for batch in DataLoader(
    torch.randn(64, 64),
    batch_size=8,
    num_workers=2,
    pin_memory=True,
    persistent_workers=True,
    prefetch_factor=2,
):
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled("cuda")
        out = model(batch.to(gpu, non_blocking=True))
        assert out.dtype == torch.float16
        loss = torch.nn.functional.mse_loss(out, torch.zeros_like(out))
        assert loss.dtype == torch.float32
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    if not torch.isfinite(loss):
        raise SystemExit("the loss is not finite")
