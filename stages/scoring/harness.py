"""Ask a model the questions of tasks, as lm-evaluation-harness does; a collective of the ranks.

lm-eval believes to be alone on each rank: its own division gives the ranks other examples before the questions, and so
other numbers. Here all ranks make the same requests, and divide them in chunks, which are the same for any number of
ranks, as the bits of a result may depend on what else is in a batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from stages.base.errors import StageError
from stages.export.evaluation import DIGITS, rounded
from stages.forward.distributed import all_reduce_sum, run_on_all_ranks
from stages.model.tokenizer import find_start
from stages.ranks.watchdog import Heartbeat
from stages.scoring.request import Answer, Found, Measured, Terms
from stages.scoring.tasks import FEWSHOT_SEED, Loaded, check_network, explained_task

BATCH_SIZE = 8
"""Requests of a forward pass. Never `auto`, which tries the longest one first."""
CHUNK = 2 * BATCH_SIZE
"""Requests that one rank answers together, sorted by length. More would leave ranks idle at the end of a small task."""


class SharedModel(HFLM):  # type: ignore[misc]  # lm-eval is not installed where types are checked
    """A loaded model that answers the requests of all ranks together."""

    add_bos_token: bool | None
    """Of lm-eval; None: texts begin as the tokenizer begins them."""

    def __init__(
        self, model: PreTrainedModel, is_sharded: bool, tokenizer: Any, eos_token_id: Any, heartbeat: Heartbeat
    ) -> None:
        # In place of the model's own, from which penalties, beams and samples would be taken.
        model.generation_config = GenerationConfig(eos_token_id=eos_token_id)
        # Without what it puts after a text, such as EOS, which would be between a question and its answer.
        backend = tokenizer.backend_tokenizer
        start: dict[str, Any] = {"id": "start", "ids": find_start(backend, None)}
        start["tokens"] = [backend.id_to_token(token) for token in start["ids"]]
        backend.post_processor = TemplateProcessing("start $A", special_tokens=[start]) if start["ids"] else None
        if tokenizer.eos_token_id is None:  # the config alone names it
            ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
            tokenizer.eos_token = backend.id_to_token(ends[0])
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH_SIZE)
        self.truncated = 0
        """Requests of this rank that were cut."""
        self._heartbeat, self._is_sharded = heartbeat, is_sharded

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
        """See lm-eval; so the next two."""
        return self._divide(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
        before, self.add_bos_token = self.add_bos_token, False  # each window begins with BOS by itself
        found = self._divide(super().loglikelihood_rolling, requests)
        self.add_bos_token = before
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
        return self._divide(super().generate_until, requests)

    def _divide(self, ask: Callable[..., list[Any]], requests: list[Any]) -> list[Any]:
        chunks = [requests[first : first + CHUNK] for first in range(0, len(requests), CHUNK)]
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        own = []
        is_quiet = True if rank else None  # None: where there is no terminal
        with joined(self.model) if self._is_sharded else nullcontext():
            for index in tqdm(range(rank, len(chunks), num_ranks), desc="score", unit="chunk", disable=is_quiet):
                self._heartbeat.note(f"answering {len(chunks[index])} requests")
                torch.manual_seed(index)  # for tasks that sample: the same on any number of ranks
                own.append(ask(chunks[index], disable_tqdm=True))
        self._heartbeat.note("collecting the answers")
        parts = run_on_all_ranks(lambda: own)
        return [answer for index in range(len(chunks)) for answer in parts[index % num_ranks][index // num_ranks]]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> list[Any]:
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise StageError(f"an answer has {len(continuation)} tokens, and the model at most {self.max_length}")
            self.truncated += len(context) + len(continuation) > self.max_length + 1
        found: list[Any] = super()._loglikelihood_tokens(requests, **{**options, "disable_tqdm": True})
        if any(math.isnan(nats) for nats, _ in found):  # lm-eval would take it for the best choice
            raise StageError("the model gives NaN in place of log-likelihoods: its training has diverged")
        return found

    def _model_generate(self, *args: Any, **options: Any) -> Any:
        # The ranks of a sharded model need not write the same number of texts: see `joined`.
        return super()._model_generate(*args, **options, synced_gpus=False)

    def tok_batch_encode(
        self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **options: Any
    ) -> Any:
        """Prompts that the model continues."""
        ids, mask = super().tok_batch_encode(strings, *args, **options)
        if left_truncate_len:
            self.truncated += int((mask.sum(1) > left_truncate_len).sum())
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask


@contextmanager
def joined(model: PreTrainedModel) -> Iterator[None]:
    """Around the forward passes of a sharded model, which are collectives: a rank that has made its own helps others.

    Before each pass the ranks count those that have one of their own.
    """

    def count(*_: object) -> None:
        all_reduce_sum(1)

    hook = model.register_forward_pre_hook(count, prepend=True)  # before that of FSDP, which gathers weights
    yield
    hook.remove()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    while all_reduce_sum(0)[0]:
        model(token)


def ask(model: SharedModel, entry: str, loaded: Loaded, limit: int | None, chat: bool) -> Found:
    """Ask a model an entry of `tasks`; a collective.

    Args:
        model: Any.
        entry: Its name, for errors.
        loaded: Its tasks.
        limit: How many questions of each task; None: all.
        chat: Whether to write questions with the chat template.

    Raises:
        StageError: lm-eval cannot ask it, a request was cut, or another machine was asked for something.
    """
    model.truncated = 0
    # A chat template writes itself what begins a conversation, if anything does.
    model.add_bos_token = False if chat else None
    for task in loaded.tasks.values():
        task.set_fewshot_seed(FEWSHOT_SEED)
    with explained_task(entry, "ask"):
        try:
            # Not simple_evaluate, which starts pip, git and conda.
            results = evaluate(
                model, loaded.content, limit=limit, bootstrap_iters=0,
                apply_chat_template=chat, fewshot_as_multiturn=chat,  # each example is a turn, as in lm-eval's command
            )  # fmt: skip
        except OverflowError:
            problem = "a perplexity is too large for a number, as that of words in a text without spaces"
            raise StageError(f"tasks: {entry}: {problem}: name bits_per_byte instead") from None
    check_network(entry)
    (truncated,) = map(int, all_reduce_sum(model.truncated))
    if truncated and not loaded.allows_truncation():
        raise StageError(
            f"tasks: {truncated} requests of {entry} are longer than the {model.max_length} tokens of the model, "
            "and were cut on the left: lower num_fewshot or max_gen_toks, shorten the questions, or write into the "
            "task `metadata: {allow_truncation: true}`"
        )
    return describe(results, loaded, truncated)


def describe(results: Any, loaded: Loaded, truncated: int) -> Found:
    """What lm-eval has found, without what is not used."""
    children = loaded.content["group_map"]

    def shown(name: str) -> Iterator[str]:
        """A group that has a metric, or else what is in it."""
        if name not in children or _first_metric(results["results"][name]):
            yield name
        else:
            yield from chain.from_iterable(map(shown, children[name]))

    def tasks_of(name: str) -> Iterator[str]:
        if name in children:
            yield from chain.from_iterable(map(tasks_of, children[name]))
        else:
            yield name

    in_groups = {*chain.from_iterable(children.values())}
    roots = [name for name in [*children, *loaded.tasks] if name not in in_groups]
    measured = []
    for name in dict.fromkeys(chain.from_iterable(map(shown, roots))):
        members = [*dict.fromkeys(tasks_of(name))]
        metric_list = loaded.tasks[name]._metric_fn_list if name in loaded.tasks else ()  # of a group: unknown
        key = _first_metric(results["results"][name], metric_list)
        if key is None:
            raise StageError(f"tasks: {name} has no metric: name one in its metric_list")
        metric, _, chosen = key.partition(",")
        asked = [(loaded.tasks[task], each) for task in members for each in results["samples"][task]]
        asked = [(task, each) for task, each in asked if each["filter"] == chosen]
        score = rounded(results["results"][name][key])
        terms = _terms(metric, score, [each for _, each in asked])
        measured.append(
            Measured(
                task=name,
                members=members,
                metric=metric if chosen == "none" else f"{metric} {chosen}",
                higher_is_better=loaded.tasks[members[0]].higher_is_better().get(metric, True),
                questions=len(asked),
                num_fewshot=loaded.tasks[members[0]].config.num_fewshot or 0,
                score=score,
                chance=_chance(metric, asked) if terms else None,  # of a mean over questions
                truncated=truncated,
                terms=terms,
            )
        )
    first = {task: results["samples"][task][0]["filter"] for task in loaded.tasks}
    kept = [(task, each) for task in first for each in results["samples"][task] if each["filter"] == first[task]]
    return Found(measured, [_answer(loaded.tasks[task], each) for task, each in kept])


def _first_metric(values: dict[str, Any], metric_list: Iterable[str] = ()) -> str | None:
    """The first of the list that is there; lm-eval has them in an order of its own."""
    found = [key for key in values if "," in key and "_stderr," not in key]
    return next(chain((key for name in metric_list for key in found if key.startswith(f"{name},")), found), None)


def _terms(metric: str, score: float, samples: list[Any]) -> list[Terms]:
    """None where they do not add up to the score."""
    values = [each.get(metric) for each in samples]  # `process_results` may leave questions out
    if metric == "bits_per_byte":
        terms = [Terms(-nats / math.log(2), size) for nats, size in values]
    elif all(isinstance(value, (bool, int, float)) for value in values):
        terms = [Terms(float(value), 1.0) for value in values]
    else:
        return []
    mean = math.fsum(term.value for term in terms) / math.fsum(term.weight for term in terms)
    return terms if math.isclose(mean, score, rel_tol=1e-4, abs_tol=1e-6) else []


def _chance(metric: str, asked: list[tuple[Any, Any]]) -> float | None:
    """The share of right choices, if all questions have choices that lm-eval itself compares with the right ones."""
    shares = []
    for task, sample in asked:
        number = _num_choices(task, sample)
        if number is None or callable(task.config.process_results) or not metric.startswith("acc"):
            return None
        shares.append((len({*sample["target"]}) if task.multiple_target else 1) / number)
    return rounded(math.fsum(shares) / len(shares))


def _num_choices(task: Any, sample: Any) -> int | None:
    """With `acc_mutual_info` there are twice as many requests: lm-eval asks for each without the question, too."""
    return len(task.doc_to_choice(sample["doc"])) if task.OUTPUT_TYPE == "multiple_choice" else None


def _answer(task: Any, sample: Any) -> Answer:
    number = _num_choices(task, sample)
    requests, found = sample["arguments"][:number], sample["filtered_resps"][:number]
    has_choices = len(requests[0]) == 2 and isinstance(requests[0][1], str)
    written = round(found[0], DIGITS) if isinstance(found[0], float) else found[0]  # a number: of the whole text
    return Answer(
        task=task.task_name,
        row=sample["doc_id"],
        prompt=requests[-1][0],
        choices=[choice for _, choice in requests] if has_choices else [],
        target=sample["target"],
        answer=[round(nats, DIGITS) for nats, _ in found] if has_choices else written,
    )
