"""Parallel equals single on conversations: answers have 1 to 30 tokens, so micro-batches and ranks
have uneven numbers of labels, and some have none. The loss is the sum over all trained tokens of
the global batch, divided once by their number.

In float64 against plain PyTorch on one device; and whole fine-tunings beside transformers.
"""

import json
from dataclasses import replace

import pytest
import torch
from made_chats import make_folder, turns, write_rows
from small_cases import FORMS, case_of, prove
from small_runs import copy_until, losses, train_on
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import howdah
from howdah.base.errors import UserError
from howdah.cli.commands import app
from howdah.config.recipe import Machine, load_run, resolve_run
from howdah.plan.batch import MASKED
from howdah.text.batches import Rows, micros, order_of
from howdah.text.sources import Data, Source
from howdah.text.tokens import prepare
from howdah.verify.case import corpus_of

SLOW = pytest.mark.slow
SEQUENCE = 48


def conversations(count):
    """Rows of very different lengths of questions and answers."""
    for n in range(count):
        asked = f"What follows {n}?" + " Think well." * (n % 3 == 0)
        told = "yes" if n % 4 == 0 else f"{n + 1} follows {n}" + ", and so on" * (n % 7)
        more = ("And then?", f"{n + 2}") if n % 5 == 0 else ()
        yield {"messages": turns(asked, told, *more)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    path = write_rows(folder / "rows.jsonl", conversations(80))
    tokenizer = str(make_folder(folder / "llama", "llama"))
    return Data((Source(str(path)),), sequence_length=SEQUENCE, tokenizer=tokenizer, chat="answers")


def chat_case(layout, data, cache):
    """The case of a layout whose batches are rows of conversations."""
    shape = replace(FORMS["laptop"], vocab=360, context=SEQUENCE)
    return replace(case_of(layout), shape=shape, sequence=SEQUENCE, text=(data, cache))


def test_ranks_have_uneven_numbers_of_labels(data, cache):
    case = chat_case("dp2 x3", data, cache)
    corpus = corpus_of(case)
    order = order_of(corpus, sequence=SEQUENCE, seed=case.seed)
    counts = [
        int((micro.labels != MASKED).sum())
        for replica in range(2)
        for micro in micros(corpus, order, Rows(2, 2, replica), first=0, size=case.samples)
    ]
    assert len(set(counts)) == len(counts) == 6 and max(counts) > 2 * min(counts) > 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        *("dp2 x3", "pp2 x2", "cp2 x2", "tp2 sp x2"),
        *(pytest.param(one, marks=SLOW) for one in ("dp3 x1", "dp2 zero2 x2", "dp2 zero3 x2")),
        *(pytest.param(one, marks=SLOW) for one in ("tp2 x1", "dp2 cp2 x2", "pp2 dp2 x3")),
        *(pytest.param(one, marks=SLOW) for one in ("dp2 tp2 sp x2", "pp2 tp2 x2")),
    ],
)
def test_every_layout_equals_one_device(workers, data, cache, layout):
    """Of one layout a wrong count is seen to be noticed."""
    controls = layout == "dp3 x1"
    verdict = prove(chat_case(layout, data, cache), workers, controls=controls)
    assert not controls or dict(verdict.controls)["a wrong count"]


@pytest.mark.slow
def test_rows_of_one_conversation_equal_one_device(workers, data, cache):
    case = chat_case("dp2 x2", replace(data, rows="padded"), cache)
    prove(case, workers, controls=True)


@pytest.mark.slow
def test_a_run_goes_on_with_the_next_row(workers, data, make_job, tmp_path):
    """Its last ten steps again, on two ranks, have the losses that they had."""
    more = ["data.chat=answers", f"data.tokenizer={data.tokenizer}", "model.vocab=360"]
    more += [f"data.sources={data.sources[0].path}", "data.sequence_length=32"]
    train_on(workers, make_job("a", *more))
    copy_until(tmp_path / "a", tmp_path / "b", 10)
    train_on(workers, make_job("b", *more, "layout=dp2"))
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-6)


# -- beside transformers -------------------------------------------------------

RECIPE = """
init_from = "{model}"
seed = 1
threads = 1

[data]
sources = ["{rows}"]
chat = "answers"
rows = "{how}"
sequence_length = 48
validation_share = 0.1

[batch]
global_batch = 4

[method]
grad_clip = 1.0

[method.lr]
peak = 3e-3
schedule = "constant"
warmup_steps = 0

[method.optimizer]
weight_decay = 0.0

[train]
steps = 6
log_every = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of transformers' with random weights, a tokenizer and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = make_folder(tmp_path_factory.mktemp("hub") / "model", "chatml")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = LlamaConfig(
        vocab_size=384, max_position_embeddings=64, eos_token_id=2, **sizes, **heads
    )
    LlamaForCausalLM(settings).save_pretrained(folder)
    return folder


def plain_losses(folder, job):
    """A plain loop with transformers over the rows that the run reads: -100 where no answer is.
    Of packed rows each conversation is computed alone, which is what a document mask means.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0}  # the run's own
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, **settings)
    corpus = prepare(job.data, vocab=job.shape.vocab, cache=job.cache, say=print)
    order = order_of(corpus, sequence=job.data.sequence_length, seed=job.seed)
    for step in range(job.train.steps):
        (batch,) = micros(corpus, order, Rows(4), first=4 * step, size=4)
        total, count = torch.zeros(()), int((batch.labels != MASKED).sum())
        for tokens, labels, places in zip(batch.tokens, batch.labels, batch.documents, strict=True):
            for place in range(places.max() + 1):
                here = places == place
                logits = model(torch.from_numpy(tokens[here])[None]).logits[0]
                wanted = torch.from_numpy(labels[here])
                total = total + cross_entropy(logits, wanted, reduction="sum", ignore_index=MASKED)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item() / count


@pytest.mark.slow
@pytest.mark.parametrize("how", ["packed", "padded"])
def test_fine_tuning_has_the_losses_of_a_plain_loop_with_transformers(
    workers, model, cache, tmp_path, how
):
    rows = write_rows(tmp_path / "rows.jsonl", conversations(60))
    recipe = tmp_path / "fine.toml"
    recipe.write_text(RECIPE.format(model=model, rows=rows, how=how))
    wanted = None
    for layout in ("dp2", "tp2", "pp2 x2"):
        machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=cache)
        folder = tmp_path / layout.replace(" ", "-")
        run = load_run(recipe, [f"layout={layout}", f"folder={folder}"])
        job = resolve_run(run, machine)
        train_on(workers, job)
        wanted = wanted or list(plain_losses(model, job))
        found = list(losses(folder).values())
        assert len(found) == len(wanted) == 6 and wanted[-1] < wanted[0]
        assert found == pytest.approx(wanted, rel=1e-6), layout


@pytest.mark.slow
def test_an_export_speaks_as_its_tokenizer_does(workers, model, cache, tmp_path):
    """AutoTokenizer writes conversations with the export as with the folder it came from; and a
    run, its export, and transformers' pipeline give the same answers.
    """
    from transformers import AutoTokenizer
    from transformers import pipeline as theirs

    rows = write_rows(tmp_path / "rows.jsonl", conversations(30))
    recipe = tmp_path / "fine.toml"
    recipe.write_text(RECIPE.format(model=model, rows=rows, how="packed"))
    machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=cache)
    more = [f"folder={tmp_path / 'run'}", "train.export=true", "train.steps=1", "layout=dp2"]
    train_on(workers, resolve_run(load_run(recipe, more), machine))
    both = [AutoTokenizer.from_pretrained(f) for f in (model, tmp_path / "run" / "export")]
    said = [
        one.apply_chat_template(turns("one", "two"), return_assistant_tokens_mask=True)
        for one in both
    ]
    assert said[0]["input_ids"] == said[1]["input_ids"] and sum(said[1]["assistant_masks"]) > 1
    assert said[0]["assistant_masks"] == said[1]["assistant_masks"]
    settings = json.loads((tmp_path / "run" / "export" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == both[0].eos_token_id == both[1].eos_token_id
    asked, how = turns("What follows 3?"), {"max_new_tokens": 5, "do_sample": False}
    folders = [tmp_path / "run", tmp_path / "run" / "export"]
    answers = [howdah.pipeline("text-generation", one)(asked, **how) for one in folders]
    answers.append(theirs("text-generation", str(folders[1]))(asked, **how))
    assert answers[0] == answers[1] == answers[2]
    assert [one["role"] for one in answers[0][0]["generated_text"]] == ["user", "assistant"]
    short = howdah.pipeline("text-generation", folders[0])([asked], return_full_text=False, **how)
    assert short == [[{"generated_text": answers[0][0]["generated_text"][1]["content"]}]]
    words = ["sample", str(folders[0]), "What follows 3?", "--chat", "--length", "5"]
    said = CliRunner().invoke(app, [*words, "--temperature", "0"])
    assert (said.exit_code, said.stdout) == (0, f"{short[0][0]['generated_text']}\n")
    with pytest.raises(UserError, match="message 1 of it has the role 'me'; known are: system, "):
        howdah.pipeline("text-generation", folders[0])([{"role": "me", "content": "a"}])
