"""Continue a text with a trained model, or talk to it; the text appears as it is generated.

Reads    outputs/<experiment_name>/model/, or another model directory
Example  python -m stages.generate "Once upon a time"
         python -m stages.generate --chat --system "You answer with one short sentence."
         python -m stages.generate --model DIR --temperature 0 < prompt.txt

On a GPU if there is one. The same seed gives the same text on the same device.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from stages.base import command, outputs
from stages.base.errors import StageError
from stages.base.outputs import ExperimentName
from stages.base.params_file import load_params
from stages.model import adapters, config
from stages.model.files import CONFIG

if TYPE_CHECKING:
    from stages.tokenizing.conversations import ConversationEncoder


@dataclass(frozen=True)
class GenerateParams:
    """The leaf of `params.yaml` that decides which model it is."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/."""


def main() -> None:
    """Run the command."""
    parser = command.parser(__doc__)
    parser.add_argument("prompt", nargs="?", help="the beginning of the text; without it, what is on standard input")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a turn of the user; without it, each line of standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message, such as that of your data")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: that of the experiment in params.yaml")
    parser.add_argument(
        "--max-new-tokens", type=command.positive_integer, default=128, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--temperature", type=temperature, default=0.8, help="0: the most probable token (default: %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    args = parser.parse_args()
    if args.prompt is None and (sys.stdin is None or (sys.stdin.isatty() and not args.chat)):
        parser.error("give a prompt, as an argument or on standard input")
    if args.system is not None and not args.chat:
        parser.error("--system is the beginning of a conversation: give --chat, too")
    directory = args.model or outputs.directory(load_params(GenerateParams).experiment_name) / "model"
    check_model(directory, is_given=args.model is not None)
    try:
        prompts = turns(sys.stdin) if args.chat and args.prompt is None else [given(args.prompt)]
        # Here, as they take seconds: not for --help.
        import torch
        from transformers import TextStreamer

        from stages.evaluation import generation
        from stages.forward.attention import activate_kernels
        from stages.ranks.torch_errors import explain_torch_errors

        others = "a GPU with more memory, or the CPU (CUDA_VISIBLE_DEVICES=)"
        other = others if torch.cuda.is_available() else "or a machine with more memory"
        with explain_torch_errors("this process", f"use a smaller --max-new-tokens, a shorter prompt, {other}"):
            model, tokenizer = generation.load(directory)
            activate_kernels(())  # not cuDNN, as each token has another length
            torch.manual_seed(args.seed)
            streamer = TextStreamer(tokenizer, skip_prompt=args.chat, skip_special_tokens=True)  # such as the EOS
            encoder = chat_encoder(directory, model.generation_config.eos_token_id) if args.chat else None
            messages = [] if args.system is None else [{"role": "system", "content": given(args.system)}]
            for prompt in prompts:
                if encoder:
                    messages.append({"role": "user", "content": prompt})
                    tokens = torch.tensor([encode_chat(encoder, messages)])  # (1, T)
                else:
                    tokens = generation.encode(tokenizer, prompt)
                check_length(tokens.shape[1], generation.max_length(model), args.max_new_tokens)
                answer = generation.generate(
                    model, tokens.to(model.device), args.max_new_tokens, args.temperature, streamer
                )
                messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        if error.encoding != "utf-8":
            raise StageError(
                f"standard output is {error.encoding}, which lacks a character of the text: "
                "`export LC_ALL=C.UTF-8 PYTHONUTF8=1`"
            ) from None
        raise StageError(f"the prompt is not UTF-8 at position {error.start}: convert it, as with iconv") from None
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end


def check_model(directory: Path, is_given: bool) -> None:
    """Check that a directory, which was given or is that of the experiment, has a model.

    Raises:
        StageError: it has none, or one that asks for code of its own.
    """
    if (directory / adapters.CONFIG).is_file():
        # Where `consolidate` writes both, with --output and without.
        beside = (directory.parent / name for name in (directory.name.removesuffix("-adapter"), "model"))
        found = [f"; it is {path}" for path in beside if (path / CONFIG).is_file()]
        raise StageError(
            f"{directory} has adapters (LoRA), and no model: give the directory of the model that they are merged into"
            + "".join(found[:1])
        )
    if not (directory / CONFIG).is_file():
        remedy = f"give that of a model; {outputs.RESTORE}" if is_given else "run `dvc repro`, or give --model DIR"
        raise StageError(f"{directory} is not a model directory: {remedy}")
    config.check(directory)  # transformers would ask whether to run its code, and take an answer from standard input


def chat_encoder(directory: Path, eos_token_id: int | list[int] | None) -> "ConversationEncoder":
    """What encodes the turns as `pack` does: a special token that the user types is text.

    Raises:
        StageError: the model has no chat template, or no EOS token.
    """
    from stages.model import tokenizer
    from stages.tokenizing import encoding, vocabulary
    from stages.tokenizing.conversations import ConversationEncoder

    loaded = tokenizer.load(directory)
    if "default" not in loaded.chat_templates:
        raise StageError(f"--chat: {directory} has no chat template: train on conversations, which brings one")
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    eos = ends[0] if loaded.eos_token_id is None else loaded.eos_token_id
    if eos is None:
        raise StageError(
            "--chat: the model names no EOS token, so nothing ends an answer: set eos_token_id in its config"
        )
    chat = encoding.ChatSpec(
        tuple(loaded.chat_templates.items()), tuple(loaded.special_tokens.items()), "assistant", sys.maxsize
    )
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "tokenizer.json")
        path.write_text(loaded.content, encoding="utf-8")
        found = vocabulary.read(path, loaded.special_tokens, eos)
        special_tokens = tuple(sorted(found.special_tokens))
        spec = encoding.TokenizerSpec(
            path, "", eos, found.unk_token_id, special_tokens, max(found.token_ids) + 1, chat=chat
        )
        return ConversationEncoder(spec)


def encode_chat(encoder: "ConversationEncoder", messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation and of what precedes the next turn of the assistant.

    Raises:
        StageError: the template refuses these messages, or what they spell cannot be kept text.
    """
    from stages.tokenizing.chat_template import Refused

    try:
        ids: list[int] = encoder.encode_prompt(messages).tolist()
    except Refused as refused:
        raise StageError(f"--chat: {refused}") from None
    return ids


def given(prompt: str | None) -> str:
    """The prompt, as an argument or on standard input; a UnicodeError where it is not UTF-8."""
    prompt = sys.stdin.buffer.read().decode() if prompt is None else prompt
    prompt.encode()  # bytes of an argument that are not UTF-8 are surrogates in it
    return prompt


def turns(lines: TextIO) -> Iterator[str]:
    """The turns of the user: a line each, asked for where there is a terminal."""
    while True:
        if lines.isatty():
            print("> ", end="", flush=True)
        if not (line := lines.buffer.readline().decode()):
            return
        if line.strip():
            yield line.strip()


def check_length(num_tokens: int, limit: int, max_new_tokens: int) -> None:
    """Check that the model has room for a prompt and what is asked for.

    Raises:
        StageError: not even for the prompt.
    """
    if not num_tokens:
        raise StageError("the prompt has no token: give at least a word")
    if num_tokens >= limit:
        raise StageError(f"the prompt has {num_tokens} tokens, and the model allows {limit} in all: give a shorter one")
    if max_new_tokens > limit - num_tokens:
        print(
            f"warning: at most {limit - num_tokens} tokens follow, not {max_new_tokens}: the prompt has "
            f"{num_tokens}, and the model allows {limit} in all",
            file=sys.stderr,
        )


def temperature(text: str) -> float:
    # Logits divided by less would overflow.
    if not ((number := float(text)) == 0 or 0.001 <= number < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is not 0, nor a number of at least 0.001")
    return number


def seed(text: str) -> int:
    if not 0 <= (number := int(text)) < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 2**64 - 1")
    return number


if __name__ == "__main__":
    command.run(main)
