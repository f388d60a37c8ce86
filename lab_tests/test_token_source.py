"""A token file is the text that it was made from. Each rank reads its part; a wrong file is refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh

import lab
from cluster.errors import RankError
from lab.commands.cli import main
from lab.errors import DataError
from lab.recipe.jobs import TrainSettings, make_job
from lab.recipe.recipe import Recipe
from lab.step import data, on_ranks, token_source, write_tokens
from lab.step.batches import read_batch, shard_batch
from lab.step.token_source import TokenSource, open_source
from lab_tests.support.mesh import Mesh
from lab_tests.support.models import small_config
from lab_tests.support.on_ranks import ranks_kept
from lab_tests.support.training import ROWS, TOKENS

VOCABULARY = 70_000


class Counted(TokenSource):
    """Notes the places that are read."""

    def read(self, places):
        read.extend(places.tolist())
        return super().read(places)


read: list[int] = []


@pytest.mark.parametrize("name", ["tokens.uint16.bin", "tokens.uint32.bin"])
def test_a_file_has_the_tokens_that_were_written(tmp_path, name):
    tokens = torch.tensor([0, 3, 2**16 - 1, 7])
    write_tokens(tokens, tmp_path / name)
    source = open_source(tmp_path / name, vocab_size=VOCABULARY)
    assert (tmp_path / name).read_bytes()[:4] == (b"\0\0\3\0" if "16" in name else b"\0\0\0\0")
    assert source.read(torch.tensor([[2, 1], [3, 6]])).tolist() == [[65535, 3], [7, 65535]]
    assert source.read(torch.arange(4)).dtype == torch.int64
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("rows", "length", "ranks", "knobs"),
    [
        (3, 11, 4, {}), (2, 12, 4, {"ulysses": 4}), (3, 13, 4, {"ulysses": 2}),
        (1, 17, 4, {"ring": 2}), (3, 25, 12, {"ulysses": 3, "ring": 2}), (2, 90, 3, {"ring": 3}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("alone")
def test_a_rank_reads_its_own_part_and_makes_the_batch_of_the_whole(rows, length, ranks, knobs):
    tokens = torch.randint(0, 101, (83,), generator=torch.Generator().manual_seed(1))
    source, recipe = Counted(tokens.numpy().astype("<u2"), 101), Recipe(**knobs)
    for step in (0, 5):
        windows = data.windows(83, rows=rows, length=length, step=step)
        ids = data.batch(tokens, rows=rows, length=length, step=step)
        for rank in range(ranks):
            read.clear()
            mine = read_batch(source, windows, length, recipe, Mesh(ranks, rank))
            whole = shard_batch(ids, recipe, Mesh(ranks, rank))
            assert torch.equal(mine.input_ids, whole.input_ids)
            assert torch.equal(mine.labels, whole.labels)
            assert torch.equal(mine.position_ids, whole.position_ids)
            assert mine.input_ids.dtype == mine.labels.dtype == torch.int64
            assert (mine.label_count, mine.ulysses, mine.ring, mine.padding) == (
                whole.label_count, whole.ulysses, whole.ring, whole.padding,
            )  # fmt: skip
            # Its tokens, and the one that follows each.
            assert len(read) <= 2 * mine.input_ids.numel()


@pytest.mark.usefixtures("alone")
def test_short_rows_are_padded_with_labels_that_do_not_count():
    tokens = torch.arange(1, 51)
    mask = (torch.arange(20) < torch.tensor([[20], [10]])).long()
    ids = torch.stack([tokens[20:40], torch.cat([tokens[40:], torch.zeros(10, dtype=torch.int64)])])
    for rank in range(2):
        mesh, recipe = Mesh(2, rank), Recipe(ulysses=2)
        source = TokenSource(tokens.numpy(), 101)
        mine = read_batch(source, [range(20, 40), range(40, 50)], 20, recipe, mesh)
        whole = shard_batch(ids, recipe, mesh, attention_mask=mask)
        assert torch.equal(mine.labels, whole.labels)
        assert torch.equal(mine.input_ids, whole.input_ids)
        assert mine.label_count == whole.label_count == 28


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.uint16.bin", None, "no token file at .*a.uint16.bin'"),
        ("a.uint16.bin", b"", "has 0 bytes: a file of uint16 has a multiple of 2, and not 0"),
        ("a.uint16.bin", b"abc", "has 3 bytes: a file of uint16 has a multiple of 2"),
        ("a.uint32.bin", b"abcdef", "has 6 bytes: a file of uint32 has a multiple of 4"),
        ("a.bin", b"\1\0\2\0", r"not text: .*the name of a file of tokens ends with \.uint16\.bin or"),
    ],
)
def test_a_token_file_that_cannot_be_used(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        open_source(tmp_path / name, vocab_size=VOCABULARY)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        (
            "a.bin",
            torch.tensor([1]),
            r"is no name of a token file: let it end with \.uint16\.bin or \.uint32",
        ),
        (
            "a.uint16.bin",
            torch.tensor([1, 2**16]),
            r"token 65536 in a file of uint16, which holds 0 to 65535",
        ),
        ("a.uint32.bin", torch.tensor([-1, 2]), "token -1 in a file of uint32"),
        ("a.uint16.bin", torch.tensor([[1]]), r"tokens of shape \[1, 1\] in torch.int64: give one row"),
        ("a.uint16.bin", torch.tensor([1.0]), r"in torch.float32: give one row"),
        ("a.uint16.bin", torch.zeros(0, dtype=torch.int64), r"tokens of shape \[0\]"),
        ("none/a.uint16.bin", torch.tensor([1]), "cannot be written: No such file or directory"),
    ],
)
def test_tokens_that_are_not_written(tmp_path, name, tokens, message):
    with pytest.raises(DataError, match=message):
        write_tokens(tokens, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_was_written_is_removed_where_it_cannot_have_its_name(tmp_path):
    (tmp_path / "a.uint16.bin").mkdir()
    with pytest.raises(DataError, match="cannot be written: Is a directory"):
        write_tokens(torch.tensor([1]), tmp_path / "a.uint16.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["a.uint16.bin"]


def test_a_token_beyond_the_vocabulary_and_a_file_that_was_cut(tmp_path):
    path = tmp_path / "a.uint16.bin"
    write_tokens(torch.tensor([5, 6, 300, 7]), path)
    source = open_source(path, vocab_size=300)
    assert source.read(torch.tensor([0, 3])).tolist() == [5, 7]
    with pytest.raises(DataError, match="has token 300 at place 2, the model's vocabulary ends at 299"):
        source.read(torch.tensor([3, 6]))
    path.write_bytes(path.read_bytes()[:4])
    with pytest.raises(DataError, match="has 4 bytes, and had 8 when it was opened: do not change"):
        source.read(torch.tensor([0]))


def test_the_digest_of_a_text_is_that_of_its_file_and_of_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(token_source, "BLOCK", 4)
    monkeypatch.setattr(token_source, "BLOCKS", 3)
    for length in (7, 12, 50):
        tokens = np.arange(length)
        write_tokens(torch.from_numpy(tokens), tmp_path / "a.uint16.bin")
        digest = TokenSource(tokens, 101).digest()
        assert open_source(tmp_path / "a.uint16.bin", vocab_size=101).digest() == digest
        for place in (0, length // 2, length - 1):
            other = tokens.copy()
            other[place] = 99
            assert TokenSource(other, 101).digest() != digest
        assert TokenSource(tokens[:-1], 101).digest() != digest
    # The blocks that are read of a long text are 0 to 3, 23 to 26, and 46 to 49, and no other token counts.
    other = tokens.copy()
    other[30] = 99
    assert TokenSource(other, 101).digest() == digest
    # These blocks of texts of one token are equal, and the lengths of the texts are not.
    assert len({TokenSource(np.ones(length), 101).digest() for length in (49, 50)}) == 2


def test_training_from_a_file_has_the_losses_of_the_text_bit_for_bit(ranks4, digits, tmp_path):
    path = tmp_path / "digits.uint16.bin"
    write_tokens(data.encode(digits.read_text()), path)
    size = {"tokens": TOKENS, "rows": ROWS, "steps": 2, "cluster": ranks4}
    recipe = Recipe(fsdp=True, ulysses=2, ring=2)
    from_text = lab.run(small_config(), recipe, text=digits, **size)
    from_file = lab.run(small_config(), recipe, text=path, **size)
    assert from_file.losses == from_text.losses
    assert [t.device_peak for t in from_file.timelines] == [t.device_peak for t in from_text.timelines]


def refusal_on_rank(path):
    """Runs on every rank; the last of them reads the token."""
    source, mesh = open_source(path, vocab_size=101), init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(lab.LabError) as refused:
        read_batch(source, [range(TOKENS)], TOKENS, Recipe(ulysses=4), mesh)
    return str(refused.value)


def test_all_ranks_refuse_the_token_that_one_of_them_reads(ranks4, tmp_path, monkeypatch):
    """The token is in the part of the last rank; the others would wait for it in the forward."""
    tokens = torch.arange(TOKENS) % 101
    tokens[TOKENS - 3] = 101
    write_tokens(tokens, tmp_path / "a.uint16.bin")
    *others, last = ranks4.apply(refusal_on_rank, tmp_path / "a.uint16.bin")
    assert "has token 101 at place 37" in last
    assert others == [f"rank 3 refuses: {last}"] * 3
    monkeypatch.setattr(on_ranks, "CHECKED", 4)
    with (
        ranks_kept(ranks4),
        pytest.raises(RankError, match="has token 101 at place 37, the model's vocabulary ends at 100"),
    ):
        lab.run(
            small_config(), Recipe(ulysses=2), tokens=TOKENS, text=tmp_path / "a.uint16.bin", cluster=ranks4
        )


def other_text_on_rank_2(job, settings, others):
    """Runs on every rank; one of them has another text at the same path."""
    settings = others if dist.get_rank() == 2 else settings
    with pytest.raises(lab.LabError) as refused:
        on_ranks.make_rank_state(job, settings)
    return str(refused.value)


def test_ranks_with_other_texts_or_settings_refuse_together(ranks4, digits, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("3210" * 500)
    job = make_job(small_config(), "plain", ranks=4, tokens=TOKENS)
    right = TrainSettings(2, digits)
    for wrong in (TrainSettings(2, other), TrainSettings(3, digits)):
        said = ranks4.apply(other_text_on_rank_2, job, right, wrong)
        assert len(set(said)) == 1
        assert said[0].startswith(
            "the text, its tokens or the settings of the training differ on rank 2: give"
        )


def test_a_tokenizer_for_a_token_file_is_refused(tmp_path):
    write_tokens(torch.arange(50), tmp_path / "a.uint16.bin")
    words = ["train", "tiny", "--tokens", "40", "--steps", "1", "--checkpoint", str(tmp_path / "run")]
    words += ["--text", str(tmp_path / "a.uint16.bin"), "--tokenizer", str(tmp_path)]
    run = CliRunner().invoke(main, words)
    assert run.exit_code == 2
    assert run.stderr.endswith("with a file of tokens, which needs none: leave it out\n")
    assert run.stderr.count("\n") == 1
