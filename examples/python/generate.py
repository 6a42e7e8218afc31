"""A model of transformers goes on with a text, over a 4-bit cache.

generate.py [MODEL]: a folder or name that transformers knows, or a GGUF file (needs the package gguf). Without one,
a small model with random weights, which says nothing of sense.
"""

import pathlib
import sys

try:
    import torch
    import transformers
except ImportError:
    sys.exit("generate.py needs torch and transformers")

from kvant.transformers import KvantCache

TEXT = "The key-value cache of a language model holds"


def load(path):
    """A model, and what turns text into tokens and back."""
    if path is None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, bos_token_id=None, eos_token_id=None, pad_token_id=0)
        model = transformers.LlamaForCausalLM(config)
        return model, lambda text: torch.tensor([list(text.encode())]), lambda ids: bytes(ids.tolist()).decode("latin1")
    folder, options = path, {}
    if path.endswith(".gguf"):
        folder, options = str(pathlib.Path(path).parent), {"gguf_file": pathlib.Path(path).name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model, lambda text: tokenizer(text, return_tensors="pt").input_ids, tokenizer.decode


@torch.no_grad()
def main(path=None):
    model, encode, decode = load(path)
    model.eval().set_attn_implementation("kvant")
    ids = encode(TEXT)
    cache = KvantCache(model.config, "int4_g64_R128_s4", capacity=1024)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=160, do_sample=False)
    print(decode(out[0]))
    print(f"{cache.get_seq_length()} tokens in {cache.cache.used_bytes >> 10} KiB; "
          f"{cache.cache.attention(model.config.num_attention_heads).explain(0)}")
    assert out.shape[1] == ids.shape[1] + 160


main(*sys.argv[1:])
