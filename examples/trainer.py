"""A tiny GPT-2 trained by the Trainer of transformers, over howdah by one line of `main`.

torchrun --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29511 \
    examples/trainer.py howdah

With `gloo` for `howdah` it prints the same loss.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import howdah.comm.backend  # noqa: F401  makes "howdah" known to torch

NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Samples of 16 tokens that count upwards from any number."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 48, (count, 1), generator=draw)
    return [{"input_ids": row, "labels": row} for row in starts + torch.arange(16)]


def train(folder: str) -> float:
    """The mean loss of eight steps on two samples of each rank."""
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, **NO_ENDS)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=rows(64))
    trainer.remove_callback(PrinterCallback)
    return trainer.train().training_loss


def main(backend: str) -> None:
    """Trains on the ranks that torchrun started; rank 0 prints."""
    dist.init_process_group(backend)  # before the first object of Accelerate or transformers
    with tempfile.TemporaryDirectory() as folder:
        loss = train(folder)
    if dist.get_rank() == 0:
        print(f"{dist.get_backend()}, {dist.get_world_size()} ranks: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
