"""G: the same model and batch by others, on the same card: transformers, torchtitan, a loop.

Nothing is downloaded: models have random weights, tokens are random. Who does not import is left
out, and the row says why. transformers and the loop keep float32 weights and compute in bf16, as
howdah does; all take torch's fused AdamW. torchtitan's model has an own head, so it has more
weights.
"""

import gc
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import torch
from rows import Place, Report, Unavailable
from speed import LENGTH, RUNS, small, speed

ROWS_OF_BATCH, WARM, TIMED = 8, 4, 8
PEER = ("tokens/s", "step ms", "micro-batch", "allocated", "version")
ROWS = {
    "howdah": PEER,
    "transformers, eager": PEER,
    "transformers, compiled": PEER,
    "transformers, Liger": PEER,
    "torchtitan, compiled": PEER,
    "linear_cross_entropy loop": PEER,
}


def measure(place: Place, report: Report) -> None:
    report.measure("howdah", partial(howdah, place))
    report.measure("transformers, compiled", partial(trainer, place, torch_compile=True))
    report.measure("transformers, eager", partial(trainer, place))
    report.measure("transformers, Liger", partial(liger, place))
    report.measure("torchtitan, compiled", partial(torchtitan, place))
    report.measure("linear_cross_entropy loop", partial(loop, place))


def howdah(place: Place) -> dict[str, Any]:
    found = speed(place, RUNS["1b"], 0.0)
    told = {name: found[name] for name in ("tokens/s", "step ms", "allocated")}
    return told | {"micro-batch": place.pick(ROWS_OF_BATCH, 1), "version": ""}


def row(place: Place, seconds: float, package: str, micro: int = 0) -> dict[str, Any]:
    """A row; `micro` rows at once, all of the batch unless it is given."""
    tokens = place.pick(ROWS_OF_BATCH * LENGTH, 16)
    return {
        "tokens/s": tokens / seconds,
        "step ms": 1e3 * seconds,
        "micro-batch": micro or place.pick(ROWS_OF_BATCH, 1),
        "allocated": None if place.cpu else torch.cuda.max_memory_allocated(place.device),
        "version": installed(package),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of a folder"


def imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} does not import: {error}") from None


def timed(place: Place, step: Callable[[], object]) -> float:
    """Mean seconds of a step, after some that warm up; peaks of memory begin then."""
    for _ in range(place.pick(WARM, 1)):
        step()
    begin(place)
    began, count = perf_counter(), place.pick(TIMED, 1)
    for _ in range(count):
        step()
    place.sync()
    return (perf_counter() - began) / count


def begin(place: Place) -> None:
    place.sync()
    if not place.cpu:
        torch.cuda.reset_peak_memory_stats(place.device)


def tokens(place: Place, vocab: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    rows, length = place.pick((ROWS_OF_BATCH, LENGTH), (1, 16))
    return torch.randint(0, vocab, (rows, length), generator=draw)


def llama(place: Place) -> Any:
    """transformers' model of the same sizes."""
    transformers = imported("transformers")
    shape = place.pick(RUNS["1b"].shape, small(RUNS["1b"].shape))
    sizes = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size or shape.width // shape.heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(place.device):
        return transformers.LlamaForCausalLM(sizes)


def trainer(place: Place, **switches: Any) -> dict[str, Any]:
    """transformers' Trainer, with its switches for speed, and the largest micro-batch that fits."""
    for micro in place.pick((8, 4, 2), (1,)):
        with suppress(torch.OutOfMemoryError):
            return row(place, trained(place, micro, switches), "transformers", micro)
        gc.collect()
        torch.cuda.empty_cache()
    raise Unavailable("not even two rows at once fit in the memory of the card")


def trained(place: Place, micro: int, switches: dict[str, Any]) -> float:
    """Seconds of a step of the Trainer."""
    transformers, model = imported("transformers"), llama(place)
    sample = tokens(place, model.config.vocab_size)
    warm, timed_ = place.pick((WARM, TIMED), (1, 1))
    marks: list[float] = []

    class Marks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == warm:
                begin(place)
            if state.global_step in (warm, warm + timed_):
                place.sync()
                marks.append(perf_counter())

    rows = [{"input_ids": line, "labels": line} for line in sample] * (warm + timed_)
    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=warm + timed_,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=len(sample) // micro,
            bf16=True,
            optim=place.pick("adamw_torch_fused", "adamw_torch"),
            use_cpu=place.cpu,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=not place.cpu,
            torch_compile_backend=place.pick("inductor", "eager")
            if switches.get("torch_compile")
            else None,
            **switches,
        )
        transformers.Trainer(
            model=model, args=given, train_dataset=rows, callbacks=[Marks()]
        ).train()
    return (marks[1] - marks[0]) / timed_


def liger(place: Place) -> dict[str, Any]:
    imported("liger_kernel")
    if place.cpu:
        raise Unavailable("its kernels are for GPUs")
    return trainer(place, use_liger_kernel=True)


def torchtitan(place: Place) -> dict[str, Any]:
    """torchtitan 0.2's model, each block compiled, in a loop of our own."""
    args = imported("torchtitan.models.llama3.model.args").TransformerModelArgs
    model = imported("torchtitan.models.llama3.model.model").Transformer
    shape = place.pick(RUNS["1b"].shape, small(RUNS["1b"].shape))
    sizes = args(
        dim=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_seq_len=LENGTH,
        multiple_of=shape.ffn_size,  # of 8/3 of the width: the next multiple is ffn_size
        rope_theta=500000,
    )
    with torch.device(place.device):
        net = model(sizes)
        net.init_weights()
    for block in net.layers.values():
        block.compile(backend=place.pick("inductor", "eager"), fullgraph=True)
    ids = tokens(place, shape.vocab).to(place.device)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), ids.flatten())

    return row(place, timed(place, step_of(place, net, loss)), "torchtitan")


def loop(place: Place) -> dict[str, Any]:
    """transformers' blocks, compiled, and torch's fused head and loss."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy")
    net = llama(place)
    ids = tokens(place, net.config.vocab_size).to(place.device)
    for block in net.model.layers:
        block.compile(backend=place.pick("inductor", "eager"))

    def loss() -> torch.Tensor:
        hidden = net.model(ids).last_hidden_state.flatten(0, 1)
        head = net.lm_head.weight.to(hidden.dtype)
        return torch.nn.functional.linear_cross_entropy(hidden, head, ids.flatten())

    return row(place, timed(place, step_of(place, net, loss)), "transformers")


def step_of(
    place: Place, net: torch.nn.Module, loss: Callable[[], torch.Tensor]
) -> Callable[[], None]:
    """A training step: bf16 by autocast, clipped, fused AdamW."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    bf16: Callable[[], AbstractContextManager[Any]] = partial(
        torch.autocast, place.device.type, dtype=torch.bfloat16
    )

    def step() -> None:
        with bf16():
            total = loss()
        total.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
