"""Writes packing.json, composing.json, refinement.json, kv.json and activation.json beside this file.

Plain Python on purpose: exact fractions, rounded by hand where the specification rounds, and nothing of the
package, so that a wrong encoder and its matching decoder cannot agree with each other. Run it from anywhere:

    python spec/vectors/generate_arithmetic.py
"""

from __future__ import annotations

import json
import random
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PRECISION = {"F16": (11, -24), "F32": (24, -149)}  # significant bits, exponent of the smallest subnormal
SMALLEST_SCALE = Fraction(1, 2**120)


def rounded(value: Fraction, kind: str = "F32") -> Fraction:
    """The nearest number of a binary floating-point type, ties to even."""
    if value == 0:
        return Fraction(0)
    bits, smallest = PRECISION[kind]
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - bits + 1, smallest)
    return round(value / quantum) * quantum


def bits(value: Fraction, kind: str = "F32") -> str:
    """The bit pattern of an exactly representable number, in hexadecimal, most significant digit first."""
    number = float(value)
    assert Fraction(number) == value
    packed = struct.pack(">e" if kind == "F16" else ">f", number)
    assert Fraction(struct.unpack(">e" if kind == "F16" else ">f", packed)[0]) == value
    return packed.hex()


def scale_record(value: Fraction, kind: str) -> dict[str, str]:
    return {"type": kind, "bits": bits(value, kind), "decimal": repr(float(value))}


def clip(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def any_number(generator: random.Random) -> Fraction:
    """A float32 number between -3 and 3."""
    return Fraction(generator.randint(-3 * 2**20, 3 * 2**20), 2**20)


def word_of(nibbles: list[int]) -> int:
    word = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles))
    return word - 2**32 if word >= 2**31 else word


def packing() -> dict[str, Any]:
    generator = random.Random(20261130)
    inputs = [
        ("the worked example of the specification", [[-8, -7, -1, 0, 1, 2, 6, 7]]),
        ("all codes -8: words of zero bits", [[-8] * 8]),
        ("all codes 7: words of one bits", [[7] * 8]),
        ("all codes 0", [[0] * 8]),
        ("first input alone: the lowest four bits", [[7, -8, -8, -8, -8, -8, -8, -8]]),
        ("last input alone: the highest four bits, the sign of the word", [[-8, -8, -8, -8, -8, -8, -8, 7]]),
        ("two outputs of sixteen inputs: every code in both orders", [[*range(-8, 8)], [*range(7, -9, -1)]]),
        ("three outputs of 24 inputs", [[generator.randint(-8, 7) for _ in range(24)] for _ in range(3)]),
        ("five outputs of 136 inputs", [[generator.randint(-8, 7) for _ in range(136)] for _ in range(5)]),
    ]
    cases: list[dict[str, Any]] = []
    for description, codes in inputs:
        words = [[word_of([q + 8 for q in row[i : i + 8]]) for i in range(0, len(row), 8)] for row in codes]
        raw = b"".join(struct.pack("<i", word) for row in words for word in row)
        expected = {"words": words, "bytes": raw.hex()}
        cases.append({"description": description, "input": {"codes": codes}, "expected": expected})
    for description, codes in [
        ("seven inputs do not fill a word", [[0] * 7]),
        ("nine inputs do not fill two words", [[0] * 9]),
        ("8 is no code", [[8] + [0] * 7]),
        ("-9 is no code", [[-9] + [0] * 7]),
    ]:
        cases.append({"description": description, "input": {"codes": codes}, "expected": "refused"})
    return {
        "description": "Codes [outputs][inputs] as int32 words [outputs][inputs / 8] and as the bytes on disk.",
        "cases": cases,
    }


def composing() -> dict[str, Any]:
    codes = range(-8, 8)
    pairs: list[dict[str, Any]] = []
    for q4 in codes:
        for qr in codes:
            allowed = q4 > -8 or qr >= 0
            pairs.append({"q4": q4, "qr": qr, "allowed": allowed, "composed": 16 * q4 + qr if allowed else None})
    scales = [
        ("a power of two", Fraction(1, 128), "F16"),
        ("an ordinary scale", rounded(Fraction(123, 10000), "F16"), "F16"),
        ("below 2^-10, where a float16 sixteenth loses bits", rounded(Fraction(87, 100000), "F16"), "F16"),
        ("the smallest normal float16", Fraction(1, 2**14), "F16"),
        ("2^-21, whose sixteenth would be zero in float16", Fraction(1, 2**21), "F16"),
        ("2^-24 = 5.96e-8, the smallest subnormal float16", Fraction(1, 2**24), "F16"),
        ("the largest subnormal float16", Fraction(1023, 2**24), "F16"),
        ("one", Fraction(1), "F16"),
        ("65504, the largest float16", Fraction(65504), "F16"),
        ("above the range of float16", rounded(Fraction(500000, 7)), "F32"),
        ("a float32 scale with all its bits in use", rounded(Fraction(1, 3)), "F32"),
        ("1e-30", rounded(Fraction(1, 10**30)), "F32"),
        ("1e30", rounded(Fraction(10**30)), "F32"),
        ("2^-120, the smallest scale", Fraction(1, 2**120), "F32"),
        ("2^120, the largest scale", Fraction(2**120), "F32"),
    ]
    views: list[dict[str, Any]] = []
    for description, scale, kind in scales:
        fine = rounded(scale / 16)
        assert fine == scale / 16
        views.append(
            {
                "description": description,
                "scale": scale_record(scale, kind),
                "draft": [bits(rounded(q4 * scale)) for q4 in codes],
                "target": [bits(rounded(pair["composed"] * fine)) for pair in pairs if pair["allowed"]],
            }
        )
    return {
        "description": (
            "pairs: all 256 pairs of codes, in order. views: for each scale the draft weight of q4 = -8 to 7, and "
            "the target weight of every allowed pair in the order of pairs, as float32 bit patterns."
        ),
        "pairs": pairs,
        "views": views,
    }


def refine(weight: Fraction, base: int, scale: Fraction) -> int:
    low = 0 if base == -8 else -8
    exact = (weight - base * scale) / (scale / 16)
    single = rounded(rounded(weight - rounded(base * scale)) / rounded(scale / 16))
    # A vector must not depend on how precisely a writer computes.
    assert round(exact) == round(single)
    return clip(round(exact), low, 7)


def refinement() -> dict[str, Any]:
    eighth, odd = Fraction(1, 8), rounded(Fraction(173, 10000), "F16")
    rows = [
        ("residuals on the grid, a base code of 1", eighth, 1, [eighth + k * eighth / 16 for k in range(-8, 8)]),
        ("half way between two codes: the even one", eighth, 2, [2 * eighth + k * eighth / 32 for k in (-3, -1, 1, 3)]),
        ("below and above the range: clipped", eighth, 0, [eighth * k / 16 for k in (-48, -9, -8, 7, 8, 48)]),
        (
            "-8.5 and 7.5 sixteenths: ties at the ends",
            eighth,
            3,
            [eighth * Fraction(k, 32) + 3 * eighth for k in (-17, 15)],
        ),
        (
            "q4 = -8: negative residuals become 0",
            eighth,
            -8,
            [-8 * eighth + k * eighth / 16 for k in (-9, -1, 0, 1, 7, 9)],
        ),
        ("q4 = -8: minus and plus half a step", eighth, -8, [-8 * eighth + k * eighth / 32 for k in (-1, 1, 3)]),
        (
            "q4 = 7: the top of the composed range is 119",
            eighth,
            7,
            [7 * eighth + k * eighth / 16 for k in (-8, 6, 7, 8)],
        ),
        ("zero weights", eighth, 0, [Fraction(0)] * 3),
        ("a scale that is no power of two", odd, -3, [rounded(odd * Fraction(k, 64)) for k in range(-230, -150, 7)]),
        ("2^-24 as scale", Fraction(1, 2**24), 2, [Fraction(k, 2**28) for k in (24, 31, 32, 39, 45)]),
        ("2^120 as scale", Fraction(2**120), -5, [Fraction(k * 2**116) for k in (-88, -80, -73, -60)]),
    ]
    closed = [
        {
            "description": description,
            "input": {
                "scale": scale_record(scale, "F32"),
                "q4": base,
                "weights": [bits(weight) for weight in weights],
            },
            "expected": {"qr": [refine(weight, base, scale) for weight in weights]},
        }
        for description, scale, base, weights in rows
    ]
    steps = [
        ("ties go to the even code", eighth, [Fraction(k, 2) * eighth for k in range(-17, 16, 2)]),
        ("clipped to -8 and 7", eighth, [k * eighth for k in (-100, -9, -8, 7, 8, 100)]),
        ("an ordinary scale", odd, [rounded(odd * Fraction(k, 10)) for k in (-83, -79, -14, 3, 26, 68, 74)]),
    ]
    nearest = [
        {
            "description": description,
            "input": {"scale": scale_record(scale, "F32"), "weights": [bits(weight) for weight in weights]},
            "expected": {"q4": [clip(round(weight / scale), -8, 7) for weight in weights]},
        }
        for description, scale, weights in steps
    ]
    return {
        "description": (
            "closed_form: the refinement code of weights beside a fixed base code (Eq. 9). round_to_nearest: the base "
            "code of weights without error feedback. Scales and weights are float32 bit patterns."
        ),
        "closed_form": closed,
        "round_to_nearest": nearest,
    }


def kv() -> dict[str, Any]:
    generator = random.Random(7)
    worked = [Fraction(14, 10), Fraction(-7, 10), Fraction(31, 100), Fraction(0)]
    vectors = [
        ("the worked vector 1.4, -0.7, 0.31, 0", [rounded(x) for x in worked]),
        ("zeros", [Fraction(0)] * 8),
        ("one entry", [Fraction(-3)]),
        ("equal entries", [Fraction(5, 2)] * 4),
        ("an odd length", [any_number(generator) for _ in range(7)]),
        ("a head of 64", [any_number(generator) for _ in range(64)]),
        ("a large outlier", [Fraction(1000), *(any_number(generator) for _ in range(15))]),
        ("tiny entries", [rounded(Fraction(k, 7 * 10**30)) for k in (-9, 4, 1, 0)]),
        ("huge entries", [rounded(Fraction(k * 10**29)) for k in (-9, 4, 1, 0)]),
        ("the largest entry negative, residual ties", [Fraction(-7), Fraction(65, 32), Fraction(67, 32), Fraction(1)]),
    ]
    cases: list[dict[str, Any]] = []
    for description, vector in vectors:
        scale = max(rounded(max(map(abs, vector)) / 7), SMALLEST_SCALE)
        fine = rounded(scale / 16)
        base = [clip(round(rounded(x / scale)), -8, 7) for x in vector]
        residual = [rounded(rounded(x - rounded(q * scale)) / fine) for x, q in zip(vector, base, strict=True)]
        refinement = [clip(round(r), -8, 7) for r in residual]
        zeros = not any(vector)
        cases.append(
            {
                "description": description,
                "input": {"vector": list(map(bits, vector)), "decimal": [float(x) for x in vector]},
                "expected": {
                    # Any finite positive scale will do for a vector of zeros.
                    "scale": None if zeros else scale_record(scale, "F32"),
                    "q4": base,
                    "qr": refinement,
                    "draft": [bits(rounded(q * scale)) for q in base],
                    "target": [bits(rounded((16 * q + r) * fine)) for q, r in zip(base, refinement, strict=True)],
                },
            }
        )
    return {
        "description": (
            "Keys or values of one token and one KV head (Eqs. 11-14): every operation rounded to float32. "
            "Floats are float32 bit patterns."
        ),
        "cases": cases,
    }


def activation() -> dict[str, Any]:
    generator = random.Random(127)
    rows = [
        ("the largest entry becomes 127", [Fraction(127), Fraction(1), Fraction(-64), Fraction(0)]),
        ("the largest entry negative: -127, never -128", [Fraction(-127), Fraction(126), Fraction(5)]),
        ("ties go to the even code", [Fraction(127), *(Fraction(k, 2) for k in range(-5, 6, 2))]),
        ("zeros", [Fraction(0)] * 6),
        ("one entry", [Fraction(-1, 3)]),
        ("random", [any_number(generator) for _ in range(64)]),
        ("an outlier flattens the rest", [Fraction(5000), *(9 * any_number(generator) for _ in range(31))]),
        ("tiny entries", [Fraction(k, 10**33) for k in (-900, 400, 3, 0)]),
        ("huge entries", [Fraction(k * 10**33) for k in (-900, 400, 3, 0)]),
    ]
    cases: list[dict[str, Any]] = []
    for description, exact in rows:
        row = [rounded(x) for x in exact]
        scale = max(rounded(max(map(abs, row)) / 127), SMALLEST_SCALE)
        cases.append(
            {
                "description": description,
                "input": {"row": list(map(bits, row)), "decimal": [float(x) for x in row]},
                "expected": {
                    # Any finite positive scale will do for a row of zeros.
                    "scale": scale_record(scale, "F32") if any(row) else None,
                    "codes": [clip(round(rounded(x / scale)), -127, 127) for x in row],
                },
            }
        )
    return {
        "description": "Inputs of quantized modules, one token a row: symmetric INT8. Floats are float32 bit patterns.",
        "cases": cases,
    }


def dump(data: dict[str, Any]) -> str:
    """JSON with one case to a line: small, and readable in a diff."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list):
            rows = ",\n".join("    " + json.dumps(row) for row in value)
            parts.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    for build in (packing, composing, refinement, kv, activation):
        (HERE / f"{build.__name__}.json").write_text(dump(build()), encoding="utf-8")


if __name__ == "__main__":
    main()
