"""Convert a model, check the result with all its digests, and name the modules that came out worst.

python examples/convert_and_validate.py SOURCE OUTPUT
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bitnest_format.converters.options import ConvertOptions
from bitnest_format.converters.pipeline import convert
from bitnest_format.converters.sources import open_source
from bitnest_format.report import inspect_checkpoint
from bitnest_format.validation import validate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a Hugging Face folder or a GGUF file")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--calibration", default="builtin", help="a text like the one to generate")
    options = parser.parse_args()

    result = convert(open_source(options.source), options.output, ConvertOptions(calibration=options.calibration))
    print(f"{result.to_dict()['modules']} modules in {result.to_dict()['seconds']:.0f} s")

    findings = validate(options.output, deep=True)
    for finding in findings:
        print(finding)
    if findings:
        sys.exit(f"{options.output}: {len(findings)} findings")

    modules = inspect_checkpoint(options.output).to_dict()["modules"]
    for module in sorted(modules, key=lambda module: -module["draft_error"])[:3]:
        print(f"{module['name']}: draft {module['draft_error']:.1%}, target {module['target_error']:.1%}")


if __name__ == "__main__":
    main()
