"""Runs the code cells of a notebook in their order, in one process, as a kernel would.

python run_notebook.py FILE.ipynb

A kernel would bring some twenty packages, to test Jupyter rather than the notebook. Of magics there
is `%%writefile`. The names that the cells make are those of `__main__`, which has no file: as in a
notebook.
"""

import json
import sys
from pathlib import Path


def run(notebook):
    names = vars(sys.modules["__main__"])
    names.pop("__file__", None)
    for number, cell in enumerate(json.loads(Path(notebook).read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile "):
            Path(first.removeprefix("%%writefile ")).write_text(rest + "\n")
        else:
            exec(compile(source, f"cell {number}", "exec"), names)


if __name__ == "__main__":
    run(sys.argv[1])
