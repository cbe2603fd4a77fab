# memfit: accelerate launch --use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap BertLayer --mixed_precision bf16 --fsdp_state_dict_type FULL_STATE_DICT
"""In the order of accelerate's FSDP examples under `accelerate launch`: accumulation, clipping where
gradients are summed, checkpoints that the accelerator saves, a whole model from all shards."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler


class Pairs(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        ids = torch.randint(0, 1000, (128,))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": place % 2}


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = BertForSequenceClassification(
        BertConfig(**small, intermediate_size=1024, vocab_size=1000, num_labels=2)
    )
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-5)
    loader = DataLoader(Pairs(), shuffle=True, batch_size=4)
    scheduler = get_scheduler("linear", optimizer, 0, 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step == 5:
            break
    accelerator.save_state("out/step_5")
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        "out",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
