"""Write a GGUF file again with its attention weights in another storage format, to see what that alone moves.

    python examples/requantise.py model.gguf Q8_0 model-q8.gguf
    headspan diff model.gguf model-q8.gguf

Formats: F32, F16, BF16, and those that the gguf package rounds to: Q8_0, Q5_1, Q5_0, Q4_1, Q4_0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants


def requantise(source: Path, kind: str, target: Path) -> int:
    """Copy a file, its attention weights stored as ``kind``; returns how many were."""
    wanted = GGMLQuantizationType[kind]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    changed = 0
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if ".attn_" in tensor.name and tensor.name.endswith(".weight") and len(tensor.shape) == 2:
            data = quants.quantize(quants.dequantize(data, stored), wanted)
            stored, changed = wanted, changed + 1
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description="Store the attention weights of a GGUF file in another format.")
    parser.add_argument("source", type=Path)
    parser.add_argument("kind", choices=["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.target.exists():
        parser.error(f"{arguments.target} exists already")
    print(f"{requantise(arguments.source, arguments.kind, arguments.target)} tensors stored as {arguments.kind}")


if __name__ == "__main__":
    main()
