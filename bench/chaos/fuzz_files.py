"""Files that programs write, changed: checkpoints, weights and tokenizers of others, text.

As in `fuzz_inputs.py`: one function for each kind; nothing but an answer or UserError comes out.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from fuzz_mutations import mutate, mutate_text

from howdah.base.errors import UserError
from howdah.checkpoint.facts import facts
from howdah.checkpoint.folders import best_step, step_folder
from howdah.checkpoint.index import About, encode, merge
from howdah.checkpoint.load import Checkpoint, open_checkpoint
from howdah.checkpoint.safefile import Spec, read_header, write
from howdah.checkpoint.save import write_part
from howdah.draw.measured_step import compare_step, report, to_perfetto, to_svg
from howdah.model.hub import names, read_hub
from howdah.plan.batch import Batch
from howdah.plan.boxes import Piece, whole
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.plan.program import program_of
from howdah.plan.recording import Call, RankTrace, StepTrace
from howdah.plan.trace_file import read_traces, write_trace
from howdah.shapes.huggingface_written import config as hub_config
from howdah.shapes.presets import preset
from howdah.shapes.shape import ModelShape, stated
from howdah.sim.timeline import simulate
from howdah.text import tokenizer as tokenizers
from howdah.text.chats import chat_of
from howdah.text.contents import contents
from howdah.text.sources import Data, Source, documents, documents_of
from howdah.train.resume import as_plain

Ask = Callable[[Random, Path], None]

TINY = ModelShape(layers=2, width=8, heads=2, ffn_size=16, vocab=32, context=16)

# -- checkpoints -----------------------------------------------------------------------


def saved(folder: Path) -> Path:
    """A small checkpoint, written once in a folder."""
    path = step_folder(folder / "checkpoints", 20)
    if path.is_dir():
        return path
    path.mkdir(parents=True)
    shape = (6, 4)
    meta = {
        "model": as_plain(stated(preset("laptop"))),
        "tokenizer": "abc",
        "end": 0,
        "optimizer": "adamw",
        "order": {"seed": 1, "sequence": 8, "samples": [10, 20], "shares": [500, 500]},
        "best_loss": 2.5,
    }
    parts = []
    for rank in range(2):
        piece = Piece("norm.weight", shape, whole(shape), rank * 12, rank * 12 + 12)
        entries = {
            f"{kind}/w@{rank}": (kind, piece, torch.arange(12.0)) for kind in ("weight", "exp_avg")
        }
        file = path / f"rank-{rank:05d}.safetensors"
        parts.append(write_part(file, 20, entries, about=About("run", "dp2", 160, meta)))
    (path / "index.json").write_text(encode(merge(parts)))
    (path / "whole.json").write_text(encode(merge(parts)))
    return path


def index(random: Random, folder: Path) -> None:
    """The index of a checkpoint with its checksum made right again; then everything is read."""
    path = saved(folder)
    fields = json.loads((path / "whole.json").read_text())
    mutate(random, fields)
    fields = json.loads(json.dumps(fields, default=str))
    if random.random() < 0.9:
        fields.pop("crc32", None)
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        fields["crc32"] = zlib.crc32(text.encode())
    (path / "index.json").write_text(json.dumps(fields))
    checkpoint = open_checkpoint(path)
    if problems := checkpoint.verify():
        raise UserError(problems[0])
    _read_all(checkpoint)


def _read_all(checkpoint: Checkpoint) -> None:
    facts(checkpoint)
    for kind in checkpoint.kinds:
        for name in checkpoint.names(kind):
            checkpoint.tensor(kind, name)


def header(random: Random, folder: Path) -> None:
    """The header of a safetensors file."""
    content = (saved(folder) / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    table, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if random.random() < 0.3:
        head = mutate_text(random, content[8 : 8 + length])
    else:
        mutate(random, table)
        head = json.dumps(table, default=str).encode()
    size = random.choice([len(head)] * 8 + [0, 2**63])
    file = folder / "header.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + head + data)
    read_header(file)


def best(random: Random, folder: Path) -> None:
    """The mark of the best checkpoint."""
    table = {"step": 20}
    mutate(random, table)
    text = json.dumps(table, default=str).encode()
    text = mutate_text(random, text) if random.random() < 0.3 else text
    (folder / "best.json").write_bytes(text)
    best_step(folder)


# -- traces ----------------------------------------------------------------------------


def trace(random: Random, folder: Path) -> None:
    """What a rank did in its last steps, compared, drawn and traced as `howdah trace` does."""
    plan = _measured(folder)
    file = folder / "trace" / "rank-1.json"
    content = (folder / "trace.whole").read_bytes()
    if random.random() < 0.3:
        file.write_bytes(mutate_text(random, content))
    else:
        fields = json.loads(content)
        mutate(random, fields)
        file.write_text(json.dumps(fields, default=str))
    found = compare_step(plan, read_traces(file.parent, str(plan.layout), plan.layout.world))
    to_svg(found)
    to_perfetto(found)
    for _ in report(found, str(plan.layout)):
        pass


def _measured(folder: Path) -> Plan:
    """A small plan, whose trace are written once in a folder."""
    layout = resolve(parse_layout("pp2 1f1b x4"), None)
    plan = make_plan(TINY, layout, Batch(micro_batch=1), sequence=8, method=Method())
    if not (folder / "trace.whole").exists():
        call = Call("pp", "send", 1024, 0.25, 0.5)
        for rank, spans in enumerate(simulate(program_of(plan)).spans):
            steps = [StepTrace(number, 100.0 + number, [*spans], [call]) for number in range(3)]
            write_trace(folder / "trace", rank, RankTrace(str(layout), "here", steps))
        (folder / "trace.whole").write_bytes((folder / "trace" / "rank-1.json").read_bytes())
    return plan


# -- folders of Hugging Face -----------------------------------------------------------


def hub(random: Random, folder: Path) -> None:
    """A folder with weights: its config.json, the list of its files, or their headers changed."""
    there = _hub_folder(folder)
    table = json.loads((folder / "config.whole").read_text())
    places = {"weight_map": dict.fromkeys(_names(there), "model.safetensors")}
    content = (folder / "model.whole").read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    which = random.randrange(3)
    mutate(random, (table, places, head)[which])
    (there / "config.json").write_text(json.dumps(table, default=str))
    text = json.dumps(head, default=str).encode()
    file = there / ("model.safetensors" if which != 1 else "part.safetensors")
    for old in there.glob("*.safetensors"):
        old.unlink()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    (there / "model.safetensors.index.json").write_text(json.dumps(places, default=str))
    shape, tensor = read_hub(there)
    for theirs in names(shape):
        for name in theirs.ours:
            tensor(name)


def _names(there: Path) -> list[str]:
    return [theirs.name for theirs in names(TINY)]


def _hub_folder(folder: Path) -> Path:
    """A folder of a tiny model, written once."""
    there = folder / "hub"
    if not there.is_dir():
        there.mkdir()
        specs = [Spec(theirs.name, theirs.shape, torch.float32) for theirs in names(TINY)]
        tensors = [torch.zeros(spec.shape) for spec in specs]
        write(folder / "model.whole", specs, tensors=tensors, metadata={"format": "pt"})
        table = hub_config(TINY, end=0, dtype="float32")
        (folder / "config.whole").write_text(json.dumps(table))
    return there


# -- text ------------------------------------------------------------------------------


def text(random: Random, folder: Path) -> None:
    """Text of every kind, whose documents are read."""
    lines = [json.dumps({"text": "é one\n", "n": n}) for n in range(5)]
    content = mutate_text(random, "\n".join(lines).encode())
    endings = (".txt", ".jsonl", ".jsonl.gz", ".parquet", ".json.gz", ".json", ".csv", ".tsv")
    ending = random.choice(endings)
    if ending.endswith(".gz"):
        content = gzip.compress(content)
        content = content if random.random() < 0.5 else mutate_text(random, content)
    inside = folder / "text"
    inside.mkdir(exist_ok=True)
    for old in inside.iterdir():
        old.unlink()
    (inside / f"a{ending}").write_bytes(content)
    if random.random() < 0.1:
        (inside / "b.txt").symlink_to(random.choice(["b.txt", "nowhere", "x" * 300, "/dev/zero"]))
    path = random.choice([inside, inside / f"a{ending}"])
    source = Source(str(path), field=random.choice(["text", "text", "n", ""]))
    contents(source)
    for _ in documents(source, random.choice(["skip", "stop"])):
        pass


def tokenizer(random: Random, folder: Path) -> None:
    """A tokenizer.json, loaded, asked for its end, and used."""
    whole_file, file = folder / "tokenizer.whole", folder / "tokenizer.json"
    if not whole_file.exists():
        whole_file.write_text(tokenizers.train(["a few words, a few more"], 300).to_str())
    if random.random() < 0.3:
        file.write_bytes(mutate_text(random, whole_file.read_bytes()))
    else:
        table = json.loads(whole_file.read_text())
        table["model"] |= {"vocab": dict([*table["model"]["vocab"].items()][:20]), "merges": []}
        mutate(random, table)
        file.write_text(json.dumps(table, default=str))
    tokenizers.fingerprint(file)
    found = tokenizers.load(tokenizers.find(str(file)))
    tokenizers.end_of(found, str(file))
    tokenizers.require_fits(tokenizers.entries(found), 300, str(file))
    tokenizers.encode(found, ["a few words", "é 日 \n"])


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% set n = namespace(a=messages | length) %}{{ n.a if n.a > 1 else '' }}"
)
ASKED, TOLD = {"role": "user", "content": "a few"}, {"role": "assistant", "content": "words"}
CHATS: list[dict[str, object]] = [
    {"messages": [{"role": "system", "content": "é"}, ASKED, TOLD], "tools": [{"name": "f"}]},
    {"prompt": [ASKED], "completion": [TOLD]},
    {"prompt": "a few", "response": "words"},
    {"instruction": "a few", "input": "more", "output": "words"},
]


def chats(random: Random, folder: Path) -> None:
    """Rows of conversations, a chat template and what a tokenizer's folder says, all read."""
    if not (folder / "tokenizer.json").exists():
        made = tokenizers.train(["a few words, a few more"], 300)
        (folder / "tokenizer.json").write_text(made.to_str())
    row, config = json.loads(json.dumps(random.choice(CHATS))), {"eos_token": "<|end|>"}
    template = CHAT_TEMPLATE.encode()
    for turn in range(random.choice([0, 1, 1, 2])):
        what = (random.randrange(3) + turn) % 3
        if what == 0:
            mutate(random, row)
        elif what == 1:
            mutate(random, config)
        else:
            template = mutate_text(random, template)
    (folder / "chat_template.jinja").write_bytes(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, default=str))
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row, default=str))
    data = Data((Source(str(rows)),), tokenizer=str(folder), chat=random.choice(["answers", "all"]))
    made = chat_of(data)
    for one in documents_of(data.sources[0], data, lambda sentence: None):
        made(one)


KINDS: dict[str, Ask] = {
    ask.__name__: ask for ask in (index, header, best, trace, hub, text, tokenizer, chats)
}
