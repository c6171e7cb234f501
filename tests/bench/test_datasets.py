"""What is asked for: lengths, sharing, files, and that a seed means the same prompts again."""

import json

import numpy as np
import pytest

from detour.bench.datasets import (
    Vocabulary,
    custom_prompts,
    random_prompts,
    shared_prefix_prompts,
    sharegpt_prompts,
)
from detour.errors import BadRequest

IDS = Vocabulary(1000, True)
TEXT = Vocabulary(1000, False)


def rng():
    return np.random.default_rng(7)


def test_random_lengths_fill_the_range_and_no_more():
    prompts = random_prompts(IDS, rng(), 400, 100, 20, 0.5)
    lengths = {len(prompt.ids) for prompt in prompts}
    assert min(lengths) == 50 and max(lengths) == 100
    outputs = {prompt.output_tokens for prompt in prompts}
    assert outputs == set(range(10, 21))
    exact = random_prompts(IDS, rng(), 10, 100, 20, 1.0)
    assert {(len(prompt.ids), prompt.output_tokens) for prompt in exact} == {(100, 20)}
    assert all(random_prompts(IDS, rng(), 50, 2, 1, 0.0)[i].ids for i in range(50))


def test_ids_keep_away_from_both_ends_of_the_vocabulary():
    ids = np.concatenate([p.ids for p in random_prompts(IDS, rng(), 50, 200, 1, 1.0)])
    assert ids.min() >= 100 and ids.max() < 900


def test_the_seed_decides():
    assert random_prompts(IDS, rng(), 5, 9, 9, 0.0) == random_prompts(IDS, rng(), 5, 9, 9, 0.0)


def test_words_stand_for_tokens_where_there_is_no_tokenizer():
    (prompt,) = random_prompts(TEXT, rng(), 1, 40, 3, 1.0)
    assert prompt.ids == [] and len(prompt.text.split()) == 40


def test_a_tokenizer_makes_text_from_ids():
    vocabulary = Vocabulary(1000, False, lambda ids: "|".join(map(str, ids)))
    (prompt,) = random_prompts(vocabulary, rng(), 1, 4, 3, 1.0)
    assert prompt.text.count("|") == 3


def test_shared_prefixes_are_shared_within_groups_alone():
    prompts = shared_prefix_prompts(
        IDS,
        rng(),
        groups=3,
        prompts_per_group=4,
        system_tokens=50,
        question_tokens=10,
        output_tokens=5,
    )
    prefixes = [tuple(prompt.ids[:50]) for prompt in prompts]
    assert len(prompts) == 12 and all(len(prompt.ids) == 60 for prompt in prompts)
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({tuple(prompt.ids[50:]) for prompt in prompts}) == 12
    assert len(set(prefixes[:4])) > 1  # not group after group


def test_sharegpt(tmp_path):
    file = tmp_path / "s.json"
    entries = [
        {"conversations": [{"from": "human", "value": "hello there"}, {"value": "x" * 40}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"id": 3},
        "noise",
    ]
    file.write_text(json.dumps(entries))
    prompts = sharegpt_prompts(file, rng(), 3, 0, None)
    assert [(p.text, p.output_tokens) for p in prompts] == [("hello there", 10)] * 3
    assert sharegpt_prompts(file, rng(), 1, 5, None)[0].output_tokens == 5
    assert sharegpt_prompts(file, rng(), 1, 0, lambda text: text)[0].output_tokens == 40


def test_custom(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 3}\n')
    prompts = custom_prompts(file, 3, 0, None)
    assert [(p.text, p.output_tokens) for p in prompts] == [("a", 256), ("b", 3), ("a", 256)]


@pytest.mark.parametrize(
    "make, text, says",
    [
        (lambda f: sharegpt_prompts(f, rng(), 1, 0, None), "{", "is not JSON"),
        (lambda f: sharegpt_prompts(f, rng(), 1, 0, None), "{}", "JSON list"),
        (lambda f: sharegpt_prompts(f, rng(), 1, 0, None), "[]", "no conversation"),
        (lambda f: custom_prompts(f, 1, 0, None), "[1]", "line 1"),
        (lambda f: custom_prompts(f, 1, 0, None), "", "no prompt"),
    ],
)
def test_files_that_do_not_fit_get_a_sentence(tmp_path, make, text, says):
    file = tmp_path / "f"
    file.write_text(text)
    with pytest.raises(BadRequest, match=says):
        make(file)
    with pytest.raises(BadRequest, match="cannot be read"):
        make(tmp_path / "absent")
