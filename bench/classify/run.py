"""howdah beside transformers' Trainer: the same classifier of the same rows, from the same weights.

python bench/classify/run.py [--steps 240] [--layout dp2]

1. examples/labelled_rows.py makes the rows; those to train on are shuffled once, and an epoch is
   of whole batches: Trainer takes what is left of one as a short batch, howdah as part of the next
2. howdah trains a tokenizer on them; a BertForSequenceClassification with random weights is saved
   with it: the folder from which both start
3. both train in float32 on the same batches in the same order, by the same AdamW and schedule
4. both label the held-out rows: accuracy and macro F1, and how many rows they label alike

Writes results.md and results.json, with the seconds that both took: the noise of the machine is
measured first (../quiet.py). Needs transformers and accelerate.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch
import transformers
from torch.utils.data import Sampler, SequentialSampler

import howdah
from howdah.optim.learning_rate import learning_rate
from howdah.plan.method import LearningRate
from howdah.shapes.presets import preset
from howdah.shapes.shape import with_labels
from howdah.text.labelled import labels_of
from howdah.text.labels import label_names
from howdah.text.sources import Data, Source
from howdah.text.tokens import prepare
from howdah.train.label_scores import scores

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LENGTH, BATCH, DECAY, CLIP, BETAS = 128, 16, 0.01, 1.0, (0.9, 0.95)
RATE = LearningRate(peak=1e-3, warmup_steps=40, schedule="linear", min_ratio=0.0)
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
NO_DECAY = ("position_embeddings", "token_type_embeddings")
RECIPE = """
name = "ours"
init_from = "start"
layout = "{layout}"
[data]
sources = [{{ path = "rows/train.jsonl", label = "label" }}]
validation = [{{ path = "rows/held_out.jsonl", label = "label" }}]
sequence_length = {length}
order = "sequential"
[batch]
global_batch = {batch}
[comm]
algorithm = "ring"
[method]
grad_clip = {clip}
[method.optimizer]
weight_decay = {decay}
[method.lr]
peak = {rate.peak}
warmup_steps = {rate.warmup_steps}
schedule = "{rate.schedule}"
min_ratio = {rate.min_ratio}
[train]
steps = {steps}
log_every = 1
export = true
"""


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def make_start(work: Path) -> None:
    """Writes the rows and the folder `start`."""
    script = str(ROOT / "examples" / "labelled_rows.py")
    subprocess.run([sys.executable, script, str(work / "rows")], check=True)
    path = work / "rows" / "train.jsonl"
    rows = path.read_text("utf-8").splitlines(keepends=True)
    random.Random(0).shuffle(rows)
    rows = rows[
        : len(rows) // BATCH * BATCH
    ]  # Trainer's last batch of an epoch would be a short one
    path.write_text("".join(rows), "utf-8")
    data = Data((Source(str(path), label="label"),), sequence_length=LENGTH)
    names = label_names(data)
    labels = labels_of(with_labels(preset("bert-base"), names))
    corpus = prepare(data, vocab=2000, cache=work / "cache", say=lambda _: None, labels=labels)
    transformers.set_seed(1)
    made = transformers.BertConfig(
        **SIZES, vocab_size=2000, id2label=dict(enumerate(names)), pad_token_id=None
    )
    transformers.BertForSequenceClassification(made).save_pretrained(work / "start")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(corpus.tokenizer_path), pad_token="<|end|>", eos_token="<|end|>"
    ).save_pretrained(work / "start")


def by_howdah(work: Path, layout: str, steps: int) -> tuple[list[float], float]:
    """Losses of the steps, and seconds."""
    told = {"layout": layout, "steps": steps, "length": LENGTH, "batch": BATCH, "rate": RATE}
    (work / "ours.toml").write_text(RECIPE.format(**told, clip=CLIP, decay=DECAY), "utf-8")
    began = perf_counter()
    subprocess.run([sys.executable, "-m", "howdah", "train", "ours.toml"], cwd=work, check=True)
    seconds = perf_counter() - began
    rows = read(work / "runs" / "ours" / "metrics.jsonl")
    return [float(row["loss"]) for row in rows if row["kind"] == "train"], seconds


class InOrder(transformers.Trainer):
    """A Trainer that takes the rows in the order of the file."""

    def _get_train_sampler(self, *_: object) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)


def by_trainer(work: Path, steps: int) -> tuple[list[float], float]:
    """The same by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "start")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(work / "start")
    numbers = {name: number for number, name in model.config.id2label.items()}
    rows = [
        {
            **tokenizer(row["text"], truncation=True, max_length=LENGTH),
            "labels": numbers[row["label"]],
        }
        for row in read(work / "rows" / "train.jsonl")
    ]
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        plain = weight.ndim == 1 or any(part in name for part in NO_DECAY)
        (others if plain else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(RATE, step=step, steps=steps)
    )
    settings = transformers.TrainingArguments(
        output_dir=str(work / "theirs"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        max_grad_norm=CLIP,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(
        model,
        settings,
        train_dataset=rows,
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
    )
    began = perf_counter()
    trainer.train()
    seconds = perf_counter() - began
    trainer.save_model(str(work / "theirs"))
    history = trainer.state.log_history
    return [float(row["loss"]) for row in history if "loss" in row], seconds


def measured(folder: Path, work: Path) -> tuple[list[str], float, float]:
    """The labels that a folder's model gives the held-out rows, their accuracy and macro F1."""
    rows = read(work / "rows" / "held_out.jsonl")
    classify = transformers.pipeline("text-classification", str(folder), device="cpu")
    texts = [row["text"] for row in rows]
    found = [one["label"] for one in classify(texts, truncation=True, max_length=LENGTH)]
    labels = [row["label"] for row in rows]
    names = sorted({*labels, *found})
    right = [a if a == b else "" for a, b in zip(labels, found, strict=True)]
    return found, *scores(*([one.count(name) for name in names] for one in (labels, found, right)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--layout", default="dp2")
    parser.add_argument("--to", type=Path, default=HERE)
    quiet.add_option(parser)
    given = parser.parse_args()
    watch = quiet.Watch(writes=True, loaded=given.loaded)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        make_start(work)
        torch.set_num_threads(2)
        ours, our_seconds = by_howdah(work, given.layout, given.steps)
        theirs, their_seconds = by_trainer(work, given.steps)
        kinds, accuracy, f1 = measured(work / "runs" / "ours" / "export", work)
        others, their_accuracy, their_f1 = measured(work / "theirs", work)
        own = howdah.pipeline("text-classification", work / "runs" / "ours")
        texts = [row["text"][:300] for row in read(work / "rows" / "held_out.jsonl")]
        assert len(own(texts[:4])) == 4
    looks = watch.end()
    apart = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    alike = sum(a == b for a, b in zip(kinds, others, strict=True))
    result = {
        "steps": given.steps,
        "layout": given.layout,
        "howdah": {"accuracy": accuracy, "f1": f1, "last_loss": ours[-1], "seconds": our_seconds},
        "trainer": {
            "accuracy": their_accuracy,
            "f1": their_f1,
            "last_loss": theirs[-1],
            "seconds": their_seconds,
        },
        "held_out_rows": len(kinds),
        "labelled_alike": alike,
        "losses_apart": {"first 10": max(apart[:10]), "first 100": max(apart[:100])},
        "noise": looks,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    lines = [
        f"{given.steps} steps of {BATCH} rows, float32, {given.layout} by a ring beside one "
        f"process of Trainer; {len(kinds)} held-out rows.",
        "",
        "| | accuracy | macro F1 | loss of the last step |",
        "|---|---|---|---|",
        f"| howdah | {accuracy:.2%} | {f1:.4f} | {ours[-1]:.4f} |",
        f"| Trainer | {their_accuracy:.2%} | {their_f1:.4f} | {theirs[-1]:.4f} |",
        "",
        f"{alike} of {len(kinds)} rows are labelled alike. Losses are apart by at most "
        f"{max(apart[:10]):.1e} in the first 10 steps and {max(apart[:100]):.1e} in the first 100. "
        f"Seconds: howdah {our_seconds:.0f}, Trainer {their_seconds:.0f}. {quiet.sentence(looks)}",
        "",
    ]
    given.to.mkdir(parents=True, exist_ok=True)
    (given.to / "results.md").write_text("\n".join(lines), "utf-8")
    (given.to / "results.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
