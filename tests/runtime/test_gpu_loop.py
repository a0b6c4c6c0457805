"""Generating on an engine, with plain kernels on the CPU: the text of plain decoding, whatever rounds are in flight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnest_format.checkpoint import Checkpoint
from bitnest_format.errors import GenerationError, UnsupportedModelError
from bitnest_format.kernels.ops import plain_ops
from bitnest_format.runtime import generate as generate_module
from bitnest_format.runtime import gpu_decoder
from bitnest_format.runtime.device import CPU, DeviceChoice, DeviceWarning
from bitnest_format.runtime.engine import Engine
from bitnest_format.runtime.forward import NestedForward
from bitnest_format.runtime.generate import NestedModel
from bitnest_format.runtime.gpu_decoder import GpuDecoder
from bitnest_format.runtime.gpu_loop import GpuLoop
from bitnest_format.runtime.kv_cache import KvSettings
from bitnest_format.runtime.sampling import SamplingSettings

GREEDY = SamplingSettings()
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tied": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "mistral window": {"model_type": "mistral", "sliding_window": 16},
    "phi3": {"model_type": "phi3"},
    "nested head": {"nested_head": True},
}
Open = Callable[..., NestedModel]
Make = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path, tiny_checkpoint: Make, engine_model: Open) -> NestedModel:
    return engine_model(tiny_checkpoint(tmp_path / "model", num_hidden_layers=1, eos_token_id=None))


class Changing:
    """Another gamma every round."""

    def __init__(self, *gammas: int):
        self.gammas: Iterator[int] = cycle(gammas)
        self.chosen: list[int] = []
        self.seen: list[tuple[int, int]] = []

    def choose(self) -> int:
        self.chosen.append(next(self.gammas))
        return self.chosen[-1]

    def observe(self, gamma: int, accepted: int) -> None:
        self.seen.append((gamma, accepted))


def _decoder(model: NestedModel) -> GpuDecoder:
    assert isinstance(model.decoder, GpuDecoder)
    return model.decoder


def _engine(model: NestedModel) -> Engine:
    engine = _decoder(model).engine
    assert engine is not None
    return engine


def _cache(model: NestedModel, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    forward = _engine(model).forward
    assert isinstance(forward, NestedForward)
    return forward.planes[..., :entries, :].clone(), forward.scale[..., :entries].clone()


def test_the_text_is_the_same_for_every_gamma(model: NestedModel) -> None:
    prompt = [9, 8, 7, 50]
    expected = model.generate(prompt, max_new_tokens=24, gamma=0).token_ids
    assert len(set(expected)) > 8
    for gamma in range(1, 9):
        result = model.generate(prompt, max_new_tokens=24, gamma=gamma)
        assert result.token_ids == expected, f"gamma {gamma}"
        assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_the_same_for_every_architecture(
    name: str, tmp_path: Path, tiny_checkpoint: Make, engine_model: Open
) -> None:
    model = engine_model(tiny_checkpoint(tmp_path / "model", eos_token_id=None, **MODELS[name]))
    expected = model.generate([5, 6, 7], max_new_tokens=24, view="target").token_ids
    for gamma in (2, 5):
        assert model.generate([5, 6, 7], max_new_tokens=24, gamma=gamma).token_ids == expected


@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("switch", [0, 8, 1000])
def test_drafting_on_kv4_does_not_show_in_the_text(switch: int, recent: int, model: NestedModel) -> None:
    kv = KvSettings(draft_switch_length=switch, recent=recent)
    expected = model.generate([5, 6, 7], max_new_tokens=20, gamma=0, kv=kv).token_ids
    assert model.generate([5, 6, 7], max_new_tokens=20, gamma=4, kv=kv).token_ids == expected
    assert _engine(model).forward.draft_kv == type(_engine(model).forward.draft_kv)(switch, recent)  # type: ignore[attr-defined]


@pytest.mark.parametrize("gamma", [0, 3, 8])
def test_the_text_is_that_of_the_reference(
    gamma: int, chain_checkpoint: Make, engine_model: Open, toy_ids_of: Callable[[str], list[int]]
) -> None:
    folder = chain_checkpoint("Pabcdefghijklmnopq", eos_token_id=toy_ids_of("o")[0])
    for prompt in ("P", "Pabc"):
        result = engine_model(folder).generate(prompt, max_new_tokens=20, gamma=gamma)
        expected = NestedModel.open(folder).generate(prompt, max_new_tokens=20, gamma=gamma)
        assert (result.text, result.token_ids, result.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
        assert result.finish_reason == "eos"


def test_gammas_may_change_in_mid_text(model: NestedModel) -> None:
    expected = model.generate([5, 6], max_new_tokens=40, gamma=0).token_ids
    policy = Changing(0, 3, 1, 8, 2, 15)
    loop = _decoder(model).loop(GREEDY, KvSettings(), "target", 50)
    tokens = [loop.start([5, 6])]
    while len(tokens) < 40:
        tokens += loop.block(tokens[-1], policy, 40 - len(tokens))
    assert tuple(tokens[:40]) == expected
    assert [gamma for gamma, _ in policy.seen] == policy.chosen[: len(policy.seen)]
    assert len(policy.chosen) - len(policy.seen) <= 1
    counters = loop.counters
    assert counters.rounds == len(policy.seen)
    assert counters.drafted == sum(gamma for gamma, _ in policy.seen)
    assert counters.accepted == sum(accepted for _, accepted in policy.seen) == len(tokens) - 1 - counters.rounds
    assert sum(counters.histogram) == counters.rounds


def test_choosing_gamma_by_acceptance_gives_the_same_text(
    model: NestedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Make
) -> None:
    seconds = {0: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 6: 1.5}
    measured = []

    def round_seconds(self: Any, gammas: Any) -> dict[int, float]:
        measured.append(self)
        return {gamma: seconds[gamma] for gamma in gammas}

    monkeypatch.setattr("bitnest_format.runtime.engine.Engine.round_seconds", round_seconds)
    monkeypatch.setattr("bitnest_format.runtime.speculative.SpeculativeLoop.round_seconds", round_seconds)
    reference = NestedModel.open(model.checkpoint.folder)
    for opened in (model, reference):
        plain = opened.generate([5, 6], max_new_tokens=40, gamma=0)
        chosen = opened.generate([5, 6], max_new_tokens=40, gamma="auto")
        assert chosen.token_ids == plain.token_ids
        assert chosen.stats.gamma == "auto"
        assert chosen.stats.rounds < 39
        assert chosen.stats.drafted > 2 * chosen.stats.rounds - 2
        json.dumps(chosen.stats.to_dict())
    before = len(measured)
    reference.generate([5, 6], max_new_tokens=5, gamma="auto")
    assert len(measured) == before
    assert reference.generate([5], max_new_tokens=3, view="target", gamma="auto").stats.drafted == 0


def test_what_rounds_cost_is_measured_once_and_leaves_no_trace(model: NestedModel) -> None:
    expected = model.generate([5, 6], max_new_tokens=12, gamma=2).token_ids
    loop = _decoder(model).loop(GREEDY, KvSettings(), "target", 14)
    tokens = [loop.start([5, 6])]
    seconds = loop.round_seconds((0, 4))
    assert set(seconds) == {0, 4}
    assert 0 < seconds[0] < seconds[4]
    assert loop.round_seconds((0, 4)) == seconds
    while len(tokens) < 12:
        tokens += loop.block(tokens[-1], Changing(2), 12 - len(tokens))
    assert tuple(tokens[:12]) == expected
    reference = NestedModel.open(model.checkpoint.folder)
    expected = reference.generate([5, 6], max_new_tokens=12, gamma=0).token_ids
    result = reference.generate([5, 6], max_new_tokens=12, gamma="auto")
    assert result.token_ids == expected
    assert result.stats.rounds + result.stats.accepted == 11


def test_a_round_is_enqueued_before_the_one_before_it_is_read(
    model: NestedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    enqueue, read = Engine.round, GpuLoop._read
    monkeypatch.setattr(Engine, "round", lambda self, gamma: (log.append("round"), enqueue(self, gamma)))
    monkeypatch.setattr(GpuLoop, "_read", lambda self, flight: (log.append("read"), read(self, flight))[1])
    model.generate([5, 6], max_new_tokens=5, gamma=0)
    assert log == ["read", "round", "round", "read", "round", "read", "round", "read", "read"]
    log.clear()
    model.generate([5, 6], max_new_tokens=1, gamma=4)
    assert log == ["read"]
    log.clear()
    model.generate([5, 6], max_new_tokens=2, gamma=4)
    assert log == ["read", "round", "read"]


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_an_end_token_inside_a_block_ends_the_text(gamma: int, model: NestedModel) -> None:
    """ST-1."""
    expected = model.generate([5, 6, 7], max_new_tokens=12, gamma=0).token_ids
    place = next(place for place in range(2, 12) if expected[place] not in expected[:place])
    model.end_ids = frozenset({expected[place]})
    result = model.generate([5, 6, 7], max_new_tokens=12, gamma=gamma)
    assert result.token_ids == expected[: place + 1]
    assert result.finish_reason == "eos"


@pytest.mark.parametrize("count", [1, 2, 6, 17])
def test_exactly_as_many_tokens_as_asked_for(count: int, model: NestedModel) -> None:
    expected = model.generate([9, 8, 7], max_new_tokens=17, gamma=0).token_ids
    for gamma in (0, 4):
        result = model.generate([9, 8, 7], max_new_tokens=count, gamma=gamma)
        assert result.token_ids == expected[:count]
        assert result.finish_reason == "length"


@pytest.mark.parametrize("length", [12, 27, 29, 31])
def test_the_context_ends_the_text(
    length: int, tmp_path: Path, tiny_checkpoint: Make, engine_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ST-3: no position past the context is computed, not even by rounds in flight."""
    changes = {"max_position_embeddings": 32, "num_hidden_layers": 1, "eos_token_id": None}
    model = engine_model(tiny_checkpoint(tmp_path / "model", **changes))
    highest = 0
    run = Engine._round

    def spy(self: Engine, gamma: int) -> None:
        nonlocal highest
        highest = max(highest, int(self.state.position) + gamma)
        run(self, gamma)

    monkeypatch.setattr(Engine, "_round", spy)
    prompt = list(range(3, 3 + length))
    expected = model.generate(prompt, max_new_tokens=40, gamma=0)
    assert (len(expected.token_ids), expected.finish_reason) == (32 - length, "length")
    for gamma in (4, 15):
        result = model.generate(prompt, max_new_tokens=40, gamma=gamma)
        assert result.token_ids == expected.token_ids
        assert int(_engine(model).state.position) <= 31
    assert highest < 32
    with pytest.raises(GenerationError, match="the prompt has 32 tokens, the model's context holds 32"):
        model.generate([5] * 32)
    assert model.logits([5] * 32).shape == (32, 320)


def test_a_prompt_of_one_token_and_none(model: NestedModel) -> None:
    """ST-4."""
    expected = model.generate([5], max_new_tokens=8, gamma=0).token_ids
    assert model.generate([5], max_new_tokens=8, gamma=4).token_ids == expected
    for empty in ([], torch.tensor([], dtype=torch.long)):
        with pytest.raises(GenerationError, match="the prompt is empty"):
            model.generate(empty)
    with pytest.raises(GenerationError, match="the prompt is a batch of 1"):
        model.generate([[]])  # type: ignore[list-item]


def test_the_cache_is_that_of_a_run_that_saw_no_rejected_token(model: NestedModel) -> None:
    """DC-1: planes and scales, bit for bit."""
    prompt, count = [5, 6, 7], 40
    entries = len(prompt) + count - 1
    plain = model.generate(prompt, max_new_tokens=count, gamma=0)
    planes, scale = _cache(model, entries)
    for gamma in (2, 4, 7):
        drafted = model.generate(prompt, max_new_tokens=count, gamma=gamma)
        assert drafted.stats.accepted < drafted.stats.drafted
        assert drafted.token_ids == plain.token_ids
        found = _cache(model, entries)
        assert torch.equal(found[0], planes)
        assert torch.equal(found[1], scale)


def test_one_engine_serves_texts_of_any_length(model: NestedModel, engine_model: Open) -> None:
    """GP-3: lengths and positions are read where the rounds run; nothing of one text is seen by the next."""
    short, long = [5, 6], list(range(3, 70))
    alone = {
        len(prompt): engine_model(model.checkpoint.folder).generate(prompt, max_new_tokens=16, gamma=3).token_ids
        for prompt in (short, long)
    }
    engine = None
    for prompt in (long, short, long, short):
        assert model.generate(prompt, max_new_tokens=16, gamma=3).token_ids == alone[len(prompt)]
        engine = engine or _engine(model)
        assert _engine(model) is engine


def test_a_new_engine_is_built_where_the_one_at_hand_does_not_do(
    tmp_path: Path, tiny_checkpoint: Make, engine_model: Open
) -> None:
    changes = {"max_position_embeddings": 1500, "num_hidden_layers": 1, "eos_token_id": None}
    model = engine_model(tiny_checkpoint(tmp_path / "model", **changes))
    assert _decoder(model).capacities() == [512, 1024, 1499]
    seen: list[tuple[Engine, int]] = []

    def run(**options: Any) -> None:
        model.generate([5] * 10, **{"max_new_tokens": 2, **options})
        seen.append((_engine(model), _engine(model).capacity))

    run()
    run(gamma=0, view="target")
    assert seen[0][0] is seen[1][0]
    assert seen[0][1] == 512
    for options in (
        {"kv": KvSettings(draft_switch_length=3)},
        {"kv": KvSettings(draft_switch_length=3, recent=5)},
        {"view": "draft"},
        {"temperature": 1.0},
        {"temperature": 0.5},
    ):
        run(**options)
        assert seen[-1][0] is not seen[-2][0]
    run(temperature=0.5, seed=7)
    assert seen[-1][0] is seen[-2][0]
    assert {capacity for _, capacity in seen} == {512}


@pytest.mark.parametrize(
    ("entries", "capacity"), [(1, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 1499), (1500, 1499), (9999, 1499)]
)
def test_capacities_come_in_steps(
    entries: int, capacity: int, tmp_path: Path, tiny_checkpoint: Make, engine_model: Open
) -> None:
    changes = {"max_position_embeddings": 1500, "num_hidden_layers": 1}
    decoder = _decoder(engine_model(tiny_checkpoint(tmp_path / "model", **changes)))
    assert decoder.capacity(entries) == capacity
    engine = decoder.loop(GREEDY, KvSettings(), "target", entries).engine
    assert engine.capacity == capacity
    # A text that fits leaves the engine alone.
    assert decoder.loop(GREEDY, KvSettings(), "target", 1).engine is engine


def test_more_tokens_than_the_ring_holds(model: NestedModel) -> None:
    expected = model.generate([5], max_new_tokens=40, gamma=0).token_ids
    engine = Engine(_decoder(model).weights, plain_ops(), mode="nested", capacity=60, ring=16, device=CPU)
    loop = GpuLoop(engine, model.checkpoint)
    tokens = [loop.start([5])]
    while len(tokens) < 40:
        tokens += loop.block(tokens[-1], Changing(4), 40 - len(tokens))
    assert tuple(tokens[:40]) == expected


def test_a_seed_repeats_a_sampled_text(model: NestedModel) -> None:
    def run(seed: int, gamma: int) -> tuple[int, ...]:
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
        return model.generate([5, 6], max_new_tokens=12, seed=seed, gamma=gamma, **options).token_ids

    assert run(1, 4) == run(1, 4) != run(2, 4)
    assert run(1, 0) == run(1, 0)


def test_sampling_draws_the_tokens_of_the_reference(chain_checkpoint: Make, engine_model: Open) -> None:
    """The chain's logits are sums of whole numbers, so both ways of decoding sample from the same bits."""
    folder = chain_checkpoint("Pabcdefghijklmnopq", eos_token_id=None)
    for gamma in (0, 3):
        # Near the end the reference drafts less, which takes other random numbers.
        options: dict[str, Any] = {"max_new_tokens": 9, "gamma": gamma, "temperature": 40.0, "seed": 5}
        found = engine_model(folder).generate("P", **options)
        expected = NestedModel.open(folder).generate("P", **options)
        assert found.token_ids[:5] == expected.token_ids[:5]
        assert found.text != "abcdefghi"


def test_a_draft_runs_without_the_refinement_shards(tmp_path: Path, tiny_checkpoint: Make, engine_model: Open) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=1, eos_token_id=None)
    expected = engine_model(folder).generate([5, 6], max_new_tokens=10, view="draft")
    for path in folder.glob("bitnest-refinement-*"):
        path.unlink()
    model = engine_model(folder, view="draft")
    result = model.generate([5, 6], max_new_tokens=10)
    assert result.token_ids == expected.token_ids
    assert result.stats.bytes_per_token == expected.stats.bytes_per_token
    assert model.logits([5, 6], "draft").shape == (2, 320)


def test_stats_of_a_run(model: NestedModel) -> None:
    result = model.generate([5, 6, 7], max_new_tokens=30, gamma=4)
    stats = result.stats
    assert (stats.device, stats.prompt_tokens, stats.new_tokens, stats.gamma) == ("cpu", 3, 30, 4)
    assert sum(stats.accepted_lengths) == stats.rounds
    assert stats.drafted == 4 * stats.rounds
    assert stats.acceptance == stats.accepted / stats.drafted
    assert 29 <= stats.accepted + stats.rounds < 29 + 5
    assert set(stats.seconds) == {"setup", "prefill", "rounds"}
    assert stats.tokens_per_second == (stats.accepted + stats.rounds) / stats.seconds["rounds"]
    assert stats.cache_bytes == _engine(model).memory_bytes["cache"]
    json.dumps(stats.to_dict())
    once = model.generate([5, 6, 7], max_new_tokens=1).stats
    assert (once.rounds, once.acceptance, once.bytes_per_token, once.tokens_per_second) == (0, None, None, None)


@pytest.mark.parametrize("view", ["target", "draft"])
@pytest.mark.parametrize("nested_head", [False, True])
def test_bytes_are_counted_as_by_the_reference(
    nested_head: bool, view: Any, tmp_path: Path, tiny_checkpoint: Make, engine_model: Open
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", nested_head=nested_head, eos_token_id=None)
    kv = KvSettings(draft_switch_length=6, recent=2)
    model, reference = engine_model(folder), NestedModel.open(folder)
    options: dict[str, Any] = {"max_new_tokens": 10, "view": view, "kv": kv}
    found, expected = model.generate([5, 6], **options).stats, reference.generate([5, 6], **options).stats
    assert found.bytes_per_token == expected.bytes_per_token


def test_bytes_of_a_round_with_drafts(chain_checkpoint: Make, engine_model: Open) -> None:
    folder = chain_checkpoint("Pabcdefgh", eos_token_id=None)
    options: dict[str, Any] = {"gamma": 3, "kv": KvSettings(draft_switch_length=3, recent=1), "max_new_tokens": 9}
    found = engine_model(folder).generate("P", **options).stats
    expected = NestedModel.open(folder).generate("P", **options).stats
    assert (found.rounds, found.accepted) == (expected.rounds, expected.accepted) == (2, 6)
    assert found.bytes_per_token == expected.bytes_per_token


def test_logits_of_every_position(
    chain_checkpoint: Make, tmp_path: Path, tiny_checkpoint: Make, engine_model: Open
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    model, reference = engine_model(folder), NestedModel.open(folder)
    ids = torch.randint(3, 320, (35,), generator=torch.Generator().manual_seed(0)).tolist()
    for view in ("target", "draft"):
        found, expected = model.logits(ids, view), reference.logits(ids, view)
        assert (found.shape, found.dtype) == (expected.shape, torch.float32)
        assert float((found - expected).norm() / expected.norm()) < 0.05
    # Rows do not depend on what follows them.
    assert torch.equal(model.logits(ids)[:20], model.logits(ids[:20]))
    chain = chain_checkpoint("Pabcdefg")
    assert torch.equal(
        engine_model(chain).logits([3, 4, 5]).argmax(-1), NestedModel.open(chain).logits([3, 4, 5]).argmax(-1)
    )
    with pytest.raises(GenerationError, match="the prompt is empty"):
        model.logits([])


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("place", [0, 3], ids=["prompt", "third new token"])
def test_an_output_that_is_not_a_number(
    place: int,
    gamma: int,
    open_model: Open,
    chain_checkpoint: Make,
    edit_shard: Callable[..., None],
    toy_ids_of: Callable[[str], list[int]],
) -> None:
    folder = chain_checkpoint("Pabcdefgh", eos_token_id=None)
    token = toy_ids_of("Pabc"[place])[0]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][token] = float("nan")

    edit_shard(folder, "base", edit)
    model = open_model(folder)
    message = (
        f"{folder.name}: the model's output is not a number. "
        "Look for broken tensors with 'bitnest-format validate --deep'."
    )
    for _ in range(2):
        with pytest.raises(GenerationError) as error:
            model.generate("P", max_new_tokens=8, gamma=gamma)
        assert str(error.value) == message
    # What came before is not lost, and neither is the model.
    assert model.generate("P", max_new_tokens=1).text == "a" if place else True
    with pytest.raises(GenerationError) as error:
        model.logits([token])
    assert str(error.value) == message


def test_a_text_that_does_not_fit_into_memory(
    tmp_path: Path, tiny_checkpoint: Make, engine_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_model(tiny_checkpoint(tmp_path / "model", max_position_embeddings=65536, eos_token_id=None))
    needs = _decoder(model)._needs()["nested"]
    monkeypatch.setattr(gpu_decoder, "available_bytes", lambda device: needs.total(20000) - needs.weights)
    with pytest.raises(GenerationError) as error:
        model.generate([5], max_new_tokens=65535)
    assert str(error.value).startswith("cpu: out of memory: decoding needs 0.")
    assert str(error.value).endswith("16384 tokens of prompt and --max-new-tokens together, --device cpu.")
    assert len(model.generate([5], max_new_tokens=3).token_ids) == 3
    monkeypatch.setattr(gpu_decoder, "available_bytes", lambda device: 1000)
    with pytest.raises(GenerationError, match=r"of weights, .* What fits: --device cpu\."):
        engine_model(model.checkpoint.folder)


@pytest.mark.parametrize("where", ["buffers", "prompt", "rounds"])
@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")]
)
def test_running_out_of_memory(
    failure: RuntimeError, where: str, model: NestedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise failure

    names = {"buffers": "__init__", "prompt": "prefill", "rounds": "prepare"}
    with monkeypatch.context() as patched:
        patched.setattr(Engine, names[where], fail)
        with pytest.raises(GenerationError, match=r"cpu: out of memory: .* What fits: .*--device cpu\.") as error:
            model.generate([5], max_new_tokens=400)
        assert error.value.__cause__ is failure
        assert _decoder(model).engine is None
    assert len(model.generate([5], max_new_tokens=3).token_ids) == 3


def test_other_failures_are_left_alone(model: NestedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RuntimeError("CUDA error: misaligned address")

    def fail(*arguments: Any) -> None:
        raise failure

    monkeypatch.setattr(Engine, "prefill", fail)
    with pytest.raises(RuntimeError) as error:
        model.generate([5])
    assert error.value is failure


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every device but the CPU is `cuda:0`; what would be loaded there is listed, and decodes on the CPU."""
    loaded: list[tuple[Any, ...]] = []

    def choose(device: Any) -> DeviceChoice:
        return DeviceChoice(CPU if str(device) == "cpu" else torch.device("cuda", 0))

    class Pretended(GpuDecoder):
        def __init__(self, checkpoint: Checkpoint, view: Any, device: torch.device, ops: Any):
            loaded.append((view, device))
            super().__init__(checkpoint, view, CPU, plain_ops())

    monkeypatch.setattr(generate_module, "choose_device", choose)
    monkeypatch.setattr(generate_module, "GpuDecoder", Pretended)
    monkeypatch.setattr(generate_module, "triton_ops", lambda: None)
    return loaded


def test_a_gpu_is_taken_where_there_is_one(
    pretended_gpu: list[tuple[Any, ...]], tmp_path: Path, tiny_checkpoint: Make
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    assert NestedModel.open(folder).device_choice == DeviceChoice(torch.device("cuda", 0))
    NestedModel.open(folder, view="draft", device="cuda:0")
    assert NestedModel.open(folder, device="cpu").device_choice == DeviceChoice(CPU)
    assert pretended_gpu == [("nested", torch.device("cuda", 0)), ("draft", torch.device("cuda", 0))]


def test_a_checkpoint_that_the_gpu_kernels_cannot_take(
    pretended_gpu: list[tuple[Any, ...]], tmp_path: Path, tiny_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    obstacles = ["head_dim is 6. Use --device cpu.", "one layer: 7 inputs. Use --device cpu."]
    monkeypatch.setattr(generate_module, "gpu_obstacles", lambda architecture, checkpoint: obstacles)
    for named in ("cuda", "cuda:0"):
        with pytest.raises(UnsupportedModelError) as error:
            NestedModel.open(folder, device=named)
        assert error.value.problems == obstacles
    with pytest.warns(DeviceWarning) as warned:
        model = NestedModel.open(folder)
    assert [str(warning.message) for warning in warned] == [
        "head_dim is 6; one layer: 7 inputs; decoding on the CPU instead"
    ]
    assert model.generate([5], max_new_tokens=2).stats.device == "cpu"
    assert pretended_gpu == []
