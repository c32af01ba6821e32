"""The whole pipeline for each architecture that transformers registers as a causal language model.

`python -m tests.architectures` (make architectures) tries them one by one, for an hour or more, and writes what it
finds into docs/models.csv, and how many work into docs/models.md. Run it again, on any machine, to continue. Remove
rows to try these types again. Name types to try them first. Another version of transformers tries all again.

A small random model, made from the default config of the type, goes through `download`, `plan`, three steps on two
ranks, a kill, a resume, `consolidate`, `from_pretrained` and `evaluate`. It counts as trained if

- the resumed training has the weights of the undisturbed one, bit for bit;
- the loss of the training, and that of `evaluate`, is the one that transformers computes for the exported model of each
  document alone, up to `TOLERANCE` of it.
"""

import argparse
import csv
import io
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stages import consolidate, download, evaluate, launch, plan
from stages.base import history, publish
from stages.base.errors import StageError, one_line
from stages.base.packed import VALIDATION
from stages.base.params_file import load_params
from stages.evaluation import measure
from stages.forward.attention_choice import refusal
from stages.forward.rows import TokenRows
from stages.forward.small_copy import VOCAB_SIZE, small_config
from stages.model.adapters import LinearKind
from stages.ranks.watchdog import Heartbeat
from tests.models import write_tokenizer
from tests.project import REPO, SMALL, Project
from tests.ranks import Ranks
from tests.trainings import newest_checkpoint, weights

OUTPUT = REPO / "outputs/architectures"
DOCUMENT, TABLE = REPO / "docs/models.md", REPO / "docs/models.csv"
BEGIN, END = "<!-- begin: make architectures -->", "<!-- end: make architectures -->"
STEPS, TOLERANCE, EOS, KILLED = 3, 1e-5, 0, -9
SECONDS, MEMORY = 300, 5 * 2**30

_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 128,
            "indexer_compress_ratio": 4}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""What published configs of a type have, and its default leaves out, so that it does not compute."""


@dataclass(frozen=True)
class Finding:
    """What became of an architecture: a row of docs/models.csv."""

    type: str
    status: str = "trained"
    """Or `refused` for what it is, by `download`; or `left`: something does not work."""
    attention: str = ""
    """What `auto` takes on a CPU."""
    padding: str = ""
    """Of the tokens that were computed."""
    loss: str = ""
    adapters: str = ""
    """Which linear modules in the layers can have adapters (LoRA)."""
    context_parallel: str = ""
    """Whether the test before a training accepts it: yes or no."""
    parameters: int = 0
    difference: float = 0
    """Between the last validation loss of the training and transformers' own loss of the model that was exported, of
    one document at a time, as a part of it."""
    reason: str = ""
    """Why it is refused or left, or why its attention is `padded`."""
    transformers: str = transformers.__version__


def make_base(project: Project) -> None:
    """Tokens of few words, in documents of 3 to 90, and what trainings of all architectures share."""
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(REPO / name, project.path)
    (project / "stages").symlink_to(REPO / "stages")
    project.set(
        **SMALL | {"validation_splits": 2, "seq_length": 64, "num_splits": 12, "warmup_steps": 1, "eval_freq": STEPS},
        max_steps=STEPS,
        eval_samples=0, runtime={"ckpt_freq": 1, "log_freq": 1, "timeout_minutes": 5, "num_workers": 1,
                                  "async_checkpoint": False},
    )  # fmt: skip
    words = [f"w{index}" for index in range(1, VOCAB_SIZE - 1)]  # the last token is the padding of `small_config`
    (project / "models/nano").mkdir(parents=True)
    write_tokenizer(project / "models/nano", ["<eos>", *words])
    transformers.LlamaConfig(vocab_size=VOCAB_SIZE, eos_token_id=EOS).save_pretrained(project / "models/nano")
    random = np.random.default_rng(0)
    for number in range(60):
        path = project / f"data/raw/{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(random.choice(words, random.integers(3, 90))))
    for stage in ("organize", "extract", "deduplicate", "download", "pack"):
        project.run("python", "-m", f"stages.{stage}")


def attempt(name: str, project: Project, ranks: Ranks, has_weights: bool = False) -> Finding:
    """Take an architecture through the pipeline, in a copy of the base; changes the working directory."""
    config = transformers.AutoConfig.for_model(name, **PUBLISHED.get(name, {}))
    has_encoder = config.is_encoder_decoder or hasattr(config, "text_encoder")
    small = config if has_encoder else small_config(config) or small_config(completed(config))
    if small is None:
        return Finding(name, "left", reason=f"its default config: {error_of_default(name)}")
    small.eos_token_id = small.get_text_config(decoder=True).eos_token_id = EOS
    small.save_pretrained(project / "models/nano")
    if has_weights:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(small).save_pretrained(project / "models/nano")
    os.chdir(project.path)
    try:
        manifest = download.describe(load_params(download.DownloadParams))
    except StageError as error:
        return Finding(name, "refused", reason=str(error).partition(": ")[2])
    manifest.write()
    run_stage(plan)
    killed = project.copy(project.path.with_name("killed"))
    output = train(ranks, project)
    train(ranks, killed, f"kill rank 1 at step {STEPS - 1}", [None, KILLED])
    resumed = train(ranks, killed)
    assert "resuming from step" in resumed, resumed
    assert weights(killed, STEPS) == weights(project, STEPS), "the resumed training has other weights"
    run_stage(launch)  # of a training that has finished: it writes what the next stages read
    run_stage(consolidate)
    with one_rank():
        evaluated = evaluate.evaluate(
            load_params(evaluate.EvaluateParams), load_params(evaluate.EvaluateRuntime, "runtime"),
            lambda request, _: measure.measure(request, Heartbeat()),
        )  # fmt: skip
    assert evaluated.validation
    rows = history.read(newest_checkpoint(project, STEPS) / "history.tsv")
    untrained, trained = history.series(rows, "validation_loss")[1]
    assert trained != untrained, "the training changes nothing"
    alone = loss_of_each_document()
    difference = max(abs(trained - alone), abs(evaluated.validation.loss - alone)) / alone
    finding = Finding(
        name, attention=found(r", attention (\w+),", output), loss=found(r", loss (\w+),", output),
        padding=found(r"(\d+%) of the tokens that are computed are padding", output),
        parameters=manifest.num_parameters, difference=difference,
        reason=found(r"attention: padded, because (.*);", output), adapters=adapted(manifest.linears),
        context_parallel="no" if refusal(small, "varlen", True, torch.float32, "cpu", is_cut=True) else "yes",
    )  # fmt: skip
    assert difference <= TOLERANCE, f"the loss differs by {difference:.1e} from that of each document alone"
    return finding


def adapted(linears: dict[str, LinearKind]) -> str:
    """Which of the linear modules can have adapters."""
    unfit = [name for name, linear in linears.items() if linear.problem]
    if len(unfit) == len(linears):
        return "none"
    ends = sorted({".".join(name.split(".")[-2:]) for name in unfit})
    return f"all but {', '.join(ends)}" if ends else "all"


def completed(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """The config with what all published ones of its type have, and the default leaves out."""
    text = config.get_text_config()
    heads, size, layers = (
        getattr(text, name, None) or 1 for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    missing: dict[str, Any] = {
        "num_key_value_heads": heads, "head_dim": size // heads,
        "layer_types": (["conv", "full_attention"] * layers)[:layers],
    }  # fmt: skip
    for key, value in text.to_dict().items():
        if value is None and (key in missing or "expert" in key):
            setattr(text, key, missing.get(key, 2))
    return config


@torch.no_grad()
def error_of_default(name: str) -> str:
    """What transformers itself says of the default config of a type, at its own size, without memory for values."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name))
            model(input_ids=torch.ones((1, 8), dtype=torch.long), use_cache=False)
    except Exception as error:
        if "meta tensors" not in str(error):  # else its own values decide what is computed
            return f"{type(error).__name__}: {one_line(error)}"
    number = sum(param.numel() for param in model.parameters())
    return f"it has {number:,} parameters, and no small copy of it computes"


def train(ranks: Ranks, project: Project, faults: str = "", expected: Sequence[int | None] = (0, 0)) -> str:
    ranks.start(project, faults)
    statuses, output = ranks.wait()
    errors = re.findall(r"^(?:error: |\w*Error: ).*", output, re.MULTILINE) or [output]
    for status, wanted in zip(statuses, expected, strict=True):
        assert wanted in (None, status), f"status {status}: {errors[0]}"
    return output


def run_stage(stage: Any) -> None:
    sys.argv = [stage.__name__]
    with redirect_stdout(sys.stderr):
        stage.main()


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


@torch.no_grad()
def loss_of_each_document() -> float:
    """The loss of the exported model, as transformers computes it, of one document at a time, over all tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained("outputs/test/model", dtype=torch.float32).eval()
    rows = TokenRows(VALIDATION)
    nats, count = 0.0, 0
    for row in rows.rows(rows.spread(load_params(launch.TrainParams).eval_rows)[""]):
        for document in np.split(row, np.flatnonzero(row == EOS) + 1):
            if len(document) > 1:
                tokens = torch.from_numpy(document)[None].long()
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
                nats += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
                count += len(document) - 1
    return nats / count


@contextmanager
def one_rank() -> Iterator[None]:
    """This process as a process group of its own, for `evaluate`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attempt_in_fork(name: str, base: Project, ranks: Ranks, log: Path, seconds: float = SECONDS) -> Finding:
    """With limits of time and memory."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        receiver, sender = context.Pipe(duplex=False)

        def work() -> None:
            with log.open("w") as file:
                for standard in (1, 2):
                    os.dup2(file.fileno(), standard)
            try:
                try:
                    finding = attempt(name, base.copy(Path(scratch, "project")), ranks)
                except AssertionError as error:
                    if "no rule for the random values" not in str(error):
                        raise
                    finding = attempt(name, base.copy(Path(scratch, "again/project")), ranks, has_weights=True)
            except BaseException as error:  # whatever it is, it is what the table says
                traceback.print_exc()
                finding = Finding(name, "left", reason=f"{type(error).__name__}: {one_line(error)}")
            sender.send(finding)

        process = context.Process(target=work)
        process.start()
        try:
            finding = Finding(name, "left", reason=f"takes more than {seconds:g} s")
            if receiver.poll(seconds):
                finding = receiver.recv()
        finally:
            process.kill()
            process.join()
        if finding.status == "left":  # a training may be under way
            ranks.restart()
        return finding


def read(path: Path) -> list[Finding]:
    """The rows of a table; none where there is no file."""
    if not path.exists():
        return []
    findings = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            parameters, difference = int(row.pop("parameters") or 0), float(row.pop("difference") or 0)
            findings.append(Finding(**row, parameters=parameters, difference=difference))
    return findings


def write(path: Path, findings: list[Finding]) -> None:
    """Replace a table. The reasons are cut, as some are pages."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [field.name for field in fields(Finding)], lineterminator="\n")
    writer.writeheader()
    for each in findings:
        is_trained = each.status == "trained"
        writer.writerow(asdict(each) | {
            "parameters": each.parameters or "", "difference": f"{each.difference:.0e}" if is_trained else "",
            "reason": " ".join(each.reason.split())[:300],
        })  # fmt: skip
    publish.write_text(path, file.getvalue())


def count(findings: list[Finding]) -> str:
    """How many of them work, for docs/models.md."""
    trained, refused, left = ([each.type for each in findings if each.status == status]
                              for status in ("trained", "refused", "left"))  # fmt: skip
    parallel = sum(each.context_parallel == "yes" for each in findings)
    return (
        f"With transformers {findings[0].transformers}, on a CPU in fp32: {len(trained)} of {len(findings)} types are "
        f"trained. {len(refused)} are refused for what they are. {len(left)} do not work yet: {', '.join(left)}. "
        f"{parallel} can be trained with `context_parallel`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="which to try first")
    parser.add_argument("--only", action="store_true", help="these alone, with findings.csv beside the logs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory of the logs; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for each (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, and continue at the next run")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "findings.csv" if args.only else TABLE
    tried = {each.type: each for each in read(path) if each.transformers == transformers.__version__}
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # of each process from now on
    with tempfile.TemporaryDirectory() as directory:
        base, ranks = Project(Path(directory, "base")), Ranks(Path(directory))
        base.path.mkdir()
        make_base(base)
        others = [] if args.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        for name in dict.fromkeys([*args.names, *others]):
            if name in tried or time.monotonic() > end:
                continue
            finding = tried[name] = attempt_in_fork(name, base, ranks, args.output / f"{name}.log", args.seconds)
            write(path, [tried[key] for key in sorted(tried)])
            print(name, finding.status, finding.attention, finding.reason[:150], flush=True)
        ranks.close()
    if not args.only:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        lines = textwrap.fill(count(read(path)), 120, break_on_hyphens=False)
        DOCUMENT.write_text("\n".join([before + BEGIN, "", lines, "", END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
