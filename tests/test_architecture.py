"""`config.json` as one record: both spellings of fields, defaults, and every problem at once."""

from __future__ import annotations

import math

import pytest

from bitnest_format.architecture import Architecture, read_architecture
from bitnest_format.errors import UnsupportedModelError


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
        ({}, "model_type is None; supported are llama, mistral, qwen2, qwen3. config.json has no model_type."),
        (
            {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
            "model_type is 'phi3' (Phi3ForCausalLM); supported are llama, mistral, qwen2, qwen3. "
            "Phi-3 fuses its query, key and value matrices; split them first.",
        ),
        (
            {"model_type": "gemma2", "architectures": []},
            "model_type is 'gemma2'; supported are llama, mistral, qwen2, qwen3. "
            "Gemma's norms stand after the sublayers too and cannot absorb a rotation.",
        ),
        (
            {"model_type": "foo", "architectures": ["FooForConditionalGeneration"], "text_config": {}},
            "model_type is 'foo' (FooForConditionalGeneration); supported are llama, mistral, qwen2, qwen3. "
            "Its language model is nested under text_config: export that part alone and convert it.",
        ),
    ],
    ids=["nothing", "phi3", "gemma2", "nested"],
)
def test_other_architectures_are_refused_by_name(config, problem):
    """AR-4, AR-7"""
    assert problems(config) == [f"config.json: {problem}"]


def test_the_record_is_frozen(config):
    architecture = read_architecture(config)
    assert isinstance(architecture, Architecture)
    with pytest.raises(AttributeError):
        architecture.layers = 3  # type: ignore[misc]
