"""The likeliest next tokens of a text, from the newest checkpoint of a run folder.

python examples/next_token.py runs/laptop "def test("
"""

import sys
from pathlib import Path

import torch

from howdah import open_run
from howdah.text.tokenizer import prompt_ids


def next_tokens(folder: str, prompt: str, count: int = 3) -> list[tuple[str, float]]:
    """The `count` likeliest tokens after `prompt`, each with its probability."""
    run = open_run(Path(folder), say=print)
    model, tokenizer = run.model(), run.tokenizer()
    tokens = torch.tensor([prompt_ids(tokenizer, prompt, run.end)])  # [1, s]
    positions = torch.arange(tokens.shape[1])[None]  # [1, s]
    with torch.no_grad():
        hidden = model(tokens, positions)  # [1, s, width]
        probabilities = model.logits(hidden[0, -1]).softmax(0)  # [vocab]
    best = probabilities.topk(count).indices.tolist()
    return [(tokenizer.decode([token]), float(probabilities[token])) for token in best]


def main(folder: str, prompt: str) -> None:
    """Prints them, a line each."""
    for token, probability in next_tokens(folder, prompt):
        print(f"{probability:6.1%}  {token!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
