"""`howdah.pipeline` beside transformers': the same keys, and the same numbers."""

import pytest
import torch
from their_folders import bert, gpt2, roberta, t5

import howdah
from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.tasks.opened import open_model
from howdah.train.loop import train

transformers = pytest.importorskip("transformers")

PROMPTS = ["the 3 cats", "a dog ran home. said file"]
MASKED = {"bert": "the cats [MASK] on a mat", "roberta": "the cats<mask> on a mat"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for make in (gpt2, bert, roberta, t5):
        found[make.__name__] = str(tmp_path_factory.mktemp(make.__name__))
        make(tmp_path_factory.getbasetemp() / found[make.__name__], transformers)
    return found


def alike(found, expected):
    """Whether two results have the same keys and texts, and numbers to 1e-5."""
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            alike(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            alike(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    else:
        assert found == expected


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "how",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 9, "repetition_penalty": 1.3, "return_full_text": False},
        {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_texts_are_those_of_transformers(folders, how):
    ours = howdah.pipeline("text-generation", folders["gpt2"])
    theirs = transformers.pipeline("text-generation", folders["gpt2"])
    for inputs in (PROMPTS[0], PROMPTS):
        expected = theirs(inputs, do_sample=False, pad_token_id=0, **how)
        alike(ours(inputs, do_sample=False, **how), expected)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("task", "key", "prefix"),
    [
        ("summarization", "summary_text", "sum: "),
        ("translation_en_to_de", "translation_text", "said the "),
        ("translation", "translation_text", ""),
        ("text2text-generation", "generated_text", ""),
    ],
)
def test_answers_are_those_of_generate_behind_the_prefix_of_the_task(folders, task, key, prefix):
    load, folder = transformers.AutoModelForSeq2SeqLM.from_pretrained, folders["t5"]
    words, theirs = transformers.AutoTokenizer.from_pretrained(folder), load(folder).eval()
    ours = howdah.pipeline(task, folder)

    def expected(text, **how):
        read = words(text, return_tensors="pt")
        found = theirs.generate(**read, do_sample=False, **how)
        return [{key: one} for one in words.batch_decode(found, skip_special_tokens=True)]

    how = {"max_new_tokens": 9}
    assert ours(PROMPTS, **how) == [expected(prefix + text, **how)[0] for text in PROMPTS]
    assert [ours(PROMPTS[0], prefix="dog ", **how)] == expected("dog " + PROMPTS[0], **how)
    how |= {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3}
    assert ours(PROMPTS[1], **how) == expected(prefix + PROMPTS[1], **how)
    assert ours(PROMPTS[1], **how)[0] != ours(PROMPTS[1], prefix="dog ", **how)[0]


def test_features_of_an_encoder_decoder_are_those_of_its_encoder(folders):
    words = transformers.AutoTokenizer.from_pretrained(folders["t5"])
    encoder = transformers.T5EncoderModel.from_pretrained(folders["t5"]).eval()
    with torch.no_grad():
        expected = encoder(**words(PROMPTS[0], return_tensors="pt")).last_hidden_state
    alike(howdah.pipeline("feature-extraction", folders["t5"])(PROMPTS[0]), expected.tolist())


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_masked_words_are_those_of_transformers(folders, kind):
    ours = howdah.pipeline("fill-mask", folders[kind])
    theirs = transformers.pipeline("fill-mask", folders[kind])
    text = MASKED[kind]
    mask = "[MASK]" if kind == "bert" else "<mask>"
    for inputs, how in (
        (text, {}),
        ([text, f"a {mask} ran"], {"top_k": 2}),
        (text.replace("cats", mask), {"top_k": 3}),
        (text, {"targets": ["sat"]}),
    ):
        alike(ours(inputs, **how), theirs(inputs, **how))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_features_are_those_of_transformers(folders, kind):
    ours = howdah.pipeline("feature-extraction", folders[kind])
    theirs = transformers.pipeline("feature-extraction", folders[kind])
    alike(ours(PROMPTS[0]), theirs(PROMPTS[0]))
    alike(ours(PROMPTS), theirs(PROMPTS))
    assert (
        ours(PROMPTS[0], return_tensors=True).shape == theirs(PROMPTS[0], return_tensors=True).shape
    )


def test_a_run_writes_texts_that_a_seed_gives_again(make_job, tmp_path):
    train(make_job("a", "train.steps=1"), SingleRank())
    write = howdah.pipeline("text-generation", tmp_path / "a")
    settings = {"max_new_tokens": 5, "seed": 3, "num_return_sequences": 2}
    one, again = (write("8 follows", **settings) for _ in range(2))
    assert one == again and one[0] != one[1]
    assert all(each["generated_text"].startswith("8 follows") for each in one)
    assert write([]) == []


@pytest.mark.parametrize(
    ("task", "kind", "sentence"),
    [
        ("image-classification", "gpt2", "image-classification is declined: howdah's models read"),
        ("sentiment-analysis", "gpt2", "text-classification needs one for labels"),
        ("question-answering", "gpt2", "question-answering is declined"),
        ("summarization", "gpt2", "is a decoder, and summarization needs an encoder-decoder"),
        ("translation_en_to_fr", "bert", "translation_en_to_fr needs an encoder-decoder"),
        ("translation_fr", "t5", "there is no task 'translation_fr'; did you mean 'translation'"),
        ("text-generatoin", "gpt2", "there is no task 'text-generatoin'; did you mean"),
        ("fill-mask", "gpt2", "is a decoder, and fill-mask needs an encoder"),
        ("text-generation", "bert", "is an encoder, and text-generation needs a decoder; use fill"),
        ("text-generation", "t5", "is an encoder-decoder, and text-generation needs a decoder"),
    ],
)
def test_tasks_that_cannot_be_done_are_declined_by_name(folders, task, kind, sentence):
    with pytest.raises(UserError, match=sentence):
        howdah.pipeline(task, folders[kind])


def test_a_folder_of_others_has_no_best_checkpoint(folders):
    with pytest.raises(UserError, match="is no run and has no best checkpoint; leave --best out"):
        open_model(folders["gpt2"], say=print, best=True)


def test_wrong_inputs_and_settings_are_told(folders):
    write = howdah.pipeline("text-generation", folders["gpt2"])
    fill = howdah.pipeline("fill-mask", folders["bert"])
    answer = howdah.pipeline("summarization", folders["t5"])
    for call, sentence in (
        (lambda: write(3), "takes texts, and one is 3"),
        (lambda: write("the " * 40), "context is 32"),
        (lambda: write("a", max_new_token=3), "no setting 'max_new_token'; did you mean"),
        (lambda: fill("a [MASK]", topk=0), "no setting 'topk'; did you mean 'top_k'"),
        (lambda: answer("a", return_full_text=False), "no setting 'return_full_text'"),
        (lambda: answer("the " * 60), "context is 40"),
        (lambda: write("a", num_beams=2), "set do_sample=False"),
        (lambda: write("a", max_new_tokens="3"), "max_new_tokens is '3'; it must be a whole"),
        (lambda: write("a", top_p=True), "top_p is True; it must be a number"),
        (lambda: write("a", early_stopping="now"), "early_stopping is 'now'; it must be True or"),
        (lambda: write("a", num_return_sequences=0), "must be at least 1"),
        (lambda: answer("a", prefix=3), "prefix is 3; give a str"),
        (lambda: fill("a [MASK]", targets=[3]), "targets are words, and one is 3"),
        (lambda: howdah.pipeline("fill-mask", 3), "model is 3; name a run folder"),
        (lambda: howdah.pipeline(3, folders["t5"]), "there is no task '3'"),
        (lambda: howdah.pipeline("fill-mask", folders["bert"], device="meta"), "cannot be used"),
        (lambda: write("a", do_sample=False, num_return_sequences=2), "drawn or searched"),
        (lambda: fill("no mask"), r"has no \[MASK\]"),
        (lambda: fill("a [MASK]", top_k=0), "top_k is 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            call()
