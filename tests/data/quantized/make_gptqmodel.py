"""Writes gptqmodel.safetensors: Linears of a tiny llama quantized by GPTQModel 7.6.0, and the values it computes with.

Run with gptqmodel==7.6.0 and its dependencies, TORCHDYNAMO_DISABLE=1 GPTQMODEL_CPU_WORKERS=2:
`python make_gptqmodel.py FOLDER`, where FOLDER is an empty one for the models.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "eos_token_id": 0,
         "bos_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
KEPT = ("self_attn.v_proj", "mlp.down_proj")
PARTS = ("qweight", "qzeros", "scales", "g_idx")

work = Path(sys.argv[1])
torch.manual_seed(0)
base = work / "base"
model = LlamaForCausalLM(LlamaConfig(**SHAPE))
for weight in model.parameters():
    if weight.ndim == 2:
        torch.nn.init.normal_(weight, std=0.05)
model.save_pretrained(base)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0], pad_token=alphabet[0]).save_pretrained(base)

tensors, configs = {}, {}
for kind, bits, sym, desc_act, layout in (
    ("v2_desc_act", 4, True, True, "gptq_v2"), ("v1_asym", 4, False, False, "gptq"),
    ("v1_sym8", 8, True, False, "gptq"),
):  # fmt: skip
    config = QuantizeConfig(bits=bits, group_size=32, sym=sym, desc_act=desc_act, act_group_aware=False, format=layout)
    quantizer = GPTQModel.load(str(base), config)
    texts = [f"{i} " + "the quick brown fox jumps over the lazy dog " * 4 for i in range(32)]
    quantizer.quantize(texts, batch_size=1)
    quantizer.save(str(work / kind))
    configs[kind] = json.loads((work / kind / "config.json").read_text())["quantization_config"]
    stored = load_file(next((work / kind).glob("*.safetensors")))
    loaded = GPTQModel.load(str(work / kind), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    for name in KEPT:
        module = loaded.model.get_submodule(f"model.layers.0.{name}")
        for part in PARTS:
            tensors[f"{kind}.{name}.{part}"] = stored[f"model.layers.0.{name}.{part}"]
        tensors[f"{kind}.{name}.values"] = module.dequantize_weight().t().half().contiguous()
save_file(tensors, "gptqmodel.safetensors", {"producer": "gptqmodel 7.6.0", "configs": json.dumps(configs)})
