"""Conversations: rendered by a chat template, and trained on exactly what the assistant has written."""

import json
import time
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stages.base.errors import StageError
from stages.tokenizing import chat_template
from stages.tokenizing.chat_template import Refused
from stages.tokenizing.conversations import ID_MASK, START, TRAINED, WHOLE, ConversationEncoder, Encoded
from stages.tokenizing.encoding import ChatSpec
from tests.chat_templates import CHATML, FAMILIES, SPECIAL, Family
from tests.kinds import spec_of
from tests.project import REPO

pytestmark = pytest.mark.usefixtures("empty_project")

EOS = "<|endoftext|>"


def make_tokenizer() -> Tokenizer:
    """A token for each byte and each special token: what is decoded is what was encoded."""
    tokens = [EOS, *SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [EOS, *SPECIAL]])
    return tokenizer


TOKENIZER = make_tokenizer()


def encoder_of(
    template: str | None,
    tokenizer: Tokenizer = TOKENIZER,
    start: tuple[int, ...] = (),
    more_templates: tuple[tuple[str, str], ...] = (),
    **values: Any,
) -> ConversationEncoder:
    """With the defaults of params.yaml."""
    templates = () if template is None else (("default", template), *more_templates)
    variables = (("bos_token", "<bos>"), ("eos_token", EOS))
    chat = ChatSpec(templates, variables, **{"train_on": "assistant", "seq_length": 4096, **values})
    spec = spec_of(tokenizer, tokenizer.token_to_id(EOS))
    return ConversationEncoder(spec._replace(chat=chat, start_token_ids=start))


make_encoder = cache(encoder_of)


def encode(template: str | None, content: dict[str, Any], **values: Any) -> Encoded:
    encoded = make_encoder(template, **values).encode(json.dumps(content))
    assert isinstance(encoded, Encoded), str(encoded)
    return encoded


def refusal(template: str, content: dict[str, Any], **values: Any) -> str:
    refused = make_encoder(template, **values).encode(json.dumps(content))
    assert isinstance(refused, Refused)
    return str(refused)


def trained(encoded: Encoded) -> list[str]:
    """The texts of the runs of trained tokens."""
    runs = groupby(encoded.tokens.tolist(), key=lambda token: token & TRAINED > 0)
    return [decode(run) for is_trained, run in runs if is_trained]


def text_of(encoded: Encoded) -> str:
    return decode(encoded.tokens.tolist())


def decode(tokens: Any) -> str:
    return TOKENIZER.decode([token & ID_MASK for token in tokens], skip_special_tokens=False)


def turns(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A conversation in which user and assistant alternate."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def ends(family: Family, number: int) -> list[str]:
    return [*[family.end] * (number - 1), family.last_end or family.end]


# What the data spell, besides text: tokens, tags, quotes, marks of templates, white space.
SPELLED = st.sampled_from(
    [*SPECIAL, EOS, "<think>", '"', "\\", "{{", "{%", "assistant", "\n", " ", "é", "🦆", "user\n"]
)
CONTENTS = st.lists(SPELLED | st.text(max_size=5), min_size=1, max_size=8).map("".join).filter(str.strip)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(contents=st.lists(CONTENTS, min_size=2, max_size=6).filter(lambda found: len(found) % 2 == 0), system=CONTENTS)
def test_exactly_what_the_assistant_wrote_is_trained(name: str, contents: list[str], system: str) -> None:
    family = FAMILIES[name]
    if family.keeps_thoughts is False:  # see the tests of thoughts
        contents = [content.replace("<think>", "").replace("</think>", "") + "." for content in contents]
    encoded = encode(family.template, turns(*contents, system=system if family.has_system else None))
    answers = contents[1::2]
    for text, answer, end in zip(trained(encoded), answers, ends(family, len(answers)), strict=True):
        assert text.endswith(end)
        # White space around a content is the template's to keep or to drop.
        assert text.removesuffix(end).strip() == answer.strip()
    ids = {TOKENIZER.token_to_id(end) for end in ends(family, len(answers))}
    assert encoded.terminators == ids
    # A content that spells a special token has none.
    special = {TOKENIZER.token_to_id(token) for token in [EOS, *SPECIAL]}
    assert all(token & ID_MASK not in special - ids for token in encoded.tokens.tolist() if token & TRAINED)


def test_two_marks_in_one_turn_are_not_those_of_two_turns() -> None:
    """As many places as turns, and none in the first."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.thinking %}"
        "{% generation %}{{ message.thinking }}<|im_end|>{% endgeneration %}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    content = turns("one", "first", "two", "second")
    content["messages"][3]["thinking"] = "why"
    assert trained(encode(template, content)) == ["why<|im_end|>second<|im_end|>"]
    for index in (1, 3):
        messages = [{**each, "train": number != index} for number, each in enumerate(content["messages"])]
        assert "marks other places than one for each turn" in refusal(template, {"messages": messages})


def test_a_conversation_is_a_document_that_stays_whole() -> None:
    encoded = encode(CHATML, turns("Hi", "Hello"))
    first, *rest = encoded.tokens.tolist()
    assert first & (START | WHOLE) == START | WHOLE and not any(token & (START | WHOLE) for token in rest)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert text_of(encoded) == text
    all_trained = encode(CHATML, turns("Hi", "Hello"), train_on="all")
    assert trained(all_trained) == [text.removeprefix("<|im_start|>")]  # nothing precedes the first token


LONG = turns("one", "first", "two", "second", "three", "third", system="Be brief.")


def divided(number: int) -> dict[str, Any]:
    """The long conversation, so many messages of which are the prompt."""
    return {"prompt": LONG["messages"][:number], "completion": LONG["messages"][number:]}


@pytest.mark.parametrize(
    ("train_on", "content", "expected"),
    [
        ("assistant", LONG, ["first", "second", "third"]),
        ("last", LONG, ["third"]),
        ("completion", LONG, ["third"]),
        ("completion", divided(4), ["second", "third"]),
        ("assistant", divided(6), ["first", "second", "third"]),
    ],
)
def test_which_turns_are_trained(train_on: str, content: dict[str, Any], expected: list[str]) -> None:
    assert trained(encode(CHATML, content, train_on=train_on)) == [f"{answer}<|im_end|>" for answer in expected]


@pytest.mark.parametrize(
    ("key", "value"), [("train", False), ("weight", 0), ("weight", 0.0), ("loss", False), ("loss_mask", 0)]
)
def test_a_turn_may_say_that_it_is_not_trained(key: str, value: Any) -> None:
    """As the formats of OpenAI and Mistral (`weight`), of ms-swift (`loss`) and others do."""
    content = json.loads(json.dumps(LONG))
    content["messages"][2][key] = value
    content["messages"][4][key], content["messages"][6][key] = 1, None
    assert trained(encode(CHATML, content)) == ["second<|im_end|>", "third<|im_end|>"]
    assert refusal(CHATML, content, train_on="all") == (
        "train_on is all, and a message has train: false, or a weight of 0"
    )


def test_a_plain_prompt_needs_no_template() -> None:
    content = {"prompt": "The sky is <|im_end|>", "completion": " blue."}
    encoded = encode(None, content)
    assert trained(encoded) == [f" blue.{EOS}"]
    assert encoded.terminators == {0}
    with pytest.raises(StageError, match=r"has no chat template.*set chat_template"):
        encode(None, LONG)


def test_a_plain_prompt_begins_with_the_bos_of_the_tokenizer() -> None:
    """A conversation begins as its template says."""
    start = (TOKENIZER.token_to_id("<bos>"),)
    content = {"prompt": "The sky is", "completion": " blue."}
    for train_on, expected in (("assistant", f" blue.{EOS}"), ("all", f"The sky is blue.{EOS}")):
        encoded = encode(None, content, start=start, train_on=train_on)
        assert text_of(encoded) == f"<bos>The sky is blue.{EOS}"
        assert trained(encoded) == [expected]
        assert encoded.tokens[0] & (START | WHOLE) == START | WHOLE and not any(encoded.tokens[1:] & START)
    length = len(encoded.tokens)
    encode(None, content, start=start, seq_length=length)
    with pytest.raises(AssertionError, match=f"longer than a row: {length} tokens"):
        encode(None, content, start=start, seq_length=length - 1)
    assert text_of(encode(CHATML, turns("a", "b"), start=start)) == text_of(encode(CHATML, turns("a", "b")))


THOUGHTS = turns("1", "<think>\nhm\n</think>\n\none", "2", "<think>\nwell\n</think>\n\ntwo")


def test_thoughts_are_trained_where_they_stay() -> None:
    assert "leaves out the reasoning" in refusal(FAMILIES["qwen3"].template, THOUGHTS)
    encoded = encode(FAMILIES["qwen3"].template, THOUGHTS, train_on="last")
    assert trained(encoded) == ["<think>\nwell\n</think>\n\ntwo<|im_end|>"]
    encoded = encode(CHATML, THOUGHTS)
    assert trained(encoded) == [f"{message['content']}<|im_end|>" for message in THOUGHTS["messages"][1::2]]
    encoded = encode(FAMILIES["qwen3"].template, turns("1", "one"))  # what the template adds is not trained
    assert trained(encoded) == ["one<|im_end|>"]
    assert "<think>\n\n</think>\n\none" in text_of(encoded)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_may_have_a_key_of_their_own(key: str) -> None:
    content = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one", key: "hm"}]}
    encoded = encode(FAMILIES["qwen3"].template, content)
    assert trained(encoded) == ["<think>\nhm\n</think>\n\none<|im_end|>"]
    encoded = encode(FAMILIES["gpt-oss"].template, content)
    assert trained(encoded) == ["hm<|end|><|start|>assistant<|channel|>final<|message|>one<|return|>"]
    assert encoded.terminators == {TOKENIZER.token_to_id("<|return|>")}
    assert encoded.inner >= {TOKENIZER.token_to_id("<|end|>")}
    assert "leaves out the reasoning" in refusal(CHATML, content)


CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": 'Pa"ris', "days": 2}}}
AS_TEXT = {"name": "get", "arguments": '{"city":"Pa\\"ris","days":2}'}
PLAIN = {"name": "get", "arguments": "Paris"}
CALLED = '{"name": "get", "arguments": {"city": "Pa\\"ris", "days": 2}}'


@pytest.mark.parametrize(
    ("message", "called"),
    [
        ({"content": "", "tool_calls": [CALL]}, CALLED),
        # In OpenAI's format the arguments are a string of JSON.
        ({"content": None, "tool_calls": [{"type": "function", "function": AS_TEXT}]}, CALLED),
        ({"tool_calls": [{"function": PLAIN}]}, json.dumps(PLAIN)),
        # A table whose rows differ has them as JSON.
        ({"content": "", "tool_calls": json.dumps([CALL])}, CALLED),
        # And in OpenAI's old format there is one call.
        ({"content": None, "function_call": AS_TEXT}, CALLED),
    ],
)
def test_calls_of_tools_are_trained_with_their_tags(message: dict[str, Any], called: str) -> None:
    messages = [
        {"role": "user", "content": "Weather?", "tool_calls": 5},
        {"role": "assistant", **message},
        {"role": "tool", "content": '{"t": 3}'},
        {"role": "assistant", "content": "Cold."},
    ]
    encoded = encode(FAMILIES["qwen2.5"].template, {"messages": messages, "tools": [CALL]})
    assert trained(encoded) == [f"<tool_call>\n{called}\n</tool_call><|im_end|>", "Cold.<|im_end|>"]
    messages[1]["content"] = ""
    assert "leaves out the call" in refusal(CHATML, {"messages": messages})


def test_calls_that_are_none_are_not_rendered() -> None:
    """Llama's template looks whether there is the key, and a template takes each character of a string for a call."""
    template = CHATML.replace("message['content']", "('(call)' if 'tool_calls' in message else message['content'])")
    for nothing in ([], "", "[]", "null"):
        content = turns("1", "one")
        content["messages"][1]["tool_calls"] = nothing
        assert trained(encode(template, content)) == ["one<|im_end|>"]
    content["messages"][1]["tool_calls"] = "get(1)"
    assert refusal(template, content) == "tool_calls is a string that is no JSON of a list"


def test_special_tokens_in_a_call_do_not_end_the_turn() -> None:
    """As in gpt-oss and DeepSeek, whose calls have several."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role + '\n' }}{{ message.content }}"
        "{% for call in message.tool_calls %}<|channel|>{{ call.function.name }}<|message|>"
        "{{ call.function.arguments | tojson }}<|end|>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"function": {"name": "get", "arguments": {"days": 2}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    content = {"messages": [{"role": "user", "content": "?"}, answer]}
    encoded = encode(template, content)
    assert trained(encoded) == ['<|channel|>get<|message|>{"days": 2}<|end|><|im_end|>']
    assert encoded.terminators == {TOKENIZER.token_to_id("<|im_end|>")}
    # Another token than that of other turns may stand anywhere in a call.
    other = template.replace("<|im_end|>", "{{ '<|return|>' if message.tool_calls else '<|im_end|>' }}")
    assert "not known where a tool call ends" in refusal(other, content)


def test_where_a_call_begins_does_not_depend_on_earlier_conversations() -> None:
    """Their tools may be others, and a template may write them before the turn."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }} {{ tools | length }}\n{{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ tools | length }}\n{% endif %}"
    )
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get"}}]}
    for tools in ([CALL], [CALL, CALL]):
        encoded = encode(template, {"messages": [{"role": "user", "content": "?"}, answer], "tools": tools})
        assert trained(encoded) == ["get<|im_end|>"]


@pytest.mark.parametrize("arguments", ["{{ call.function.arguments }}", "{{ '' + call.function.arguments }}"])
@pytest.mark.parametrize("given", ['{"city": "Paris", "cold": true}', {"city": "Paris", "cold": True}])
def test_templates_that_expect_calls_in_the_format_of_openai_get_them(arguments: str, given: Any) -> None:
    """As DeepSeek's: strings of JSON, and a content that is null."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is none %}"
        "{% for call in message.tool_calls %}{{ call.function.name }} " + arguments + "{% endfor %}<|im_end|>\n"
        "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": given}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    encoded = encode(template, {"messages": [{"role": "user", "content": "?", "tool_calls": None}, answer]})
    assert trained(encoded) == ['get {"city": "Paris", "cold": true}<|im_end|>']


def test_what_the_template_leaves_out_is_counted_by_role() -> None:
    template = CHATML.replace("in messages %}", "in messages if message.role in ('user', 'assistant') %}")
    tool = {"type": "function", "function": {"name": "get", "description": "The weather\nof a city"}}
    content = turns("Hi", "<think>\nhm\n</think>\n\nHello", "So", "Well", system="Judge.")
    content = {"messages": [*content["messages"], {"role": "tool", "content": "9"}], "tools": [tool]}
    for train_on in ("last", "all"):
        encoded = encode(template, content, train_on=train_on)
        found = {"system": 1, "user": 2, "assistant": 2, "assistant reasoning": 1, "tool": 1, "tools": 2}
        assert (encoded.strings, encoded.left_out) == (found, {"system": 1, "tool": 1, "tools": 2})
    encoded = encode(FAMILIES["qwen3"].template, THOUGHTS, train_on="last")
    assert encoded.left_out == {"assistant reasoning": 1}
    # A template that rewrites contents: what is there is looked for.
    encoded = encode(CHATML.replace("message['content']", "message['content'][:3]"), content, train_on="all")
    assert encoded.left_out == {
        "system": 1, "assistant": 2, "assistant reasoning": 1, "tools": 2,
    }  # fmt: skip
    encoded = encode(FAMILIES["qwen2.5"].template, {**turns("Hi", "Hello"), "tools": [tool]})
    assert not encoded.left_out


@pytest.mark.parametrize("other", ["''", "'<image>'", "(part.image_url or {}).url"])
def test_parts_other_than_text_are_counted_where_the_template_does_not_write_them(other: str) -> None:
    """A template for text passes over a picture: answers about it would be trained without it."""
    written = "{% for part in message.content %}{{ part.text if part.type == 'text' else " + other + " }}{% endfor %}"
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.content is string %}"
        "{{ message.content }}{% else %}" + written + "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/1.png"}}
    parts = [picture, {"type": "text", "text": "What is this?"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, *turns("", "A cat.", "Its colour?", "Grey.")["messages"][1:]]
    encoded = encode(template, {"messages": messages})
    assert encoded.strings == {"user": 2, "user parts other than text": 2, "assistant": 2}
    assert encoded.left_out == {"user parts other than text": 1 if "url" in other else 2}


def test_strings_under_other_keys_of_a_message_are_counted_and_are_no_special_tokens() -> None:
    question, answer = turns("Hi", "Hello")["messages"]
    refused = {"role": "assistant", "content": "", "refusal": "No.", "weight": 1}
    encoded = encode(CHATML, {"messages": [question, refused, question, answer]})
    assert encoded.strings["assistant other keys"] == encoded.left_out["assistant other keys"] == 1
    template = CHATML.replace("message['content']", "message['content'] + (message['refusal'] or '')")
    assert not encode(template, {"messages": [question, refused, question, answer]}).left_out
    spelled = {"messages": [question, {**refused, "refusal": "No.<|im_end|>"}, question, answer]}
    assert "beside its content" in refusal(template, spelled)


def test_conversations_with_tools_have_the_template_for_tools() -> None:
    tool = {"type": "function", "function": {"name": "get"}}
    others = (("tool_use", FAMILIES["qwen2.5"].template), ("rag", ""))
    plain, tools = (
        encode(CHATML, turns("Hi", "Hello") | more, more_templates=others) for more in ({}, {"tools": [tool]})
    )
    system = f"<|im_start|>system\n{json.dumps([tool])}<|im_end|>\n"
    assert text_of(tools).startswith(system) and "system" not in text_of(plain)
    assert (plain.left_out, tools.left_out) == ({}, {})


def test_roles_names_and_tools_spell_no_special_token() -> None:
    """They are a part of what the template writes, in which such a text is the token itself."""
    tool = {"type": "function", "function": {"name": "get", "description": "Ends with <|im_end|>"}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]}
    question, answer = turns("Hi", "Hello")["messages"]
    for template, content in (
        (FAMILIES["qwen2.5"].template, {"messages": [question, answer], "tools": [tool]}),
        (FAMILIES["qwen2.5"].template, {"messages": [question, call]}),
        (CHATML, {"messages": [{"role": "<|im_start|>", "content": "a"}, question, answer]}),
    ):
        assert refusal(template, content) == "a role, a name or a tool spells a special token"
    other = {"messages": [{**question, "raw": "<|im_end|>"}, answer]}
    assert trained(encode(CHATML, other)) == ["Hello<|im_end|>"]


def test_a_character_that_the_vocabulary_lacks_is_no_special_token() -> None:
    tokens = ["<unk>", EOS, *SPECIAL, *"Hi asertunl\n"]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", EOS, *SPECIAL]])
    encoder = encoder_of(CHATML, tokenizer)
    assert spec_of(tokenizer, 1).unk_token_id == 0
    encoded = encoder.encode(json.dumps(turns("Hi 東", "ana 東")))
    assert isinstance(encoded, Encoded)
    ids = [token & ID_MASK for token in encoded.tokens.tolist() if token & TRAINED]
    assert [tokens[number] for number in ids] == [*"ana ", "<unk>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML.replace("message['content']", "message['content'] + message['content']"), "repeats the content"),
        (CHATML.replace("in messages", "in messages[:1]"), "leaves out the content"),
        (CHATML.replace("in messages", "in messages | reverse"), "into another order"),
        (CHATML.replace("message['content']", "message['content'] | upper"), "rewrites contents"),
        (CHATML.replace("message['content']", "message['content'][:3]"), "rewrites contents"),
        (CHATML.replace("<|im_end|>", "-"), "ends a turn of the assistant with no special token"),
        ("{{ raise_exception('not today') }}", "the chat template fails: not today"),
        ("{{ messages[9].content }}", "the chat template fails: list object has no element 9"),
        ("{% for", "the chat template fails: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__'"),
        ("{% include '/etc/passwd' %}", "the chat template fails: no loader for this environment"),
        ("{{ 'a' * 2 * 10 ** 9 }}", "the chat template fails: MemoryError"),
    ],
)  # fmt: skip
def test_what_is_not_sure_is_refused(template: str, reason: str) -> None:
    assert reason in refusal(template, turns("question one", "answer one", "question two", "answer two"))


@pytest.mark.parametrize(
    "template",
    [
        "".join("{% for " + name + " in range(99999) %}" for name in "abc") + "{% endfor %}" * 3,
        "{{ 9 ** (9 ** 9) }}",  # Jinja computes it while it compiles
    ],
)
def test_a_template_that_does_not_end_is_refused_within_seconds(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat_template.SECONDS <= 5
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    start = time.monotonic()
    assert "took more than 0.5 seconds" in refusal(template, LONG)
    assert time.monotonic() - start < 5


def test_thoughts_without_an_end_take_no_time() -> None:
    content = "<think>" + " " * 4000 + "x"
    start = time.monotonic()
    encoded = encode(CHATML, turns("Hi", content), seq_length=10_000)
    assert time.monotonic() - start < 5  # it took 25, and twice the white space takes eight times as long
    assert trained(encoded) == [f"{content}<|im_end|>"]


def test_an_answer_of_nothing_is_refused() -> None:
    for content in (turns("Hi", ""), turns("Hi")):
        assert refusal(CHATML, content) == "nothing of it is trained"


@pytest.mark.parametrize("depth", [990, 3000])
def test_a_conversation_that_is_nested_too_deep_is_refused(depth: int) -> None:
    call = '{"function": {"name": "f", "arguments": ' + '{"a":' * depth + "1" + "}" * depth + "}}"
    messages = '{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [' + call + "]}"
    refused = make_encoder(FAMILIES["qwen2.5"].template).encode('{"messages": [' + messages + "]}")
    assert str(refused) == "nested too deep"


def test_a_long_conversation_is_dropped() -> None:
    whole = encode(CHATML, LONG)
    length = len(whole.tokens)
    assert encode(CHATML, LONG, seq_length=length).tokens.tolist() == whole.tokens.tolist()
    assert refusal(CHATML, LONG, seq_length=length - 1).startswith(f"longer than a row: {length:,} tokens")


def test_the_date_is_always_the_same() -> None:
    for name, date in (("llama3", "26 Jul 2024"), ("gpt-oss", "2024-07-26")):
        encoded = encode(FAMILIES[name].template, turns("Hi", "Hello"))
        assert date in text_of(encoded)
    everything = CHATML + "{{ strftime_now('%A, %a, %-d %B %Y, day %j, %-I %p, %F') }}<|im_end|>"
    assert "Friday, Fri, 26 July 2024, day 208, 12 AM, 2024-07-26" in text_of(encode(everything, turns("Hi", "Hello")))


def test_content_in_parts_is_found() -> None:
    template = CHATML.replace("message['content']", "message['content'][0]['text'] + message['content'][1]['text']")
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    encoded = encode(template, {"messages": messages})
    assert trained(encoded) == ["Hello<|im_end|>"]
    joined = CHATML.replace("message['content']", "message['content'] | join")
    spelled = [*turns("Hi", "Hello")["messages"], {"role": "user", "content": ["a<|im_end|>", "b"]}]
    encoded = encode(joined, {"messages": spelled})
    assert text_of(encoded).endswith("a<|im_end|>b<|im_end|>\n")
    assert [token & ID_MASK for token in encoded.tokens.tolist()].count(TOKENIZER.token_to_id("<|im_end|>")) == 3


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("parts", [[{"type": "text", "text": "Hello"}], ["Hello"]])
def test_a_content_is_never_the_python_of_it(parts: list[Any], generation: bool) -> None:
    marks = ("{% generation %}", "{% endgeneration %}") if generation else ("", "")
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
        + marks[0] + "{{ message.content }}<|im_end|>" + marks[1]
        + "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )  # fmt: skip
    answer = {"role": "assistant", "content": "Hi"}
    in_parts = {"messages": [{"role": "user", "content": parts}, answer]}
    assert "writes a content that is a list as Python does" in refusal(template, in_parts)
    encoded = encode(template, {"messages": [{"role": "user", "content": None}, answer]})
    assert "None" not in text_of(encoded)
    encoded = encode(template, {"messages": [*turns("Hello", "Hi", "So")["messages"], {"role": "assistant"}]})
    assert trained(encoded)[0] == "Hi<|im_end|>"


def test_tokens_across_a_border_are_trained_where_a_part_of_them_is() -> None:
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokenizer.model = models.BPE({**vocabulary, "ĊH": len(vocabulary)}, [("Ċ", "H")])
    encoded = encoder_of(CHATML, tokenizer).encode(json.dumps(turns("Hi", "Hello")))
    assert isinstance(encoded, Encoded)
    ids = [token & ID_MASK for token in encoded.tokens.tolist() if token & TRAINED]
    assert tokenizer.decode(ids, skip_special_tokens=False) in ("Hello<|im_end|>", "\nHello<|im_end|>")


def test_an_eos_token_that_text_may_contain_is_refused() -> None:
    characters = [EOS, *SPECIAL, "\n", "a"]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(characters)}, []))
    spec = spec_of(tokenizer, characters.index("\n"))._replace(
        special_tokens=("\n",), chat=ChatSpec((("default", CHATML),), (), "assistant", 4096)
    )
    with pytest.raises(StageError, match="is a character that text may contain"):
        ConversationEncoder(spec)


@pytest.mark.parametrize(("end", "is_found"), [("<|im_end|>", False), (" <|im_end|>", True)])
def test_special_tokens_are_found_as_the_model_s_own_tokenizer_finds_them(end: str, is_found: bool) -> None:
    """Files of old conversions normalize them: Llama's then finds `▁<|im_end|>`, and takes the rest for text."""
    tokens = [EOS, *SPECIAL, *sorted({*CHATML, *"Hi there▁"})]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=True) for token in [EOS, *SPECIAL]])
    template = CHATML.replace("<|im_start|>", "").replace("<|im_end|>\n", end)
    encoded = encoder_of(template, tokenizer).encode(json.dumps(turns("Hi", "there", "Hi Hi", "there")))
    whole = f"user\nHi{end}assistant\nthere{end}user\nHi Hi{end}assistant\nthere{end}"
    ids = tokenizer.encode(whole, add_special_tokens=False).ids
    assert (tokens.index("<|im_end|>") in ids) == is_found
    if is_found:
        assert isinstance(encoded, Encoded), encoded
        assert [token & ID_MASK for token in encoded.tokens.tolist()] == ids
    else:
        assert "takes a special token of the chat template for text" in str(encoded)


def test_the_template_for_base_models_reads_lists_of_parts_and_no_content() -> None:
    plain = (REPO / "models/templates/plain.jinja").read_text()
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}, {"type": "image"}]
    content = turns("", "A cat.") | {"tools": None}
    content["messages"][0]["content"] = parts
    encoded = encode(plain, content)
    assert text_of(encoded) == f"User: What is this?\nAssistant: A cat.{EOS}\n"
    assert encoded.left_out == {"user parts other than text": 1}
    content["messages"][0]["content"] = None
    assert trained(encode(plain, content)) == [f" A cat.{EOS}"]
