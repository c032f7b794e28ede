"""Write tiny models with real random weights, once, into the rig's cache, without any download.

vLLM's dummy weights are so small that the output hardly depends on the KV cache; these are large enough that
a changed block changes the text.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE = Path(__file__).resolve().parent.parent.parent / ".rig"

VOCABULARY = 512
CORPUS = ("the quick brown fox jumps over the lazy dog " * 20, "hello world " * 30)
SPECIAL = ("<s>", "</s>")


def tiny_qwen3(
    dtype: str = "bfloat16",
    *,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 4,
    cache: Path = CACHE,
) -> Path:
    """Return the folder of a tiny Qwen3 in this dtype, writing it first if it is not there."""
    recipe = _qwen3_recipe(heads, kv_heads, layers)
    stock = (heads, kv_heads, layers) == (4, 2, 4)
    shape = "" if stock else f"-{heads}x{kv_heads}x{layers}"
    name = f"tiny-qwen3{shape}-{dtype}"
    return write_once(name, recipe, lambda f: _write_qwen3(f, dtype, recipe), cache)


def write_once(
    name: str, recipe: dict[str, Any], write: Callable[[Path], None], cache: Path
) -> Path:
    """Return the model folder of this name, with what ``write`` puts into it and a tokenizer."""
    folder = cache / "models" / name
    note = folder / "recipe.json"
    if note.exists() and json.loads(note.read_text()) == recipe:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write(scratch)
        _write_tokenizer(scratch)
        (scratch / note.name).write_text(json.dumps(recipe, indent=1) + "\n")
        scratch.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _qwen3_recipe(heads: int, kv_heads: int, layers: int) -> dict[str, Any]:
    """Return the model's configuration."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.08,
    }


def _write_qwen3(folder: Path, dtype: str, recipe: dict[str, Any]) -> None:
    """Write weights drawn with a fixed seed; the same numbers, rounded, in every dtype."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**recipe))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on two sentences: any text can be encoded, known words become single tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    wrapped.save_pretrained(folder)
