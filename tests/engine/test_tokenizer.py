"""Encoding, chat templates, streaming and stop strings, with transformers and plain string search as oracles."""

import msgspec
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from llmctl.engine.load.text import ChatInfo
from llmctl.engine.tokenizer import IncrementalDecoder, StopMatcher, Tokenizer
from llmctl.kernels.errors import CapacityError, CheckpointError, UnsupportedModel, UsageError

CORPUS = ["the quick brown fox, it's 12345", "Grüße aus Köln 你好，世界 🙂🙃 привет", "def f(x):\n    return x\n"]
SPECIAL = ["<|end|>", "<|start|>"]
TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ('system', 'user', 'assistant') %}\n"
    "        {{- raise_exception('unknown role ' + message.role) }}\n"
    "    {%- elif message.role == 'system' %}{% continue %}\n"
    "    {%- elif message.role == 'assistant' %}\n"
    "        {{- '<|start|>assistant\\n' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- bos_token + message.role + '\\n' + message.content | trim + eos_token + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}\n"
    "{%- if thinking %}{{ '<think>' }}{% endif %}\n"
)
CHAT = ChatInfo(template=TEMPLATE, special_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>"}, eos_ids=(0,))


def byte_level_backend():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool use>", normalized=False), AddedToken("<日本>", normalized=False)])
    return backend


def sentence_piece_backend(strip=True):
    pieces = ["\u2581", *"abcthe你好é", "the", "\u2581the", "he", "th", "\u2581t", "\u2581b", "<0xZZ>"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("t", "h"), ("h", "e"), ("t", "he"), ("\u2581", "the"), ("\u2581", "t"), ("\u2581", "b")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool\u2581use>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", 2)])
    return backend


BACKENDS = {"bytes": byte_level_backend(), "pieces": sentence_piece_backend(), "bare": sentence_piece_backend(False)}
STYLES = tuple(BACKENDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    result = {}
    for style, backend in BACKENDS.items():
        folder = tmp_path_factory.mktemp(style)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "chat.json").write_bytes(msgspec.json.encode(CHAT))
        result[style] = Tokenizer(folder)
    return result


@pytest.fixture(scope="module")
def theirs():
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<|start|>", eos_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_text_survives_encoding_and_decoding(made, theirs, text):
    ids = made["bytes"].encode(text)
    assert ids == theirs(text)["input_ids"]
    assert made["bytes"].decode(ids, skip_special=False) == text


@pytest.mark.parametrize("style", STYLES)
def test_a_long_text_is_encoded_as_its_backend_does(made, style):
    text = " ".join(CORPUS * 200)
    assert made[style].encode(text) == BACKENDS[style].encode(text).ids
    with pytest.raises(UsageError, match="lone surrogate"):
        made[style].encode(text + "\ud800")


@pytest.mark.parametrize("style", STYLES)
def test_of_a_text_that_cannot_fit_only_a_piece_is_encoded(made, style):
    text = "the the " * (1 << 21)
    with pytest.raises(CapacityError, match=r"16777216 characters has more than \d{4,5} tokens, and .* for 1000"):
        made[style].encode(text, most=1000)


def test_a_text_of_few_tokens_is_not_refused_however_long_it_is(tmp_path):
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("~" * 100, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.json").write_bytes(msgspec.json.encode(CHAT))
    assert len(Tokenizer(tmp_path).encode("~" * 300_000, most=3000)) == 3000


def test_special_tokens_round_a_text_can_be_left_out(made):
    assert made["pieces"].encode("the b")[0] == 2
    assert made["pieces"].encode("the b", add_special=False) == made["pieces"].encode("the b")[1:]


def test_a_lone_surrogate_is_an_error_of_the_request(made):
    with pytest.raises(UsageError, match="lone surrogate"):
        made["bytes"].encode("a\ud800b")


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_decoding_is_that_of_the_library_for_any_ids(made, data, skip):
    backend, tokenizer = BACKENDS["bytes"], made["bytes"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans(), style=st.sampled_from(["pieces", "bare"]))
def test_sentence_piece_decoding_is_that_of_the_library_where_bytes_are_valid(made, data, skip, style):
    backend, tokenizer = BACKENDS[style], made[style]
    byte = [3 + value for value in range(256)]
    characters = st.characters(codec="utf-8").map(lambda c: [byte[value] for value in c.encode()])
    others = [i for i in range(tokenizer.vocab_size + 3) if i not in byte]
    parts = data.draw(st.lists(st.one_of(characters, st.sampled_from(others).map(lambda i: [i])), max_size=20))
    ids = [index for part in parts for index in part]
    assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


def test_invalid_bytes_do_not_take_valid_characters_with_them(made):
    ids = [3 + byte for byte in "你".encode() + b"\xff" + "é".encode()]
    assert made["pieces"].decode(ids) == "你\ufffdé"


@settings(deadline=None, max_examples=500)
@given(data=st.data(), skip=st.booleans(), style=st.sampled_from(STYLES))
def test_pushes_and_finish_joined_are_decode(made, data, skip, style):
    tokenizer = made[style]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = IncrementalDecoder(tokenizer, skip)
    texts, position = [], 0
    while position < len(ids):
        size = data.draw(st.integers(0, 4))
        texts.append(decoder.push(ids[position : position + size]))
        position += size
    assert "".join(texts) + decoder.finish() == tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=30), style=st.sampled_from(STYLES))
def test_a_split_character_is_never_shown_in_part(made, text, style):
    tokenizer = made[style]
    text = text.replace("\ufffd", "").replace("\u2581", "")
    ids = tokenizer.encode(text, add_special=False)
    whole = tokenizer.decode(ids, skip_special=False)
    decoder = IncrementalDecoder(tokenizer, skip_special=False)
    shown, known = "", b""
    for index in ids:
        shown += decoder.push([index])
        known += tokenizer.token_bytes(index)
        assert whole.startswith(shown)
        # and nothing but an unfinished character is held back
        stripped = style == "pieces" and known[:1] == b" "
        assert len(known) - len(shown.encode()) - stripped < 4
    assert shown + decoder.finish() == whole


def test_a_character_appears_with_its_last_byte(made):
    for style in ("bytes", "pieces"):
        tokenizer = made[style]
        decoder = IncrementalDecoder(tokenizer)
        ids = tokenizer.encode("b🙂", add_special=False)
        texts = [decoder.push([index]) for index in ids]
        assert texts[-1] == "🙂" and all("\ufffd" not in text for text in texts) and decoder.finish() == ""


def test_token_bytes_are_what_a_token_adds(made):
    tokenizer = made["bytes"]
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(index) for index in ids) == text.encode()
    assert made["pieces"].token_bytes(3 + 0xE4) == b"\xe4"
    assert made["pieces"].token_bytes(BACKENDS["pieces"].token_to_id("\u2581the")) == b" the"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == "<日本>".encode()
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match=f"no token {wrong}"):
            tokenizer.token_bytes(wrong)


def test_only_control_tokens_are_special(made):
    tokenizer = made["bytes"]
    assert [tokenizer.is_special(i) for i in (0, 1, 2)] == [True, True, False]
    assert not tokenizer.is_special(tokenizer.vocab_size - 2)  # <tool use>
    assert tokenizer.eos_ids == (0,) and tokenizer.vocab_size == BACKENDS["bytes"].get_vocab_size()


CONVERSATIONS = [
    [{"role": "user", "content": " hello "}],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b 你好"},
        {"role": "user", "content": "<|end|>"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"name": "f", "text": "<b> & 'ü'"}]])
def test_chats_are_rendered_and_encoded_as_by_transformers(made, theirs, messages, prompt, tools):
    tokenizer = made["bytes"]
    ours = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tools=tools)
    assert ours == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, tools=tools)
    encoded = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tools=tools)
    assert tokenizer.encode_chat(messages, prompt, tools) == list(encoded["input_ids"])


def test_template_variables_are_handed_on(made):
    messages = CONVERSATIONS[0]
    assert made["bytes"].apply_chat_template(messages, variables={"thinking": True}).endswith("<think>")
    assert "<think>" not in made["bytes"].apply_chat_template(messages)


def with_template(folder, template):
    byte_level_backend().save(str(folder / "tokenizer.json"))
    (folder / "chat.json").write_bytes(msgspec.json.encode(ChatInfo(template=template)))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "wizard", "content": "x"}], "unknown role wizard"),
        ([], "messages|undefined|index"),
        ([{"role": "assistant"}], "content|undefined"),
        ([{"role": "assistant", "content": ["x"]}], "list"),
    ],
)
def test_messages_that_a_template_refuses_are_errors_of_the_request(made, messages, message):
    with pytest.raises(UsageError, match=message):
        made["bytes"].apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ 1 // 0 }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_broken_or_hostile_template_is_an_error(tmp_path, template):
    with pytest.raises(UsageError, match="chat template"):
        with_template(tmp_path, template).apply_chat_template([{"role": "user", "content": "x"}])


def test_templates_know_the_time_and_strip_their_own_lines(tmp_path):
    template = "{% if true %}\n    {% set year = strftime_now('%Y') %}\n{{ year | length }}\n    {% endif %}\nend\n"
    assert with_template(tmp_path, template).apply_chat_template([{"role": "user", "content": "x"}]) == "4\nend"


def test_a_model_without_template_says_so(tmp_path):
    with pytest.raises(UsageError, match="no chat template"):
        with_template(tmp_path, "").encode_chat([{"role": "user", "content": "x"}])


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.json").write_bytes(msgspec.json.encode(CHAT))
    assert len(Tokenizer(tmp_path).encode("xyzxyz")) == len(byte_level_backend().encode("xyzxyz").ids)


def test_a_broken_file_or_an_unknown_decoder_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        Tokenizer(tmp_path)
    for decoder in (decoders.WordPiece(), None):
        backend = byte_level_backend()
        if decoder is not None:
            backend.decoder = decoder
        else:
            backend = Backend(models.BPE({"a": 0}, []))
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UnsupportedModel, match="cannot be streamed"):
            Tokenizer(tmp_path)


def stopped(text, stops):
    """The oracle: the stop string that begins first, the shortest of those, and the text before it."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


@settings(deadline=None, max_examples=1000)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    data=st.data(),
)
def test_stop_strings_are_found_as_in_the_whole_text(text, stops, data):
    matcher = StopMatcher(stops)
    shown, stop, position = "", None, 0
    while position < len(text) and stop is None:
        size = data.draw(st.integers(1, 5))
        part, stop = matcher.push(text[position : position + size])
        shown += part
        position += size
        assert stopped(text, stops)[0].startswith(shown)
    if stop is None:
        part, stop = matcher.finish()
        shown += part
    assert (shown, stop) == stopped(text, stops)
    assert matcher.push("abc" * 5) == ("", stop) or stop is None


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once():
    matcher = StopMatcher(["STOP", "\n\n"])
    assert matcher.push("hello S") == ("hello ", None)
    assert matcher.push("T") == ("", None)
    assert matcher.push("ART\n") == ("START", None)
    assert matcher.push("\nmore") == ("", "\n\n")
    assert matcher.push("anything") == ("", "\n\n")
    assert matcher.finish() == ("", "\n\n")


def test_without_stop_strings_nothing_is_held():
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None) and matcher.finish() == ("", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="stop string is empty"):
        StopMatcher(["a", ""])
