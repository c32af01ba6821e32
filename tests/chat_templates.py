"""Chat templates in the manner of well-known families: how each marks turns, and what it does to their contents."""

from typing import NamedTuple

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
)


class Family(NamedTuple):
    """A template, and what it is expected to do."""

    template: str
    end: str
    """That ends a turn of the assistant."""
    last_end: str | None = None
    """The same of the last turn, where it is another one."""
    has_system: bool = True
    alternates: bool = False
    """Whether turns must be those of user and assistant in turn."""
    keeps_thoughts: bool = True
    """Whether thoughts of earlier turns stay."""


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOOLS = (
    '{%- macro call(message) -%}{%- for each in message.tool_calls -%}<tool_call>\n{"name": "{{ each.function.name }}",'
    ' "arguments": {{ each.function.arguments | tojson }}}\n</tool_call>{%- endfor -%}{%- endmacro -%}'
)

FAMILIES = {
    # A system message of its own where the conversation has none.
    "smollm2": Family(
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML,
        "<|im_end|>",
    ),
    "qwen2.5": Family(
        _TOOLS + "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'assistant' and message.tool_calls %}<|im_start|>assistant\n"
        "{%- if message.content %}{{ message.content + '\n' }}{%- endif %}{{ call(message) }}<|im_end|>\n"
        "{%- elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
        "<|im_end|>\n"
        "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}",
        "<|im_end|>",
    ),
    # Thoughts of earlier turns are dropped, and the last one gets empty ones where it has none.
    "qwen3": Family(
        "{%- for message in messages %}{%- if message.role != 'assistant' %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- else %}"
        "{%- set content = message.content %}{%- set thoughts = message.reasoning_content or '' %}"
        "{%- if '</think>' in content %}"
        "{%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}"
        "{%- set content = content.split('</think>')[-1] %}{%- endif %}"
        "{{ '<|im_start|>assistant\n' }}{%- if loop.last %}"
        "{{ '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
        "{{ content.lstrip('\n') + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}",
        "<|im_end|>",
        keeps_thoughts=False,
    ),
    # Contents are trimmed, and the date of today is in the system message.
    "llama3": Family(
        "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') }}"
        "{{ '<|eot_id|>' }}"
        "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>",
    ),
    # No system message, turns alternate, and the assistant is called model.
    "gemma": Family(
        "{{ bos_token }}"
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
        "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
        has_system=False,
        alternates=True,
    ),
    # The system message is put into the first turn of the user.
    "mistral": Family(
        "{{ bos_token }}{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
        "{% set rest = messages[1:] if first else messages %}"
        "{% for message in rest %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + (first + '\n\n' if loop.first and first else '') + message['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "phi3": Family(
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|end|>",
    ),
    # The last turn ends in another way than those before; thoughts are a message of their own.
    "gpt-oss": Family(
        "{{ '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
        "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        "{%- if message.thinking and loop.last %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}",
        "<|end|>",
        last_end="<|return|>",
    ),
    # Marked by its authors, and a turn is ended by the beginning of the next one.
    "marked": Family(
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}",
        "<|user|>",
        last_end="<|endoftext|>",
    ),
}
