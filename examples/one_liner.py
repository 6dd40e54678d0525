"""A text, and the numbers of a text, in a line each.

python examples/one_liner.py runs/tiny "17 follows"
"""

import sys

import howdah


def main(folder: str, prompt: str) -> None:
    """Prints what follows a prompt, and how many numbers stand for it."""
    write = howdah.pipeline("text-generation", folder)
    for found in write(prompt, max_new_tokens=8, num_beams=2, do_sample=False):
        print(found["generated_text"])
    (tokens,) = howdah.pipeline("feature-extraction", folder)(prompt)
    print(f"{len(tokens)} tokens of {len(tokens[0])} numbers")


if __name__ == "__main__":
    main(*sys.argv[1:])
