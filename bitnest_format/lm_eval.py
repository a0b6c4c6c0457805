"""Nested checkpoints in EleutherAI's lm-evaluation-harness. Importing this module makes `--model bitnest` known to it.

    python -m bitnest_format.lm_eval run --model bitnest --model_args pretrained=PATH_OR_REPO,view=nested --tasks piqa

    import bitnest_format.lm_eval
    lm_eval.simple_evaluate("bitnest", {"pretrained": path_or_repo_id, "view": "draft"}, tasks=["piqa"])

The harness looks for no plug-ins of itself, so its own command `lm-eval` does not know the model; the command above is
that command after this import, with all of its options. transformers' models of nested checkpoints work there too
(`--model hf`). Arguments are those of `bitnest_format.lm_eval_model.BitnestLM`. Needs the extra `eval`.
"""

import sys

try:
    import bitnest_format.transformers  # noqa: F401  # for --model hf
    from bitnest_format.lm_eval_model import BitnestLM
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lm_eval":
        raise
    raise ModuleNotFoundError(
        "lm_eval is not installed; 'pip install bitnest-format[eval]' brings it", name="lm_eval"
    ) from None

from bitnest_format.errors import BitnestError

__all__ = ["BitnestLM"]


def main() -> None:
    """The harness's command line; a known failure is one sentence and its exit status."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except BitnestError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
