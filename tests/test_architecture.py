"""`config.json` as one record: both spellings of fields, defaults, and every problem at once."""

from __future__ import annotations

import math

import pytest

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.errors import UnsupportedModelError

SUPPORTED = (
    "llama, mistral, qwen2, qwen3, phi3, mixtral, qwen3_moe, gemma, gemma2, gemma3_text, llava, llava_next, openvla, "
    "gemma3, qwen2_vl, qwen2_5_vl"
)


FIELDS = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 320,
}


@pytest.fixture
def config(tiny_model):
    return tiny_model()[0]


def problems(config):
    with pytest.raises(UnsupportedModelError) as error:
        read_architecture(config)
    return error.value.problems


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_tensors_of_each_family(model_type, tiny_model):
    config, tensors = tiny_model(model_type)
    architecture = read_architecture(config)
    assert architecture.tensors() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {f"{name}.weight" for name, _ in architecture.modules()} <= tensors.keys()
    assert len(dict(architecture.modules())) == 14
    prefix = "model.layers.1.self_attn"
    assert (f"{prefix}.q_proj.bias" in tensors) == (model_type == "qwen2")
    assert f"{prefix}.o_proj.bias" not in tensors
    assert (f"{prefix}.q_norm.weight" in tensors) == (model_type == "qwen3")


def test_tied_embeddings_need_no_head(config):
    assert "lm_head.weight" in read_architecture(config).tensors()
    assert "lm_head.weight" not in read_architecture(config | {"tie_word_embeddings": True}).tensors()


@pytest.mark.parametrize(("head_dim", "expected"), [(128, 128), (None, 64)])
def test_head_size(head_dim, expected, tiny_model):
    """AR-1: head_dim counts where it is given; otherwise it is hidden / heads."""
    architecture = read_architecture(tiny_model("qwen3")[0] | {"head_dim": head_dim})
    assert architecture.head_dim == expected
    assert architecture.linear_shape("self_attn.q_proj") == (4 * expected, 256)
    assert architecture.linear_shape("self_attn.k_proj") == (2 * expected, 256)
    assert architecture.linear_shape("self_attn.o_proj") == (256, 4 * expected)


@pytest.mark.parametrize("value", [None, "absent"])
def test_key_value_heads_default_to_heads(value, config):
    """CF-4"""
    if value is None:
        config["num_key_value_heads"] = None
    else:
        del config["num_key_value_heads"]
    assert read_architecture(config).kv_heads == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e6}),
        ({"rope_theta": 1e6, "rope_scaling": {}}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        ({"rope_theta": None}, {"rope_type": "default", "rope_theta": 10000.0}),
    ],
    ids=str,
)
def test_both_spellings_of_rotary_settings(fields, expected, config):
    """CF-1, CF-2"""
    assert read_architecture(config | fields).rope == expected


def test_rotary_settings_that_disagree(config):
    """CF-1 (c)"""
    config |= {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 1e6}}
    assert problems(config) == [
        "config.json: rope_theta is 10000.0 but rope_parameters.rope_theta is 1000000.0; "
        "keep the one the model was trained with"
    ]


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"sliding_window": 16}, (None, None)),
        ("mistral", {"sliding_window": 16}, (16, 16)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, (None, None)),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (None, 16)),
        (
            "qwen2",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, None),
        ),
    ],
)
def test_sliding_windows(model_type, fields, expected, tiny_model):
    """CF-3"""
    assert read_architecture(tiny_model(model_type)[0] | fields).sliding_windows == expected


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size": None}, "hidden_size is missing, expected a positive integer"),
        ({"hidden_size": "256"}, "hidden_size is '256', expected a positive integer"),
        ({"hidden_size": True}, "hidden_size is True, expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0, expected a positive integer"),
        ({"vocab_size": 2**40}, f"vocab_size is {2**40}, expected a positive integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a positive integer of at most 10000"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 63}, "head_dim 63 is odd; rotary embedding needs pairs"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', expected a finite number, 0 or more"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a finite number, 0 or more"),
        ({"rope_theta": [1]}, "rope_theta is [1], expected a finite number, 0 or more"),
        ({"rope_scaling": 7}, "rope_parameters and rope_scaling must be objects or null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ],
    ids=str,
)
def test_one_problem(fields, problem, config):
    assert problems(config | fields) == [f"config.json: {problem}"]


def test_all_problems_at_once(config):
    for name in ("hidden_size", "num_attention_heads", "vocab_size"):
        del config[name]
    config["hidden_act"] = "relu"
    assert [problem.split()[1] for problem in problems(config)] == [
        "hidden_size",
        "num_attention_heads",
        "hidden_act",
        "vocab_size",
    ]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, f"model_type is None; supported are {SUPPORTED}. config.json has no model_type."),
        (
            {"model_type": "foo", "architectures": ["FooForConditionalGeneration"], "text_config": FIELDS},
            f"model_type is 'foo' (FooForConditionalGeneration); supported are {SUPPORTED}. Its language model is "
            "nested under text_config, in a wrapper that is not known: export that part alone and convert it.",
        ),
        (
            {"model_type": "foo", "architectures": [], "text_config": FIELDS, "vision_config": {}},
            f"model_type is 'foo'; supported are {SUPPORTED}. Its language model is nested under text_config, in a "
            "wrapper that is not known: export that part alone and convert it.",
        ),
    ],
    ids=["nothing", "nested", "nested without a name"],
)
def test_other_architectures_are_refused_by_name(config, problem):
    """AR-4, AR-7"""
    assert problems(config) == [f"config.json: {problem}"]


def test_a_field_that_is_nowhere():
    """AR-7: an unknown wrapper names what its language model's config lacks, a known one fills in transformers' own."""
    nested = {name: value for name, value in FIELDS.items() if name != "num_attention_heads"}
    config = {"architectures": ["FooForConditionalGeneration"], "text_config": nested, "vision_config": {}}
    first, second = problems(config)
    assert first.startswith("config.json: model_type is None (FooForConditionalGeneration); supported are llama,")
    assert second == "config.json: text_config.num_attention_heads is missing, expected a positive integer"
    assert read_architecture({"model_type": "llava", "text_config": nested}).heads == 32
    assert problems({"model_type": "qwen2_vl", "vision_config": {}, **nested}) == [
        "config.json: num_attention_heads is missing, expected a positive integer"
    ]


def test_a_wrapper_around_an_unknown_family():
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    assert problems(config | {"text_config": {"model_type": "gpt2"}})[0] == (
        "config.json: text_config.model_type is 'gpt2'; supported are llama, mistral, qwen2, qwen3, phi3, mixtral, "
        "qwen3_moe, gemma, gemma2, gemma3_text."
    )


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, "default"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}}, "default"),
        ({"rope_scaling": {"rope_type": "yarn", "mrope_section": [8, 12, 12], "factor": 4.0}}, "yarn"),
    ],
)
def test_positions_in_three_dimensions_are_ordinary_ones_in_a_text(fields, kind):
    rope = read_architecture({"model_type": "qwen2_5_vl", "vision_config": {}, **FIELDS, **fields}).rope
    assert rope["rope_type"] == kind
    assert "mrope_section" not in rope


def test_phi_3_positions():
    """Only the length that longrope's short frequencies are made for counts; Phi-3 has two more names for it."""
    scaling = {"type": "su", "short_factor": [1.0] * 24, "long_factor": [4.0] * 24}
    config = {
        "model_type": "phi3",
        **FIELDS,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": scaling,
    }
    architecture = read_architecture(config)
    assert (architecture.max_positions, architecture.longest_positions) == (4096, 131072)
    assert (architecture.rotary_size, architecture.head_dim) == (48, 64)
    assert architecture.rope["rope_type"] == "longrope"
    assert problems(config | {"partial_rotary_factor": 0.51, "head_dim": 100}) == [
        "config.json: partial_rotary_factor 0.51 of head_dim 100 is odd; rotary embedding needs pairs"
    ]


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("gemma2", {}, (4096, None, 4096, None, 4096, None)),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 8}, (None, 8) * 3),
        ("gemma3_text", {"sliding_window": 512}, (512, 512, 512, 512, 512, None)),
        ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 3}, (512, 512, None) * 2),
    ],
)
def test_windows_of_gemma(model_type, fields, windows):
    config = {**FIELDS, "model_type": model_type, "num_hidden_layers": 6, "hidden_act": "gelu_pytorch_tanh"}
    assert read_architecture(config | fields).sliding_windows == windows


def test_what_gemma_does_otherwise():
    config = {**FIELDS, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 128}
    architecture = read_architecture(config | {"query_pre_attn_scalar": 144})
    assert (architecture.attention_cap, architecture.logit_cap) == (50.0, 30.0)
    assert (architecture.embedding_factor, architecture.attention_factor) == (16.0, 1 / 12)
    assert architecture.tied_embeddings
    third = read_architecture(
        {**config, "model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    assert (third.attention_cap, third.logit_cap) == (None, None)
    assert third.rope == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert third.local_rope == {"rope_type": "default", "rope_theta": 1e4}
    assert problems(config | {"hidden_activation": "relu", "use_bidirectional_attention": True}) == [
        "config.json: hidden_activation is 'relu', expected 'gelu_pytorch_tanh'",
        "config.json: use_bidirectional_attention is true; texts are generated one way only",
    ]


def test_mixtures_of_experts():
    config = {**FIELDS, "model_type": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2}
    architecture = read_architecture(config | {"moe_intermediate_size": 64, "num_hidden_layers": 4})
    assert architecture.experts is not None
    assert architecture.experts.layers == {0, 1, 2, 3}
    sparse = read_architecture(
        config | {"moe_intermediate_size": 64, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert sparse.experts is not None
    assert sparse.experts.layers == {1}
    assert sparse.linear_shape("mlp.experts.2.down_proj") == (256, 64)
    assert sparse.linear_shape("mlp.down_proj") == (256, 512)
    assert problems(config | {"num_experts_per_tok": 5, "mlp_only_layers": 3}) == [
        "config.json: num_experts_per_tok is 5, expected a positive integer of at most 4",
        "config.json: mlp_only_layers is 3, expected a list of layers or null",
        "config.json: moe_intermediate_size is missing, expected a positive integer",
    ]


def test_the_record_is_frozen(config):
    architecture = read_architecture(config)
    assert isinstance(architecture, Architecture)
    with pytest.raises(AttributeError):
        architecture.layers = 3  # type: ignore[misc]


PUBLISHED = {
    "Phi-3-mini-4k-instruct": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064},
        3_821_079_552,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    """The sizes of their configs give the number of parameters that their pages state."""
    config, expected = PUBLISHED[name]
    shared = {"num_hidden_layers": 32, "num_attention_heads": 32}
    assert sum(math.prod(shape) for shape in read_architecture(shared | config).tensors().values()) == expected
