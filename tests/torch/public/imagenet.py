# memfit: -- --epochs 1 --gpu 0
"""In the order of pytorch/examples' imagenet: one GPU, all with DataParallel, or a process for each
that mp.spawn starts; meters, top-1 and top-5, a schedule, the best checkpoint."""

import argparse
import os
import shutil
import time

import torch.distributed as dist
import torch.multiprocessing as mp
from blocks import resnet
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, Subset

import torch
from torch import nn

parser = argparse.ArgumentParser(description="ImageNet training, in small")
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="tcp://127.0.0.1:29731", type=str)
parser.add_argument("--multiprocessing-distributed", action="store_true")
best = 0


def main():
    args = parser.parse_args()
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    each = torch.cuda.device_count() if torch.cuda.is_available() else 1
    if args.multiprocessing_distributed:
        args.world_size = each * args.world_size
        mp.spawn(worker, nprocs=each, args=(each, args))
    else:
        worker(args.gpu, each, args)


def worker(gpu, each, args):
    global best
    args.gpu = gpu
    if args.distributed:
        if args.multiprocessing_distributed:
            args.rank = args.rank * each + gpu
        dist.init_process_group(
            backend="nccl",
            init_method=args.dist_url,
            world_size=args.world_size,
            rank=args.rank,
        )
    model, there = resnet(), torch.cuda.is_available()
    if not there:
        print("using CPU, this will be slow")
        device = torch.device("cpu")
    elif args.distributed:
        torch.cuda.set_device(args.gpu)
        model.cuda(args.gpu)
        args.batch_size = int(args.batch_size / each)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        device = torch.device(f"cuda:{args.gpu}")
    elif args.gpu is not None:
        torch.cuda.set_device(args.gpu)
        model = model.cuda(args.gpu)
        device = torch.device(f"cuda:{args.gpu}")
    else:
        model = nn.DataParallel(model).cuda()
        device = torch.device("cuda")
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    if args.resume:
        kept = torch.load(args.resume, map_location=device)
        best = kept["best_acc1"]
        model.load_state_dict(kept["state_dict"])
        optimizer.load_state_dict(kept["optimizer"])
        scheduler.load_state_dict(kept["scheduler"])
    train, val = FakeData(64), Subset(FakeData(64), range(32))
    sampler = torch.utils.data.distributed.DistributedSampler(train) if args.distributed else None
    train_loader = DataLoader(
        train, args.batch_size, shuffle=sampler is None, pin_memory=there, sampler=sampler
    )
    val_loader = DataLoader(val, args.batch_size, shuffle=False, pin_memory=there)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        train_one(train_loader, model, criterion, optimizer, device)
        score = validate(val_loader, model, criterion, args, device)
        scheduler.step()
        is_best, best = score > best, max(score, best)
        if not args.multiprocessing_distributed or args.rank % each == 0:
            kept = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(kept, "checkpoint.pth.tar")
            if is_best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")


def train_one(loader, model, criterion, optimizer, device):
    losses, top1, top5 = Meter(), Meter(), Meter()
    model.train()
    clock = time.time()
    for images, target in loader:
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        first, fifth = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(first[0], images.size(0))
        top5.update(fifth[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{time.time() - clock:.2f} s, loss {losses.average:.3f}, top-1 {top1.average}")


def validate(loader, model, criterion, args, device):
    losses, top1 = Meter(), Meter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            if args.gpu is not None and torch.cuda.is_available():
                images = images.cuda(args.gpu, non_blocking=True)
            if torch.cuda.is_available():
                target = target.cuda(args.gpu, non_blocking=True)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0], images.size(0))
    if args.distributed:
        top1.all_reduce(device)
    return top1.average


class FakeData(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return torch.randn(3, 96, 96), place % 100


class Meter:
    def __init__(self):
        self.sum = self.count = self.average = 0

    def update(self, value, count=1):
        self.sum += value * count
        self.count += count
        self.average = self.sum / self.count

    def all_reduce(self, device):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=device)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.average = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, places = output.topk(max(topk), 1, True, True)
        right = places.t().eq(target.view(1, -1).expand_as(places.t()))
        return [
            right[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0))
            for k in topk
        ]


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29731")
    main()
