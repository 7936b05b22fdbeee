import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headway.errors import ConfigError
from headway.model.tokenizer import build_character_tokenizer, decode, encode_prompt, load_tokenizer, render_chat

ALPHABET = "0123456789+=;# \n<eos>é"
TEXTS = ["1+2=3;#3", " 12 \n\n  +", "<eos>", "é#é", ""]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_character_tokenizer("<user>#ytm 123\n=")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_character_tokenizer_exactly(text: str) -> None:
    tokenizer = build_character_tokenizer(ALPHABET)
    tokens = encode_prompt(tokenizer, text, chat=False)
    assert tokens.dtype == np.int32
    assert len(tokens) == len(text)
    assert decode(tokenizer, tokens) == text


def test_a_saved_character_tokenizer_loads_as_the_same_tokenizer(tmp_path: Path) -> None:
    built = build_character_tokenizer(ALPHABET)
    built.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.get_vocab() == built.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    for text in TEXTS:
        tokens = encode_prompt(loaded, text, chat=False)
        np.testing.assert_array_equal(tokens, encode_prompt(built, text, chat=False))
        assert decode(loaded, tokens) == text


def test_a_character_outside_the_alphabet_is_one_unknown_token_and_not_bytes() -> None:
    tokenizer = build_character_tokenizer("12")
    assert encode_prompt(tokenizer, "1é2", chat=False).tolist() == [3, 2, 4]


def test_special_tokens_are_left_out_of_decoded_text() -> None:
    tokenizer = build_character_tokenizer("12")
    assert decode(tokenizer, np.array([0, 3, 4, 1, 2], np.int32)) == "12"


@pytest.mark.parametrize(("alphabet", "reason"), [("", "is empty"), ("1231", r"repeats \['1'\]")])
def test_an_impossible_alphabet_is_refused(alphabet: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_character_tokenizer(alphabet)


def test_a_model_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 20}))
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_directory_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / 'nowhere'} does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_damaged_tokenizer_file_is_refused_by_name(tmp_path: Path) -> None:
    build_character_tokenizer("12").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=f"{tmp_path} holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path) -> None:
    build_character_tokenizer("12").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="end-of-text"):
        load_tokenizer(str(tmp_path))


def test_a_text_prompt_goes_through_the_chat_template() -> None:
    tokenizer = chat_tokenizer()
    tokens = encode_prompt(tokenizer, "12#", chat=True)
    assert decode(tokenizer, tokens) == "<user>12#\n="


def test_chat_messages_go_through_the_template() -> None:
    tokenizer = chat_tokenizer()
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert decode(tokenizer, encode_prompt(tokenizer, messages, chat=True)) == "<system>1\n<user>2\n="


def test_chat_without_a_chat_template_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompt(build_character_tokenizer("12"), "1", chat=True)


def test_chat_messages_with_chat_turned_off_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.chat = true"):
        encode_prompt(chat_tokenizer(), [{"role": "user", "content": "1"}], chat=False)


def test_messages_that_the_template_refuses_are_one_sentence() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        encode_prompt(tokenizer, [{"role": "user", "content": "1"}], chat=True)


def test_a_plain_prompt_begins_with_the_token_that_the_tokenizer_puts_before_any_text() -> None:
    """Without it, a base model such as Gemma reads its prompt half a nat per token worse."""
    tokenizer = build_character_tokenizer("12+=")
    plain = encode_prompt(tokenizer, "1+2", chat=False).tolist()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    assert encode_prompt(tokenizer, "1+2", chat=False).tolist() == plain, "it has one, and adds none"
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)])
    tokenizer.backend_tokenizer.post_processor = processor
    assert encode_prompt(tokenizer, "1+2", chat=False).tolist() == [bos, *plain], "an end of text would end it"


def test_a_template_that_knows_no_tools_has_them_told_in_words_and_calls_written_out() -> None:
    tokenizer = build_character_tokenizer("ab")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = render_chat(tokenizer, messages, tools=tools)
    assert text.startswith("[system: To call a function") and '{"name": "add", "parameters": {}}][user: go]' in text
    assert text.endswith('[assistant: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>]')
    with_system = [{"role": "system", "content": "Be brief."}, *messages]
    assert render_chat(tokenizer, with_system, tools=tools).startswith("[system: Be brief.\n\nTo call")
    assert "system" not in render_chat(tokenizer, messages)
