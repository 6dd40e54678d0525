"""Made-up text: as much as was asked for, the same each time, and with something to learn."""

from collections import Counter
from itertools import pairwise

import pytest

from howdah.base.errors import UserError
from howdah.text.contents import contents
from howdah.text.sources import Data, Source, unreadable
from howdah.text.synthetic import WORDS, _word, documents
from howdah.text.tokens import prepare


def test_the_text_has_the_size_and_is_the_same_each_time():
    found = [*documents("synthetic:20kB")]
    assert sum(map(len, found)) == pytest.approx(20_000, abs=9)
    assert found == [*documents("synthetic:20kB")] and len(set(found)) == len(found) > 5


def test_words_are_spelled_apart_and_the_first_is_the_most_frequent():
    spelled = [_word(rank) for rank in range(WORDS)]
    assert len(set(spelled)) == WORDS and max(map(len, spelled)) == 3
    words = Counter(w for text in documents("synthetic:300kB") for w in text.split())
    assert words.most_common(1)[0][0] == spelled[0]


def test_half_of_all_words_follow_from_the_one_before():
    pairs, firsts = Counter(), Counter()
    for text in documents("synthetic:300kB"):
        words = text.split()
        pairs.update(pairwise(words))
        firsts.update(words[:-1])
    common = [word for word, _ in firsts.most_common(20)]
    best = [max(n for (a, _), n in pairs.items() if a == word) / firsts[word] for word in common]
    assert 0.45 < sum(best) / len(best) < 0.65


def test_a_run_takes_it_as_a_source(tmp_path):
    data = Data(sources=(Source("synthetic:30kB"),))
    assert unreadable(data) == []
    made = prepare(data, vocab=400, cache=tmp_path, say=print, check=True)
    assert made.documents > 10 and len(made.sources[0].ids) > 5000
    assert contents(data.sources[0]) != contents(Source("synthetic:40kB"))


@pytest.mark.parametrize(
    "path", ["synthetic:many", "synthetic:3B", "synthetic:9e9TB", "synthetic:"]
)
def test_a_size_that_is_none_is_told(path):
    with pytest.raises(UserError, match="synthetic"):
        next(documents(path))
