from __future__ import annotations

import pytest
import torch
import transformers

from llmctl.engine.models.block import DecoderBlock, dense_attend
from llmctl.engine.models.families import decoder_spec
from llmctl.quant.sites import fold_scales

from ..tiny import FAMILIES, VOCAB


def random_model(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise * 0.15)
    return model


def block_of(model: transformers.PreTrainedModel, layer: int) -> DecoderBlock:
    prefix = f"model.layers.{layer}."
    tensors = {k.removeprefix(prefix): v for k, v in model.state_dict().items() if k.startswith(prefix)}
    return DecoderBlock(decoder_spec(model.config.to_dict()), layer, tensors)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_blocks_compute_what_transformers_layers_compute(family: str) -> None:
    model = random_model(family)
    outputs = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, i, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    tokens = torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(0))
    model(tokens, use_cache=False)
    x = model.model.embed_tokens(tokens)
    for layer, expected in enumerate(outputs):
        x = block_of(model, layer)(x, torch.arange(48), dense_attend)
        largest = max(1.0, float(expected.abs().max()))  # float32 rounds relative to what is summed
        torch.testing.assert_close(x, expected, rtol=2e-5, atol=2e-5 * largest)


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_at_all_sites_leave_what_a_block_computes(family: str) -> None:
    block = block_of(random_model(family), 0)
    linears = [name for site in block.sites for name in site.linears]
    assert sorted(linears) == sorted(n for n, m in block.named_modules() if isinstance(m, torch.nn.Linear))
    x = torch.randn(2, 24, block.input_layernorm.weight.shape[0], generator=torch.Generator().manual_seed(1))
    before = block(x, torch.arange(24), dense_attend)
    for site in block.sites:
        readers = [block.get_submodule(name) for name in site.linears]
        width = readers[0].in_features
        scales = torch.rand(width, generator=torch.Generator().manual_seed(width)) + 0.5
        if site.shared is not None:
            scales = scales.reshape(-1, *site.shared)[:, :1].expand(-1, *site.shared).reshape(-1)
        fold_scales(block.get_submodule(site.previous), readers, scales, site.shared, site.offset)
    torch.testing.assert_close(block(x, torch.arange(24), dense_attend), before, rtol=1e-4, atol=1e-4)
