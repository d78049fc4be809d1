"""Checkpoints are checked before anything is built from them."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from llmctl.engine.load.checkpoint import open_checkpoint
from llmctl.engine.load.hub import Source
from llmctl.engine.load.model import open_model
from llmctl.engine.load.text import SamplingDefaults
from llmctl.kernels.errors import CheckpointError, UnsupportedModel


def opened(folder):
    return open_checkpoint(Source(folder, "hf", "tiny"))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_every_tensor_is_read_as_transformers_wrote_it(tmp_path, build_model):
    folder = tmp_path / "m"
    state = build_model(folder, dtype=torch.bfloat16)
    checkpoint = opened(folder)
    assert set(checkpoint.tensors) == set(state) - {"lm_head.weight"}
    for name in checkpoint.tensors:
        np.testing.assert_array_equal(checkpoint.read(name).dequantize(), state[name].float().numpy())


def test_an_untied_head_and_biases_are_found_in_the_tensors(tmp_path, build_model):
    folder = tmp_path / "m"
    state = build_model(folder, transformers.Qwen2Config, tie_word_embeddings=False)
    assert set(opened(folder).tensors) == set(state)
    assert "model.layers.0.self_attn.q_proj.bias" in state


def test_query_and_key_norms_are_found_in_the_tensors(tmp_path, build_model):
    folder = tmp_path / "m"
    build_model(folder, transformers.Qwen3Config)
    assert opened(folder).tensors["model.layers.1.self_attn.q_norm.weight"].shape == (16,)


def test_sharded_checkpoints_open_like_single_ones(tmp_path, build_model):
    state = build_model(tmp_path / "m", shard="50KB")
    checkpoint = opened(tmp_path / "m")
    assert len({tensor.path for tensor in checkpoint.tensors.values()}) > 1
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name).data, state[name].numpy())


@pytest.mark.parametrize(
    ("changes", "tensor", "keys"),
    [
        ({"num_attention_heads": 8}, "self_attn.q_proj.weight", "num_attention_heads, head_dim, hidden_size"),
        ({"num_key_value_heads": 1}, "self_attn.k_proj.weight", "num_key_value_heads, head_dim, hidden_size"),
        ({"intermediate_size": 128}, "mlp.gate_proj.weight", "intermediate_size, hidden_size"),
        ({"vocab_size": 301}, "model.embed_tokens.weight", "vocab_size, hidden_size"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors_names_both(model_folder, changes, tensor, keys):
    change_config(model_folder, **changes)
    with pytest.raises(CheckpointError, match=rf"{tensor}`.*has shape \[.*the config says \[.*\({keys}\)"):
        opened(model_folder)


def test_layers_that_the_config_does_not_count_are_not_left_out(model_folder):
    change_config(model_folder, num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match=r"decoder of 1 layers does not use: `model\.layers\.1"):
        opened(model_folder)


def test_layers_that_are_not_there_are_missed(model_folder):
    change_config(model_folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 9 of the tensors.*`model\.layers\.2"):
        opened(model_folder)


def test_a_missing_head_that_is_not_tied_is_missed(model_folder):
    change_config(model_folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"`lm_head\.weight`") as caught:
        opened(model_folder)
    assert "tie_word_embeddings" in caught.value.hint


def test_a_tensor_nobody_would_use_is_refused_and_old_rope_buffers_are_not(model_folder):
    def add_buffer(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_tensors(model_folder, add_buffer)
    opened(model_folder)

    def add_norm(tensors):
        tensors["model.layers.0.pre_feedforward_layernorm.weight"] = torch.ones(64)

    change_tensors(model_folder, add_norm)
    with pytest.raises(UnsupportedModel, match="pre_feedforward_layernorm"):
        opened(model_folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_value_that_is_not_finite_is_named(tmp_path, build_model, dtype, value):
    folder = tmp_path / "m"
    build_model(folder, dtype=dtype)

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3, 7] = value
        tensors["model.layers.0.mlp.up_proj.weight"][5, 1] = value

    change_tensors(folder, spoil)
    checkpoint = opened(folder)
    checkpoint.read("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(CheckpointError, match=r"`model\.layers\.0\.mlp\.up_proj\.weight`.*first at \[3, 7\]"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight")


def test_integer_weights_are_refused_by_name(model_folder):
    def to_ints(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)

    change_tensors(model_folder, to_ints)
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight.*I8"):
        opened(model_folder)


def test_a_folder_without_tokenizer_is_refused(model_folder):
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer") as caught:
        opened(model_folder)
    assert "tokenizer.json" in caught.value.hint


@pytest.mark.parametrize("content", ["", "[]", "{", "\ufeff{}", "[" * 100_000])
def test_a_broken_config_is_an_error(model_folder, content):
    (model_folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        opened(model_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 1 << 31}, "`max_position_embeddings` in the config is 2147483648, expected"),
        ({"hidden_size": -64}, "`hidden_size` in the config is -64, expected an integer from 1"),
        ({"vocab_size": "300"}, "`vocab_size` in the config is '300', expected an integer from 1"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` in the config is nan, expected a number above 0"),
        ({"sliding_window": -5}, "`sliding_window` in the config is -5, expected an integer from 0"),
        ({"eos_token_id": 300}, r"`eos_token_id` is 300, expected a token id \(from 0 to 299\)"),
        ({"eos_token_id": [2, 9999]}, r"`eos_token_id` is \[2, 9999\], expected a token id \(from 0 to 299\)"),
        ({"hidden_act": "foo"}, "activation 'foo' in `hidden_act`"),
        (
            {"num_attention_heads": 5, "head_dim": None, "num_key_value_heads": 5},
            "no multiple of `num_attention_heads`",
        ),
        ({"num_key_value_heads": 3}, "no multiple of `num_key_value_heads`, 3"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' in `rope_type`"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "the config has no `factor`"),
        ({"model_type": "gemma3", "text_config": 5}, "`text_config` in the config is 5"),
        ({"quantization_config": []}, r"`quantization_config` of the quantization config is \[\], expected an object"),
        ({"quantization_config": {"quant_method": "foo"}}, "quantized with `foo`"),
    ],
)
def test_a_wrong_value_names_file_key_value_and_limit(model_folder, changes, message):
    change_config(model_folder, **changes)
    path = model_folder / "config.json"
    with pytest.raises((CheckpointError, UnsupportedModel), match=f"^`{path}`: .*{message}") as caught:
        opened(model_folder)
    assert caught.value.hint


def test_a_wrong_value_of_another_quantization_config_names_that_file(model_folder):
    (model_folder / "quant_config.json").write_text(json.dumps({"w_bit": "4", "q_group_size": 64}))
    with pytest.raises(CheckpointError, match=f"^`{model_folder / 'quant_config.json'}`: `w_bit`"):
        opened(model_folder)


def test_what_neither_decoder_knows_is_told_with_both_reasons(model_folder, tmp_path):
    change_config(model_folder, hidden_act="foo")
    with pytest.raises(UnsupportedModel, match=r"config\.json`: .*activation 'foo' in `hidden_act`; supported: silu"):
        open_model(
            Source(model_folder, "hf", "x"), implementation="auto", dtype="auto", cache=tmp_path / "c", progress=None
        )


def test_text_side_is_gathered_from_all_files(model_folder):
    (model_folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 40, "do_sample": True})
    )
    chat = opened(model_folder).load_text().chat
    assert chat.eos_ids == (0, 2)
    assert chat.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert chat.template.startswith("{% for message in messages %}")
    assert chat.defaults == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40)


def test_the_named_eos_token_ends_texts_too(model_folder):
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert opened(model_folder).load_text().chat.eos_ids == (0, 2)
    (model_folder / "generation_config.json").unlink()
    change_config(model_folder, eos_token_id=1)
    assert opened(model_folder).load_text().chat.eos_ids == (1, 2)


def test_a_token_in_the_padding_of_the_vocabulary_may_end_texts_and_one_beyond_it_may_not(model_folder):
    change_config(model_folder, eos_token_id=299)
    (model_folder / "generation_config.json").unlink()
    assert opened(model_folder).load_text().chat.eos_ids == (299, 2)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|{number}|>" for number in range(count, 301)])
    tokenizer.save(str(model_folder / "tokenizer.json"))
    path = model_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|300|>"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json`: `eos_token`, `<\|300\|>`, is token 300, .*0 to 299"):
        opened(model_folder).load_text()


def test_a_template_file_wins_and_a_list_has_a_default(model_folder):
    path = model_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps(config))
    assert opened(model_folder).load_text().chat.template == "d"
    (model_folder / "chat_template.jinja").write_text("own")
    assert opened(model_folder).load_text().chat.template == "own"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", {"eos_token_id": "2"}, "`eos_token_id` is '2', expected a token id"),
        ("generation_config.json", {"eos_token_id": [-1]}, r"`eos_token_id` is \[-1\]"),
        ("generation_config.json", {"eos_token_id": [2, 300]}, r"`eos_token_id` is \[2, 300\], .*from 0 to 299\)"),
        ("generation_config.json", {"temperature": "hot"}, "`temperature` is 'hot': expected `float`"),
        ("generation_config.json", {"temperature": -1}, "`temperature` is -1.0, it must be from 0.0 to 100.0"),
        ("generation_config.json", {"top_p": 2}, "`top_p` is 2.0, it must be from 0.0 to 1.0"),
        ("generation_config.json", {"repetition_penalty": 0}, "`repetition_penalty` is 0"),
        ("generation_config.json", [], "holds no JSON object"),
        ("config.json", {"eos_token_id": 1.5}, "`eos_token_id` is 1.5"),
        ("tokenizer_config.json", {"bos_token": 7}, "`bos_token` is 7, expected a token"),
        ("tokenizer_config.json", {"eos_token": {"content": 7}}, "`eos_token` is {'content': 7}"),
        ("tokenizer_config.json", {"chat_template": 7}, "`chat_template` is 7, expected a text"),
        ("special_tokens_map.json", {"unk_token": 7}, "`unk_token` is 7"),
        ("tokenizer.json", {"added_tokens": 7}, "is no tokenizer"),
        ("tokenizer.json", {"model": {}}, "is no tokenizer"),
    ],
)
def test_wrong_values_beside_the_config_name_their_file(model_folder, file, content, message):
    path = model_folder / file
    if isinstance(content, dict) and path.exists():
        content = json.loads(path.read_text()) | content
    if file == "config.json":
        (model_folder / "generation_config.json").unlink()
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"^`{path}`:? {message}") as caught:
        opened(model_folder).load_text()
    assert caught.value.hint


def test_an_old_tokenizer_is_converted_with_the_ids_it_had(model_folder):
    whole = json.loads((model_folder / "tokenizer.json").read_text())
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        opened(model_folder)
    (model_folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in whole["model"]["merges"])
    (model_folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    path = model_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    text = opened(model_folder).load_text()
    original, converted = Tokenizer.from_str(json.dumps(whole)), Tokenizer.from_str(text.tokenizer_json)
    for sample in ("the quick brown fox", "Grüße 你好 🙂 12"):
        assert converted.encode(sample).ids == original.encode(sample).ids
    assert text.chat.eos_ids == (2,)
