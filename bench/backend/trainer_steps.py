"""One rank of a Trainer of transformers for run.py: prints seconds of its steps, and its loss.

torchrun … bench/backend/trainer_steps.py BACKEND STEPS

With `alone` each process trains for itself, and nothing is exchanged.
"""

import json
import os
import sys
import tempfile
from time import perf_counter

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import howdah.comm.backend  # noqa: F401  registers it

TOKENS = 64


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes when each step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(perf_counter())


def main(backend: str, steps: int) -> None:
    """Trains a GPT-2 of 3 million weights on one sample of each rank."""
    first = os.environ["RANK"] == "0"
    if backend == "alone":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    else:
        dist.init_process_group(backend)
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=512, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=4)
    data = [
        {"input_ids": (row := torch.randint(0, 512, (TOKENS,))), "labels": row} for _ in range(64)
    ]
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        made = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=data, callbacks=[watch])
        loss = made.train().training_loss
    if first:
        print(json.dumps([watch.ends[-1] - watch.ends[0], loss]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
