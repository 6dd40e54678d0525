"""Sampling: the cache changes nothing, the draws are the distribution, the text is whole, and texts
that are drawn together are those that are drawn alone.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from howdah.base.errors import UserError
from howdah.generate.draw import GREEDY, Draw, Repeated, choose, listed, uniform
from howdah.generate.predictor import OneDevice, padded
from howdah.generate.rows import generate, generate_rows
from howdah.generate.texts import decode, sample_text
from howdah.model.attention import Cache
from howdah.model.transformer import Transformer
from howdah.shapes.shape import Experts, Latent, ModelShape, RopeScaling
from howdah.shapes.weights import weights

ROTARY = ModelShape(layers=2, width=16, heads=4, kv_heads=2, ffn_size=24, vocab=257, context=24)
LEARNED = replace(
    ROTARY, kv_heads=None, norm="layernorm", positions="learned", bias=True, feedforward="gelu"
)
QUERY_KEY_NORM = replace(ROTARY, qk_norm=True, head_size=6, tie_embeddings=True)
SHAPES = {"rotary": ROTARY, "learned": LEARNED, "query-key norm": QUERY_KEY_NORM}
PROMPT = [0, 5, 17, 3]


def random_model(shape, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    tensors = {
        weight.name: (weight.mean + 0.3 * torch.randn(weight.shape, generator=draw)).to(dtype)
        for weight in weights(shape)
    }
    with torch.device("meta"):
        model = Transformer(shape)
    model.load_state_dict(tensors, assign=True)
    return model


def next_logits(model, tokens, *, start, cache):
    """The logits [V] behind `tokens`, the first of which is at position `start`."""
    positions = torch.arange(start, start + len(tokens))[None]
    return OneDevice(model).next_logits(torch.tensor([tokens]), positions, cache)[0]


def whole_logits(model, tokens):
    """The logits after the last token, computed from all tokens at once."""
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        return model.logits(hidden)[0, -1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("first", [1, 4, 24])
def test_cached_logits_equal_uncached_ones(shape, first):
    model, cache = random_model(shape), Cache()
    tokens = torch.randint(0, 257, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = next_logits(model, tokens[:first], start=0, cache=cache)
    torch.testing.assert_close(logits, whole_logits(model, tokens[:first]), rtol=0, atol=1e-10)
    for place in range(first, len(tokens)):
        logits = next_logits(model, [tokens[place]], start=place, cache=cache)
        expected = whole_logits(model, tokens[: place + 1])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_is_the_likeliest_token_each_time(shape):
    model, tokens = random_model(shape), list(PROMPT)
    for token in generate(OneDevice(model), PROMPT, length=8, draw=GREEDY, ends=()):
        assert token == whole_logits(model, tokens).argmax()
        tokens.append(token)
    assert len(tokens) == len(PROMPT) + 8


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    model = random_model(ROTARY)
    one, again, other = (
        list(generate(OneDevice(model), PROMPT, length=12, draw=Draw(seed=seed), ends=()))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_text_that_was_cut_continues_as_it_would_have():
    model, draw = random_model(ROTARY), Draw(seed=3)
    whole = list(generate(OneDevice(model), PROMPT, length=12, draw=draw, ends=()))
    rest = generate(OneDevice(model), PROMPT + whole[:5], length=7, draw=draw, ends=())
    assert whole[:5] + list(rest) == whole


@pytest.mark.parametrize("shape", [ROTARY, LEARNED], ids=["rotary", "learned"])
def test_text_stops_at_the_context(shape):
    model = random_model(shape)
    found = list(generate(OneDevice(model), PROMPT, length=1000, draw=Draw(), ends=()))
    assert len(found) == shape.context - len(PROMPT)
    assert not list(generate(OneDevice(model), [1] * shape.context, length=5, draw=Draw(), ends=()))


def test_text_stops_before_the_end_token():
    model = random_model(ROTARY)
    found = list(generate(OneDevice(model), PROMPT, length=10, draw=GREEDY, ends=()))
    end = found[4]
    assert (
        list(generate(OneDevice(model), PROMPT, length=10, draw=GREEDY, ends=[end]))
        == (found[: found.index(end)])
    )


def test_gradients_are_off_inside_and_untouched_outside():
    model = random_model(ROTARY)
    for _ in generate(OneDevice(model), PROMPT, length=2, draw=Draw(), ends=()):
        assert torch.is_grad_enabled()
    assert not next_logits(model, PROMPT, start=0, cache=Cache()).requires_grad


# -- several prompts -----------------------------------------------------------

PROMPTS = [[0, 5, 17, 3], [9], [200, 4, 4, 31, 8, 8, 100], [3, 1], [7] * 24]
DYNAMIC = RopeScaling(factor=4.0, context=4, kind="dynamic")
FAMILIES = SHAPES | {
    "alibi": replace(LEARNED, positions="alibi", embedding_norm=True, tie_embeddings=True),
    "experts": replace(ROTARY, experts=Experts(count=4, top_k=2, ffn_size=8)),
    "latent": replace(
        ROTARY,
        kv_heads=None,
        latent=Latent(kv_rank=8, query_rank=12, qk_nope_size=4, qk_rope_size=4, v_size=6),
    ),
    "dynamic": replace(ROTARY, rope_scaling=DYNAMIC),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("draw", [GREEDY, Draw(seed=2, repetition_penalty=1.3)], ids=["", "drawn"])
def test_prompts_of_different_length_together_are_each_alone(shape, draw):
    """Texts end at tokens of their own, so that rows leave the batch one after the other."""
    model = OneDevice(random_model(shape))
    alone = [[*generate(model, p, length=12, draw=draw, ends=())] for p in PROMPTS]
    ends = {alone[0][3], alone[2][7]}
    alone = [[*generate(model, p, length=12, draw=draw, ends=ends)] for p in PROMPTS]
    assert len({len(text) for text in alone}) >= 3 and alone[4] == []
    steps = generate_rows(model, PROMPTS, length=12, draw=draw, ends=ends)
    assert listed(steps, len(PROMPTS)) == alone


def test_padding_changes_no_logit():
    model, prompts = OneDevice(random_model(LEARNED)), PROMPTS[:4]
    together = model.next_logits(*padded(prompts, torch.device("cpu")))
    for row, prompt in zip(together, prompts, strict=True):
        expected = whole_logits(model.model, prompt)
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-10)


def test_the_room_of_the_cache_grows_and_rows_are_kept_in_any_order():
    draw, cache, whole = torch.Generator().manual_seed(0), Cache(), []
    for size in (5, 1, 1, 1, 1, 1, 1):
        whole.append(torch.randn(3, 2, size, 4, generator=draw))
        found, _ = cache.extend("0", whole[-1], whole[-1])
    assert torch.equal(found, torch.cat(whole, 2)) and cache.length == 11
    cache.keep(torch.tensor([2, 0, 2]))
    more = torch.zeros(3, 2, 1, 4)
    assert torch.equal(cache.extend("0", more, more)[1], torch.cat([found[[2, 0, 2]], more], 2))


def test_a_repeated_token_is_less_likely_whatever_its_sign():
    """Keskar et al. divide logits above 0, and multiply those below."""
    repeated = Repeated([[1, 1], [0, 2]], vocab=3, penalty=2.0)
    scores = torch.tensor([[4.0, 6.0, -2.0], [4.0, 6.0, -2.0]])
    assert repeated.lower(scores).tolist() == [[4, 3, -2], [2, 6, -4]]
    repeated.add([2, 1])
    assert repeated.lower(scores).tolist() == [[4, 3, -4], [2, 3, -4]]
    repeated.keep(torch.tensor([1]))
    assert repeated.lower(scores[:1]).tolist() == [[2, 3, -4]]


# -- the draw ------------------------------------------------------------------

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])


def shares_of(draw, count=4000):
    found = Counter(choose(LOGITS, replace(draw, seed=seed), place=7) for seed in range(count))
    return torch.tensor([found[token] / count for token in range(len(LOGITS))])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_have_the_softmax_distribution(temperature):
    found = shares_of(Draw(temperature=temperature))
    assert (found - (LOGITS / temperature).softmax(0)).abs().max() < 0.035


def test_a_cold_draw_is_the_greedy_one():
    assert {choose(LOGITS, Draw(temperature=1e-30, seed=s), place=0) for s in range(50)} == {1}
    assert choose(LOGITS, GREEDY, place=0) == 1


def test_top_k_keeps_the_likeliest():
    found = shares_of(Draw(top_k=2), 1000)
    expected = torch.zeros(5)
    expected[[1, 3]] = LOGITS[[1, 3]].softmax(0)
    assert (found - expected).abs().max() < 0.06
    assert (found == 0).tolist() == [True, False, True, False, True]
    assert choose(LOGITS, Draw(top_k=100, seed=1), place=2) == choose(LOGITS, Draw(seed=1), place=2)


def test_top_p_keeps_the_fewest_that_reach_it():
    shares = LOGITS.softmax(0)  # 0.13 0.56 0.03 0.21 0.08
    for top_p, kept in (
        (0.1, {1}),
        (0.5, {1}),
        (0.6, {1, 3}),
        (0.8, {1, 3, 0}),
        (1.0, set(range(5))),
    ):
        found = shares_of(Draw(top_p=top_p), 1000)
        assert set(found.nonzero().flatten().tolist()) == kept
        assert shares[list(kept)].sum() >= top_p - 1e-6


def test_top_p_that_is_reached_exactly_keeps_no_more():
    even = torch.zeros(4)
    kept = {choose(even, Draw(top_p=0.5, seed=seed), place=0) for seed in range(100)}
    assert kept == {0, 1}


def test_top_p_counts_what_top_k_has_left():
    """Of the two likeliest, the first has 0.73; of all, 0.56."""
    assert set(shares_of(Draw(top_k=2, top_p=0.7), 300).nonzero().flatten().tolist()) == {1}


def test_uniform_numbers_are_even_and_their_own_for_each_place():
    found = torch.tensor([uniform(1, place) for place in range(2000)])
    assert ((found >= 0) & (found < 1)).all()
    assert abs(found.mean() - 0.5) < 4 * (1 / 12 / 2000) ** 0.5
    assert len(found.unique()) == 2000
    assert uniform(1, 5) != uniform(2, 5)


# -- sentences -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "changes", "sentence"),
    [
        ([], {}, "nothing to continue"),
        ([1] * 25, {}, "25 tokens.*24"),
        ([1, 257], {}, "token 257"),
        ([-1, 3], {}, "token -1"),
        ([1], {"length": -1}, "length is -1"),
        ([1], {"draw": Draw(temperature=-0.1)}, "temperature is -0.1"),
        ([1], {"draw": Draw(temperature=float("nan"))}, "temperature is nan"),
        ([1], {"draw": Draw(top_k=-1)}, "top_k is -1"),
        ([1], {"draw": Draw(top_p=0)}, "top_p is 0"),
        ([1], {"draw": Draw(top_p=1.5)}, "top_p is 1.5"),
        ([1], {"draw": Draw(repetition_penalty=0)}, "repetition_penalty is 0"),
    ],
)
def test_what_cannot_be_sampled_is_said_at_once(tokens, changes, sentence):
    arguments = {"length": 5, "draw": Draw(), "ends": ()} | changes
    with pytest.raises(UserError, match=sentence):
        generate(OneDevice(random_model(ROTARY)), tokens, **arguments)


# -- text ----------------------------------------------------------------------


def byte_tokenizer():
    """Token 0 ends a document; the others are the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_pieces_are_whole_characters_and_join_to_the_text():
    tokenizer, text = byte_tokenizer(), "a é 🦊🦊\n  end"
    pieces = list(decode(tokenizer, tokenizer.encode(text).ids))
    assert pieces == list(text)


def test_a_character_that_never_ends_is_shown_at_the_end():
    tokenizer = byte_tokenizer()
    pieces = list(decode(tokenizer, tokenizer.encode("ab🦊").ids[:-1]))
    assert pieces[:2] == ["a", "b"] and set(pieces[2]) == {"\ufffd"}
    assert list(decode(tokenizer, [])) == []


def test_pieces_keep_the_spaces_of_decoders_that_strip_the_first():
    """As SentencePiece's do: decoded alone, "▁b" is "b"."""
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "c": 2}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert "".join(decode(tokenizer, [0, 1, 2, 1])) == "a bc b"


def test_sample_text_starts_a_document_and_continues_the_prompt():
    model, tokenizer = random_model(ROTARY), byte_tokenizer()
    tokens = [0, *tokenizer.encode("hi").ids]
    expected = list(generate(OneDevice(model), tokens, length=6, draw=GREEDY, ends=[0]))
    pieces = sample_text(OneDevice(model), tokenizer, "hi", length=6, draw=GREEDY, end=0)
    assert "".join(pieces) == tokenizer.decode(expected)
    assert expected


def test_a_prompt_of_an_ascii_terminal_is_the_text_it_was():
    """Python hides its bytes in surrogates, which the tokenizer refused with a TypeError."""
    model, tokenizer = random_model(ROTARY), byte_tokenizer()
    there, here = (
        "".join(sample_text(OneDevice(model), tokenizer, words, length=6, draw=GREEDY, end=0))
        for words in ("é".encode().decode("ascii", "surrogateescape"), "é")
    )
    assert there == here


@pytest.mark.parametrize("prompt", [b"caf\xe9".decode("ascii", "surrogateescape"), "\ud800"])
def test_a_prompt_that_is_no_text_is_refused(prompt):
    with pytest.raises(UserError, match="the prompt is not UTF-8"):
        sample_text(
            OneDevice(random_model(ROTARY)),
            byte_tokenizer(),
            prompt,
            length=6,
            draw=GREEDY,
            end=0,
        )
