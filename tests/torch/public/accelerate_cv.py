"""In the order of accelerate's cv_example.py: a network whose head alone is trained, images
normalized on the device, OneCycleLR."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from blocks import resnet
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, random_split


class Pets(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, place):
        return {"image": torch.rand(3, 128, 128), "label": place % 37}


def train(config):
    accelerator = Accelerator()
    set_seed(config["seed"])
    train_part, eval_part = random_split(Pets(), [64, 16])
    train_loader = DataLoader(train_part, shuffle=True, batch_size=config["batch_size"])
    eval_loader = DataLoader(eval_part, shuffle=False, batch_size=config["batch_size"])
    model = resnet(37).to(accelerator.device)
    for one in model.parameters():
        one.requires_grad = False
    for one in model[-1].parameters():
        one.requires_grad = True
    mean = torch.tensor([0.485, 0.456, 0.406])[None, :, None, None].to(accelerator.device)
    std = torch.tensor([0.229, 0.224, 0.225])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=config["lr"] / 25)
    scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=config["lr"], epochs=1, steps_per_epoch=len(train_loader)
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    model.train()
    for batch in train_loader:
        batch = {name: one.to(accelerator.device) for name, one in batch.items()}
        inputs = (batch["image"] - mean) / std
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    accurate = count = 0
    for batch in eval_loader:
        batch = {name: one.to(accelerator.device) for name, one in batch.items()}
        inputs = (batch["image"] - mean) / std
        with torch.no_grad():
            outputs = model(inputs)
        predictions, references = accelerator.gather_for_metrics(
            (outputs.argmax(dim=-1), batch["label"])
        )
        right = predictions == references
        count, accurate = count + right.shape[0], accurate + right.long().sum()
    accelerator.print(f"{100 * accurate.item() / count:.2f}")


if __name__ == "__main__":
    train({"lr": 3e-2, "seed": 42, "batch_size": 16})
