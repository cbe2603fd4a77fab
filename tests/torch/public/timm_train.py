"""In the order of timm's train.py: weight decay by parameter groups, mixup with soft targets, a
scaler that backpropagates and steps, an averaged model that follows, validation of both."""

import copy
import os
from contextlib import suppress

import torch
from blocks import resnet
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES, SIZE = 100, 96
AMP = "--amp" in os.sys.argv
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Pictures(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return torch.randn(3, SIZE, SIZE), place % CLASSES


class Scaler:
    """Scales, backpropagates, clips and steps in one call."""

    def __init__(self):
        self.inner = torch.amp.GradScaler(device.type, enabled=AMP)

    def __call__(self, loss, optimizer, clip, parameters):
        self.inner.scale(loss).backward()
        self.inner.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip)
        self.inner.step(optimizer)
        self.inner.update()


class Average(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay
        self.module.eval()

    @torch.no_grad()
    def update(self, model):
        ours, theirs = self.module.state_dict().values(), model.state_dict().values()
        for mine, one in zip(ours, theirs, strict=True):
            mine.copy_(self.decay * mine + (1.0 - self.decay) * one)


def mixup(x, target, share=0.7):
    flipped = x.flip(0).mul_(1.0 - share)
    x.mul_(share).add_(flipped)
    soft = torch.full((len(target), CLASSES), 0.001, device=x.device)
    first = soft.scatter(1, target.long().view(-1, 1), 0.9)
    return x, first * share + first.flip(0) * (1.0 - share)


def soft_cross_entropy(x, target):
    return torch.sum(-target * torch.nn.functional.log_softmax(x, dim=-1), dim=-1).mean()


def groups(model, decay):
    with_decay, without = [], []
    for name, one in model.named_parameters():
        (without if one.ndim <= 1 or name.endswith(".bias") else with_decay).append(one)
    return [{"params": without, "weight_decay": 0.0}, {"params": with_decay, "weight_decay": decay}]


def train_one_epoch(model, loader, optimizer, context, scaler, average):
    model.train()
    for place, (x, target) in enumerate(loader):
        x, target = x.to(device), target.to(device)
        x, target = mixup(x, target)
        with context():
            loss = soft_cross_entropy(model(x), target)
        if not torch.isfinite(loss):
            raise SystemExit("the loss is not finite")
        scaler(loss, optimizer, 1.0, model.parameters())
        optimizer.zero_grad()
        average.update(model)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{place}: {loss.item():.4f}")


def validate(model, loader, context):
    model.eval()
    right = count = 0
    with torch.inference_mode():
        for x, target in loader:
            x, target = x.to(device), target.to(device)
            with context():
                output = model(x)
            right += (output.topk(5)[1] == target.view(-1, 1)).any(1).sum().item()
            count += len(target)
    return {"top5": 100 * right / count}


def main():
    torch.manual_seed(42)
    model = resnet(CLASSES).to(device)
    optimizer = torch.optim.SGD(groups(model, 2e-5), lr=0.05, momentum=0.9, nesterov=True)
    context = (lambda: torch.autocast(device.type, dtype=torch.float16)) if AMP else suppress
    scaler, average = Scaler(), Average(model, 0.998)
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
    for epoch in range(1):
        train_one_epoch(model, loader, optimizer, context, scaler, average)
        scores = [validate(one, loader, context) for one in (model, average.module)]
        scheduler.step()
        os.makedirs("out", exist_ok=True)
        kept = {"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}
        torch.save({**kept, "optimizer": optimizer.state_dict()}, "out/last.pth.tar")
        print(epoch, scores)


if __name__ == "__main__":
    main()
