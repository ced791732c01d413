"""The main job in parts: corpus, rows, windows, states of the target, decoding."""

import json
from itertools import islice, pairwise

import pytest
import torch
from job_cases import tiny

from numden.models import decoder, dspark, job
from numden.models import drafters as drafters_module
from numden.models.anchors import candidates
from numden.models.corpus import stdlib_sources
from numden.models.data import collate
from numden.models.decoding import cached_decoder
from numden.models.drafters import captured_layers
from numden.models.job_rows import Corpus, drafter_rows, read_corpus
from numden.models.rows import Row
from numden.pure import random, tree, window_grad

CONFIG = tiny()


@pytest.fixture(scope="module")
def corpus():
    return read_corpus(CONFIG)


@pytest.fixture(scope="module")
def shapes(corpus):
    shape = job.target_config(CONFIG, corpus.tokenizer.vocab_size)
    return shape, job.drafter_config(CONFIG, shape, corpus.tokenizer.special_ids["mask"])


@pytest.fixture(scope="module")
def target(shapes):
    """Weights ten times as large as a start's, so that its states say something of their tokens."""
    return tree.map(lambda w: 10 * w if w.dim() == 2 else w, job.target_init(CONFIG, shapes[0]))


def same_rows(got, expected):
    return len(got) == len(expected) and all(
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.loss_mask, b.loss_mask)
        and a.sample_id == b.sample_id
        for a, b in zip(got, expected, strict=True)
    )


def drafter_windows(config, corpus, shapes, target, rank=0, num_ranks=1):
    shape, drafter = shapes
    return job.drafter_windows(config, corpus, shape, drafter, target, rank, num_ranks)


def frozen(shapes, target):
    return job.drafter_target(CONFIG, shapes[1], target)


def save_states(config, corpus, shapes, target, rank=0, num_ranks=1):
    shape, drafter = shapes
    job.save_states(config, corpus, shape, drafter, target, rank, num_ranks)


# --- corpus --------------------------------------------------------------------------------------


def test_the_corpus_is_the_standard_library_cut_into_pieces(corpus):
    rows = sorted([*corpus.rows, *corpus.held_out], key=lambda row: row.sample_id)
    ids = [row.sample_id for row in rows]
    assert len(set(ids)) == len(ids) > 100
    lengths = [len(row.tokens) for row in rows]
    assert min(lengths) == CONFIG.data.min_length
    assert max(lengths) == CONFIG.data.max_length
    text = corpus.tokenizer.decode(torch.cat([row.tokens for row in rows]).tolist())
    sources = "".join(stdlib_sources(max_bytes=CONFIG.data.max_bytes))
    assert 0.97 * len(sources) < len(text) <= len(sources)  # without the shortest pieces
    assert corpus.tokenizer.decode(rows[0].tokens.tolist()) == sources[: lengths[0] - 1]
    assert all(row.loss_mask[1:].all() and not row.loss_mask[0] for row in rows)


def test_held_out_rows_are_apart_and_not_the_first_of_the_text(corpus):
    held = {row.sample_id for row in corpus.held_out}
    assert len(held) == CONFIG.data.held_out
    assert held.isdisjoint(row.sample_id for row in corpus.rows)
    assert held != set(range(CONFIG.data.held_out))


def test_the_corpus_depends_on_the_seed_alone(corpus):
    again, other = read_corpus(CONFIG), read_corpus(tiny("run.seed=1"))
    assert same_rows(again.rows, corpus.rows)
    assert same_rows(again.held_out, corpus.held_out)
    assert not same_rows(other.rows, corpus.rows)


def test_own_files_are_read_up_to_max_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 50)
    (tmp_path / "b.txt").write_text("ä" * 500)
    (tmp_path / "c.txt").write_text("never")
    options = [f"data.files={tmp_path}/*.txt", "data.max_bytes=301", "data.held_out=1"]
    read = read_corpus(tiny(*options))
    rows = sorted([*read.rows, *read.held_out], key=lambda row: row.sample_id)
    text = read.tokenizer.decode(torch.cat([row.tokens for row in rows]).tolist())
    assert "ab" * 40 in text
    assert "ä" * 80 in text
    assert text.count("ä") <= 100  # two bytes each, and half of one is dropped
    assert "never" not in text
    assert "\ufffd" not in text


def test_a_vocabulary_is_learnt_from_the_text():
    corpus = read_corpus(tiny("data.vocab_size=300"))
    assert corpus.tokenizer.vocab_size == 300
    assert max(int(row.tokens.max()) for row in corpus.rows) > 264


def talk(user, assistant):
    messages = [("system", "s"), ("user", user), ("assistant", assistant)]
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in messages]})


@pytest.fixture
def talks(tmp_path):
    lines = [talk("?" * (1 + i % 7), "!" * (1 + i % 9)) for i in range(30)]
    lines += [talk("?" * 30, "never seen, since the row ends before it")]
    lines += [talk("hm", "")]  # one label alone, the eos
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "talks.jsonl")


def test_conversations_are_rows_whose_labels_are_answers(talks):
    config = tiny(f"data.files={talks}", "data.vocab_size=0")
    read = read_corpus(config)
    rows = [*read.rows, *read.held_out]
    assert sorted(row.sample_id for row in rows) == list(range(30))
    for row in rows:
        said = read.tokenizer.decode(row.tokens[row.loss_mask].tolist())
        assert said == "!" * (1 + row.sample_id % 9)
    assert drafter_rows(config, read.rows) is read.rows


def test_conversations_fit_into_max_bytes(talks):
    each = [1 + (1 + i % 7) + (1 + i % 9) for i in range(30)]
    config = tiny(f"data.files={talks}", f"data.max_bytes={sum(each[:10]) + 1}", "data.held_out=1")
    read = read_corpus(config)
    assert sorted(row.sample_id for row in [*read.rows, *read.held_out]) == list(range(10))


def test_windows_of_conversations_always_have_something_to_learn(talks):
    config = tiny(f"data.files={talks}", "drafter.micro_steps=1", "drafter.rows_per_micro_step=1")
    corpus = read_corpus(config)
    shape = job.target_config(config, corpus.tokenizer.vocab_size)
    drafter = job.drafter_config(config, shape, corpus.tokenizer.special_ids["mask"])
    target = job.target_init(config, shape)
    for window in islice(job.drafter_windows(config, corpus, shape, drafter, target), 40):
        assert dspark.den(window[0], drafter) > 0
        assert len(window[0]["supervised"]) > 0


def test_bad_corpora(tmp_path, talks):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data: files must be all \.jsonl or none, got \['.*'\]"):
        read_corpus(tiny(f'data.files=["{talks}", "{tmp_path}/a.txt"]'))
    with pytest.raises(ValueError, match=r"data: there must be more rows .* got 0 rows and .*=4"):
        read_corpus(tiny(f"data.files={tmp_path}/a.txt"))
    with pytest.raises(ValueError, match=r"read_texts: a path must name a file, 'nothing'"):
        read_corpus(tiny("data.files=nothing"))
    with pytest.raises(
        ValueError, match=r"text_rows: lengths must .* min_length=99 and max|got min"
    ):
        read_corpus(tiny("data.min_length=99"))


# --- answers -------------------------------------------------------------------------------------


def test_answers_are_the_ends_of_texts_drawn_by_row(corpus):
    rows = drafter_rows(CONFIG, corpus.rows)
    shares = []
    for row, whole in zip(rows, corpus.rows, strict=True):
        assert torch.equal(row.tokens, whole.tokens)
        labels = row.loss_mask.nonzero().flatten()
        assert torch.equal(labels, torch.arange(len(row.tokens) - len(labels), len(row.tokens)))
        assert candidates(row.loss_mask).any()
        shares.append(len(labels) / len(row.tokens))
    below = [sum(share < bound for share in shares) / len(shares) for bound in (0.25, 0.5, 0.9)]
    # Log-uniform from 1/20: ln 5 / ln 20 = 0.54, 0.77, 0.96; short rows have more than their share.
    assert below == pytest.approx([0.5, 0.75, 0.95], abs=0.08)


def test_an_answer_depends_on_its_row_alone(corpus):
    some = corpus.rows[5:9][::-1]
    assert same_rows(drafter_rows(CONFIG, some), drafter_rows(CONFIG, corpus.rows)[5:9][::-1])
    other = tiny("run.seed=1")
    assert not same_rows(drafter_rows(other, corpus.rows), drafter_rows(CONFIG, corpus.rows))


def test_all_of_a_row_is_an_answer_to_one(corpus):
    assert same_rows(drafter_rows(tiny("drafter.min_answer=1.0"), corpus.rows), corpus.rows)


def test_micro_steps_of_a_window_differ_in_their_den(corpus, shapes, target):
    stream = drafter_windows(CONFIG, corpus, shapes, target)
    dens = [[float(dspark.den(b, shapes[1])) for b in window] for window in islice(stream, 6)]
    assert sum(max(window) > 2 * min(window) for window in dens) >= 4


# --- windows -------------------------------------------------------------------------------------


def test_the_targets_windows_keep_to_their_budget(corpus):
    window = next(job.target_windows(CONFIG, corpus))
    assert len(window) == 2  # 96 tokens, 48 in each
    assert all(24 < batch["tokens"].numel() <= 48 for batch in window)
    (only,) = next(job.target_windows(tiny("target.tokens_per_window=1"), corpus))
    assert torch.equal(only["tokens"], window[0]["tokens"])


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_shares_of_ranks_are_the_window_of_one(corpus, shapes, target, kind):
    def stream(*ranks):
        if kind == "target":
            return islice(job.target_windows(CONFIG, corpus, *ranks), 3)
        return islice(drafter_windows(CONFIG, corpus, shapes, target, *ranks), 3)

    for whole, first, second in zip(stream(), stream(0, 2), stream(1, 2), strict=True):
        assert len(first) + len(second) == len(whole) == (2 if kind == "target" else 5)
        for share, expected in ((first, whole[0::2]), (second, whole[1::2])):
            for got, want in zip(share, expected, strict=True):
                assert got.keys() == want.keys()
                for name in want:  # anchors and keep among them, which are drawn
                    assert torch.equal(got[name], want[name]), name


def test_draws_differ_between_seeds_and_epochs(corpus, shapes, target):
    few = Corpus(corpus.tokenizer, corpus.rows[:2], corpus.held_out)

    def draws(config):
        stream = drafter_windows(config, few, shapes, target)
        return [window[0]["key"].sort(0).values.tolist() for window in islice(stream, 2)]

    first, second = draws(CONFIG)
    assert first != second  # each window is an epoch of the two rows
    assert draws(CONFIG) == [first, second]
    assert draws(tiny("run.seed=1"))[0] != first


# --- states of the target ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "count", "layers"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (8, 5, (1, 2, 3, 4, 5)),
        (7, 5, (0, 2, 3, 4, 6)),
        (5, 5, (0, 1, 2, 3, 4)),
        (4, 3, (0, 2, 3)),
        (4, 2, (0, 3)),
        (5, 2, (1, 2)),
        (4, 1, (2,)),
        (1, 1, (0,)),
    ],
)
def test_captured_layers(depth, count, layers):
    assert captured_layers(depth, count) == layers


def test_captured_layers_are_distinct_whatever_the_depth():
    for depth in range(1, 40):
        for count in range(1, depth + 1):
            layers = captured_layers(depth, count)
            assert len(set(layers)) == count
            assert list(layers) == sorted(layers)
            assert 0 <= layers[0] <= layers[-1] < depth


def test_states_are_layers_and_the_input_of_the_head(corpus, shapes, target):
    shape, drafter = shapes
    batch = collate(corpus.rows[:3], key=random.key(0))
    found = job.states(batch, target, shape, job.drafter_kind(CONFIG).layers(drafter, shape))
    logits = decoder.apply(target, batch["tokens"], shape)
    assert torch.equal(decoder.logits(target, found["final"], shape), logits)
    first, last = found["captured"].unflatten(-1, (2, -1)).unbind(-2)  # of layers 0 and 2
    shallow = job.target_config(tiny("target.num_layers=1", "drafter.num_target_layers=1"), 264)
    below = {**target, "layers": target["layers"][:1], "norm": torch.ones_like(target["norm"])}
    normed = decoder.hidden_states(below, batch["tokens"], shallow)[1]
    # The norm of the first layer's output; rounding is that of float32.
    assert torch.allclose(
        torch.nn.functional.rms_norm(first, first.shape[-1:], eps=1e-6), normed, atol=1e-5
    )
    assert torch.allclose(
        torch.nn.functional.rms_norm(last, last.shape[-1:], target["norm"], eps=1e-6),
        found["final"],
        atol=1e-5,
    )


@pytest.fixture(scope="module")
def saved(corpus, shapes, target, tmp_path_factory):
    """The corpus with its states from files that two ranks have written."""
    folder = tmp_path_factory.mktemp("states") / "new"
    config = tiny(f"drafter.features={folder}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_ROWS_PER_FILE", 100)
        num_files = -(-len(corpus.rows) // 100)
        for rank, written in ((1, num_files // 2), (0, num_files)):
            save_states(config, corpus, shapes, target, rank, 2)
            assert len(list(folder.iterdir())) == written
        return job.read_states(config, corpus)


def test_saved_rows_are_the_rows(corpus, saved):
    assert same_rows(saved.rows, corpus.rows)
    assert same_rows(saved.held_out, corpus.held_out)
    assert {frozenset(row.features) for row in saved.rows} == {frozenset(("captured", "final"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equivalent_saved_states_on_the_fly(corpus, saved, shapes, target, dtype, monkeypatch):
    target = tree.map(lambda leaf: leaf.to(dtype), target)
    params = tree.map(
        lambda leaf: leaf.to(dtype), job.drafter_init(CONFIG, shapes[1], frozen(shapes, target))
    )
    grad = window_grad(
        job.drafter_loss(CONFIG, shapes[1], frozen(shapes, target)), dspark.objective(shapes[1])
    )
    on_the_fly = islice(drafter_windows(CONFIG, corpus, shapes, target), 3)
    expected = [grad(params, window) for window in on_the_fly]
    monkeypatch.setattr(job, "states", None)  # is not called any more
    found = [
        grad(params, window) for window in islice(drafter_windows(CONFIG, saved, shapes, target), 3)
    ]
    for got, want in zip(found, expected, strict=True):
        # The states were rounded to float32 in batches of other shapes, a few units of 6e-8 each.
        assert got.loss == pytest.approx(float(want.loss), rel=1e-5)
        assert torch.equal(got.terms.den, want.terms.den)
        for a, b in zip(tree.leaves(got.grads), tree.leaves(want.grads), strict=True):
            assert a.dtype == dtype
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_states_of_rows_of_one_length_are_the_same_to_the_bit(shapes, target, tmp_path):
    key = random.key(3)
    rows = [
        Row(random.choice(random.fold_in(key, i), 256, (16,)), torch.arange(16) > 0, i)
        for i in range(8)
    ]
    batch = collate(rows, key=key)
    shape, drafter = shapes
    states = job.states(batch, target, shape, job.drafter_kind(CONFIG).layers(drafter, shape))
    config = tiny(f"drafter.features={tmp_path}")
    corpus = Corpus(None, rows, [])  # pyright: ignore[reportArgumentType]
    save_states(config, corpus, shapes, target)
    again = collate(job.read_states(config, corpus).rows, key=key)
    assert torch.equal(again["captured"], states["captured"])
    assert torch.equal(again["final"], states["final"])


# --- the schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_windows", [*range(1, 32), 99, 100, 150, 300])
def test_one_cycle_has_its_peak_after_a_tenth(num_windows):
    schedule = job.one_cycle(2.0, num_windows)
    rates = [schedule(window) for window in range(num_windows)]
    up = max(1, num_windows // 10)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[0] == pytest.approx(2.0 / 25)
    assert all(a < b for a, b in pairwise(rates[: up + 1]))
    assert all(a > b for a, b in pairwise(rates[up:]))
    if num_windows > up:
        assert rates[up] == pytest.approx(2.0)
    if num_windows >= 20:
        assert rates[-1] < 0.03


# --- decoding ------------------------------------------------------------------------------------


def test_speculative_tokens_are_the_targets_own(corpus, shapes, target, monkeypatch):
    shape, drafter = shapes
    dtypes = []

    def watched(params, *args, **kwargs):
        dtypes.append(params["embed"].dtype)
        return cached_decoder(params, *args, **kwargs)

    monkeypatch.setattr(job, "cached_decoder", watched)
    monkeypatch.setattr(drafters_module, "cached_decoder", watched)
    loud = tree.map(
        lambda w: 20 * w if w.dim() == 2 else w,
        job.drafter_init(CONFIG, drafter, frozen(shapes, target)),
    )
    drafters = {
        "untrained": job.drafter_init(CONFIG, drafter, frozen(shapes, target)),
        "loud": loud,
    }
    prompts = [row.tokens[:5] for row in corpus.held_out]
    decoded = job.decode(
        job.drafter_kind(CONFIG),
        prompts,
        target,
        shape,
        drafters,
        drafter,
        frozen(shapes, target),
        new_tokens=20,
    )
    assert len({tuple(tokens.tolist()) for tokens in decoded.plain}) > 1
    model = tree.map(torch.Tensor.double, target)
    for prompt, tokens in zip(prompts, decoded.plain, strict=True):
        text = torch.cat([prompt, tokens])
        own = decoder.apply(model, text[None], shape).argmax(-1)[0]
        assert torch.equal(own[len(prompt) - 1 : -1], tokens)
    for name in drafters:
        assert len(decoded.by_drafter[name]) == len(prompts)
        for plain, speculative in zip(decoded.plain, decoded.by_drafter[name], strict=True):
            assert torch.equal(speculative.tokens, plain)
            assert set(speculative.accepted) <= set(range(CONFIG.drafter.block_size + 1))
    # Where the two best logits are never as close as rounding.
    assert set(dtypes) == {torch.float64}
    loud, untrained = decoded.by_drafter["loud"], decoded.by_drafter["untrained"]
    assert [d.accepted for d in loud] != [d.accepted for d in untrained]
