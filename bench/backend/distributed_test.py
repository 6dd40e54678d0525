"""torch's own tests of torch.distributed, which are in its wheel, run against a backend.

    python bench/backend/distributed_test.py                  howdah, four ranks: all tests
    python bench/backend/distributed_test.py --backend gloo   the same with gloo, to compare
    python bench/backend/distributed_test.py --match ddp      those with this in their name

Results go to results/distributed_test-BACKEND.json after every test: how many passed, failed and
were skipped, and why. Tests that are in the file already are not run again, unless --again. They
are counts, no times, so the machine need not be quiet. Tests of GPUs are skipped without them.
"""

import argparse
import json
import os
import re
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RANKS = 4
SECONDS = 60  # after which the ranks of a test are ended
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")  # that torch lists for gloo, and others
# Tests that torch skips by the name of the backend, and that howdah can take.
LIFTED = ("Only MPI supports", "GLOO Batch", "get_future is only", "Only Nccl & Gloo")
GLOOS = "one of {'gloo'}"  # the same, but for those of a call that torch makes for gloo alone
OF_GLOO = "monitored_barrier"


def main() -> None:
    """Runs the tests that are left; prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="howdah")
    parser.add_argument("--match", default="", help="a regular expression for names of tests")
    parser.add_argument("--again", action="store_true", help="run tests that are in the file too")
    parser.add_argument("--most", type=int, default=1000, help="tests in this run")
    options = parser.parse_args()
    path = RESULTS / f"distributed_test-{options.backend}.json"
    outcomes = json.loads(path.read_text())["outcomes"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        case = the_case(options.backend, folder)
        names = unittest.defaultTestLoader.getTestCaseNames(case)
        chosen = [name for name in names if re.search(options.match, name)]
        left = [name for name in chosen if options.again or name not in outcomes]
        for name in left[: options.most]:
            outcomes[name] = outcome_of(case(name))
            print(f"{name}: {outcomes[name]}", flush=True)
            write(path, options.backend, outcomes)
    print(write(path, options.backend, outcomes))


def the_case(backend: str, folder: str) -> type[unittest.TestCase]:
    """The class of torch's tests, for ranks that are forked from this process."""
    settings = {"BACKEND": backend, "WORLD_SIZE": str(RANKS), "TEMP_DIR": folder}
    settings |= {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS), "OMP_NUM_THREADS": "1"}
    os.environ |= settings
    import torch
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal import common_utils as utils

    import howdah.comm.backend  # noqa: F401  registers it

    torch.set_num_threads(1)
    for feature in FEATURES:
        common.DistTestCases.backend_feature[feature].add(backend)
    skip = utils.skip_but_pass_in_sandcastle_if

    def skip_unless_lifted(condition: bool, reason: str) -> Any:
        return skip(condition and not reason.startswith(LIFTED), reason)

    utils.skip_but_pass_in_sandcastle_if = skip_unless_lifted
    skip_all = utils.skip_but_pass_in_sandcastle

    def skip_unless_gloos(reason: str) -> Any:
        def kept(test: Any) -> Any:
            lifted = reason.endswith(GLOOS) and OF_GLOO not in test.__name__
            return test if lifted else skip_all(reason)(test)

        return kept

    utils.skip_but_pass_in_sandcastle = skip_unless_gloos
    from torch.testing._internal.distributed.distributed_test import (
        DistributedTest,
        TestDistBackend,
    )

    class Forked(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        """Each test on ranks of its own."""

        def setUp(self) -> None:
            super().setUp()
            start = torch.multiprocessing.get_context("fork").Process
            self._start_processes(start)

    return Forked


def outcome_of(test: unittest.TestCase) -> str:
    """How a test ends: passed, `skipped: why`, or `failed: why`."""
    result = unittest.TestResult()
    test.run(result)
    for _, why in result.skipped:
        return f"skipped: {why}"
    for _, told in result.failures + result.errors:
        return f"failed: {last_sentence(told)}"
    return "passed"


def last_sentence(told: str) -> str:
    """The error of a traceback, in one line."""
    lines = [line.strip() for line in told.splitlines()]
    kinds = re.compile(r"[\w.]*(Error|Exception|Lost|Disagreement)\b")
    found = [line for line in lines if kinds.match(line)]
    return (found or lines or [""])[-1][:300]


def write(path: Path, backend: str, outcomes: dict[str, str]) -> str:
    """Writes the results; the counts as text."""
    import torch

    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    skips = Counter(one for one in outcomes.values() if one.startswith("skipped"))
    kept = {
        "torch": torch.__version__,
        "backend": backend,
        "ranks": RANKS,
        "counts": dict(sorted(counts.items())),
        "skips": dict(skips.most_common()),
        "outcomes": dict(sorted(outcomes.items())),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return f"{backend}: " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))


if __name__ == "__main__":
    main()
