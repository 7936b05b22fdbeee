"""Text to tokens and back: any transformers tokenizer, or a small one of single characters built from an alphabet.

A directory without a tokenizer, or a chat prompt for a model without a chat template, is refused at start-up. Engines
do not use this module to generate: they take and return tokens.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import CAUSE, ConfigError, translated
from headway.types import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Messages = list[dict[str, Any]]

_TOOLS = (
    "To call a function, write its name and arguments as JSON, "
    'like <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>. The functions:'
)

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def build_character_tokenizer(alphabet: str) -> "PreTrainedTokenizerFast":
    """One token per character of the alphabet, after <pad>, <eos> and <unk>; every other character is <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        problem = f"repeats {repeated}" if repeated else "is empty"
        raise ConfigError(f"alphabet {alphabet!r} {problem}; name each character of the tokenizer once")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        # A text that spells "<eos>" must not become the token that ends it.
        split_special_tokens=True,
    )


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise ConfigError(f"model directory {path} does not exist; name a transformers directory or a hub model")
    # transformers reports a missing, foreign or damaged tokenizer by half a dozen unrelated exception types.
    with translated(Exception, ConfigError, f"{path} holds no tokenizer that transformers can load ({CAUSE})"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # A directory with a model's config.json but no tokenizer files loads as a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(f"{path} holds no tokenizer: its vocabulary is empty; add the model's tokenizer files to it")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {path} names no end-of-text token; set eos_token in its tokenizer config")
    return tokenizer


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | Messages,
    chat: bool,
    template: Mapping[str, Any] | None = None,
) -> Ints:
    """Tokens of a prompt: through the chat template, with its arguments, when `chat`; else of the plain text."""
    if isinstance(prompt, str) and not chat:
        return np.asarray(_encode_plain(tokenizer, prompt), np.int32)
    if not chat:
        raise ConfigError("a prompt of chat messages needs the model's chat template; set task.chat = true")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = render_chat(tokenizer, messages, template)
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)


def _encode_plain(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The text's tokens, after the beginning-of-text token where this tokenizer adds one: its model expects it."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    # Only that one: some tokenizers also add an end-of-text token, after which the model would write nothing.
    return [bos, *tokens] if bos is not None and tokenizer.encode(text)[:1] == [bos] != tokens[:1] else tokens


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The messages as the model's chat template writes them; tools are described in words where it knows none."""
    if not tokenizer.chat_template:
        raise ConfigError("task.chat = true, but the model's tokenizer has no chat template; set task.chat = false")
    if tools and "tools" not in str(tokenizer.chat_template):
        messages, tools = _with_tools(messages, tools), None
    # The template is the model author's program, the messages are the user's data: either may refuse the other.
    with translated(Exception, ConfigError, f"the chat template does not accept these messages ({CAUSE})"):
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,  # type: ignore[arg-type]  # its own type leaves out plain dicts
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(template or {}),
        )
    return str(text)


def _with_tools(messages: Messages, tools: list[dict[str, Any]]) -> Messages:
    """Messages for a chat template without tools: the system prompt describes them, calls are plain text."""
    system = messages[0].get("content", "") + "\n\n" if messages and messages[0].get("role") == "system" else ""
    schemas = "\n".join(json.dumps(tool["function"]) for tool in tools)
    system_message = {"role": "system", "content": f"{system}{_TOOLS}\n{schemas}"}
    return [system_message, *(_with_calls(message) for message in messages[bool(system) :])]


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    written = [json.dumps({"name": call.get("name"), "arguments": call.get("arguments")}) for call in calls]
    text = "\n".join(f"<tool_call>{call}</tool_call>" for call in written)
    return message | {"content": f"{message.get('content') or ''}{text}"} if calls else message


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int] | Ints, special: bool = False) -> str:
    """The text of the tokens, spaces as they were written; special tokens are left out unless `special`."""
    token_list = [int(token) for token in tokens]
    return str(tokenizer.decode(token_list, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def stop_tokens(named: list[int | str], tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> set[int]:
    """The ids of `sampling.stop_tokens`, given as ids or as the tokens' texts."""
    vocabulary = tokenizer.get_vocab() if any(isinstance(token, str) for token in named) else {}
    found = {token: token if isinstance(token, int) else vocabulary.get(token, -1) for token in named}
    for token, number in found.items():
        if not 0 <= number < vocab_size:
            problem = f"sampling.stop_tokens names {token!r}, which is no token of the model"
            raise ConfigError(f"{problem}; name another, or set sampling.stop_strings")
    return set(found.values())
