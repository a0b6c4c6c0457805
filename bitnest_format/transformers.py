"""Nested checkpoints in transformers. Importing this module is all that `from_pretrained` needs to read them.

    import bitnest_format.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path_or_repo_id)                     # the target view
    model.generate(**inputs, assistant_model=model.draft_view())                      # speculative: one set of weights

    config = bitnest_format.transformers.draft_config(path_or_repo_id)
    draft = AutoModelForCausalLM.from_pretrained(path_or_repo_id, config=config)      # base shards alone are read

The path over a repository id, generation, `device_map` and so on are those of transformers. What a layer computes, and
where, is said in `bitnest_format.runtime.hf_linear`.
"""

from bitnest_format.runtime.hf_attention import register_attention
from bitnest_format.runtime.hf_quantizer import BitnestConfig, BitnestQuantizer, draft_config, register

__all__ = ["BitnestConfig", "BitnestQuantizer", "draft_config"]

register()
register_attention()
