"""DeepSpeed's ZeRO stages 1 and 2 over gloo, with settings that favour it.

    optimizer          torch's fused AdamW, as for everyone; as fast as its own CPU Adam
    reduce_bucket_size one bucket for the whole model: on a CPU its reductions overlap with
                       nothing, and fewer calls are faster
    gradients          travel in float32, as for everyone
    bf16               its own bf16 mode: bf16 weights, float32 masters

Its shared-memory operation is switched off. Training does not use it, but it would be compiled at
the start and leave files behind.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import Any

from cases import Case, method
from howdahs import Place
from peers import Step, adamw, filled, launched, tensors

from howdah.text.batches import Micro

AVAILABLE = importlib.util.find_spec("deepspeed") is not None


def begun(place: Place) -> Any:
    """DeepSpeed's module, when its processes have met."""
    launched(place)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(place.size)}
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def steps_of(engine: Any) -> Step:
    """Whole steps of an engine that accumulates; each returns the mean loss."""

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for micro in micros:
            loss = engine(*tensors(micro))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / len(micros)

    return step


def deepspeed_zero(case: Case, place: Place, *, stage: int) -> Step:
    deepspeed = begun(place)
    module = filled(case)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=adamw(case, module.model), config=_settings(case, place, stage)
    )
    return steps_of(engine)


def _settings(case: Case, place: Place, stage: int) -> dict[str, Any]:
    micro = case.rows // case.micros
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": case.micros,
        "train_batch_size": micro * case.micros * place.size,
        "gradient_clipping": method(case).grad_clip,
        "communication_data_type": "fp32",
        "bf16": {"enabled": case.precision == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500_000_000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
