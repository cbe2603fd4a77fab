"""In the order of sentence-transformers' training with in-batch negatives: one encoder for both
texts, mean pooling, a similarity matrix as logits, warm-up by groups, an evaluation that encodes."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, get_linear_schedule_with_warmup

device = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, COUNT, BATCH, EPOCHS = 2000, 64, 16, 1


class Pairs(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return [torch.randint(0, WORDS, (COUNT,)) for _ in range(2)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        small = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = BertModel(BertConfig(vocab_size=WORDS, intermediate_size=512, **small, **rates))

    def forward(self, features):
        tokens = self.bert(**features).last_hidden_state
        mask = features["attention_mask"].unsqueeze(-1).expand(tokens.size()).to(tokens.dtype)
        found = torch.sum(tokens * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
        return {**features, "token_embeddings": tokens, "sentence_embedding": found}

    def encode(self, ids, batch_size=8):
        self.eval()
        found = []
        for start in range(0, len(ids), batch_size):
            part = moved(ids[start : start + batch_size])
            with torch.no_grad():
                embedding = self.forward(part)["sentence_embedding"]
            found.append(F.normalize(embedding, p=2, dim=1).cpu())
        self.train()
        return torch.cat(found)


def moved(ids):
    features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: one.to(device) for name, one in features.items()}


def collate(rows):
    return [torch.stack([row[place] for row in rows]) for place in range(2)]


model = Encoder().to(device)
decay = [(name, one) for name, one in model.named_parameters()]
without = ("bias", "LayerNorm.bias", "LayerNorm.weight")
groups = [
    {"params": [one for name, one in decay if not name.endswith(without)], "weight_decay": 0.01},
    {"params": [one for name, one in decay if name.endswith(without)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=2e-5)
loader = DataLoader(Pairs(), batch_size=BATCH, shuffle=True, collate_fn=collate, drop_last=True)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(loader) * EPOCHS)
for epoch in range(EPOCHS):
    model.train()
    for sides in loader:
        features = [moved(one) for one in sides]
        first, second = (model(one)["sentence_embedding"] for one in features)
        scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T * 20.0
        labels = torch.arange(len(scores), dtype=torch.long, device=scores.device)
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    first, second = (
        model.encode(torch.stack([Pairs()[row][side] for row in range(16)])) for side in (0, 1)
    )
    print(epoch, float((first * second).sum(1).mean()))
torch.save(model.state_dict(), "model.bin")
