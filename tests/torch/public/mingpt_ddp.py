# memfit: torchrun --standalone --nproc_per_node 2
"""In the order of pytorch/examples' minGPT-ddp: a Trainer of its own under torchrun, snapshots that
are read at the start, a DistributedSampler, DDP and a GradScaler."""

import argparse
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass

from blocks import GPT
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler

import torch

GPU = torch.cuda.is_available()


class Characters(Dataset):
    def __init__(self, length):
        self.text, self.length = torch.randint(0, 256, (4096,)), length

    def __len__(self):
        return len(self.text) - self.length

    def __getitem__(self, place):
        part = self.text[place : place + self.length + 1]
        return part[:-1].clone(), part[1:].clone()


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: dict
    finished_epoch: int


class Trainer:
    def __init__(self, model, optimizer, train, test, *, path, epochs, batch_size, most, use_amp):
        self.local, self.rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.device = self.local if GPU else "cpu"
        self.train_loader, self.test_loader = (
            self.loader(train, batch_size),
            self.loader(test, batch_size),
        )
        self.epoch, self.path, self.epochs, self.most = 0, path, epochs, most
        self.model, self.optimizer = model.to(self.device), optimizer
        self.use_amp = use_amp and GPU
        self.scaler = torch.amp.GradScaler("cuda") if self.use_amp else None
        self.load()
        self.model = DDP(self.model, device_ids=[self.local] if GPU else None)

    def loader(self, data, batch_size):
        return DataLoader(
            data,
            batch_size=batch_size,
            pin_memory=GPU,
            shuffle=False,
            num_workers=0,
            sampler=DistributedSampler(data),
        )

    def load(self):
        try:
            snapshot = torch.load(self.path, map_location="cpu", weights_only=False)
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        found = Snapshot(**snapshot)
        self.model.load_state_dict(found.model_state)
        self.optimizer.load_state_dict(found.optimizer_state)
        self.epoch = found.finished_epoch

    def batch(self, source, targets, training):
        with (
            torch.set_grad_enabled(training),
            torch.amp.autocast(device_type="cuda", dtype=torch.float16, enabled=self.use_amp),
        ):
            _, loss = self.model(source, targets)
        if training:
            self.optimizer.zero_grad(set_to_none=True)
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
        return loss.item()

    def run(self, epoch, loader, training):
        loader.sampler.set_epoch(epoch)
        for place, (source, targets) in enumerate(loader):
            if place == self.most:
                break
            source, targets = source.to(self.device), targets.to(self.device)
            loss = self.batch(source, targets, training)
            print(f"[GPU{self.rank}] Epoch {epoch} | Iter {place} | Loss {loss:.5f}")

    def save(self, epoch):
        raw = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = Snapshot(raw.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.path)

    def train(self):
        for epoch in range(self.epoch, self.epochs):
            self.run(epoch, self.train_loader, True)
            if self.local == 0:
                self.save(epoch)
            self.run(epoch, self.test_loader, False)


def main(args):
    init_process_group(backend="nccl" if GPU else "gloo")
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = Characters(128)
    train, test = random_split(data, [int(len(data) * 0.9), len(data) - int(len(data) * 0.9)])
    model = GPT(words=256, length=128, dropout=args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    more = {
        "path": "snapshot.pt",
        "epochs": 1,
        "batch_size": 16,
        "most": 3,
        "use_amp": args.use_amp,
    }
    Trainer(model, optimizer, train, test, **more).train()
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--no-amp", dest="use_amp", action="store_false")
    main(parser.parse_args())
