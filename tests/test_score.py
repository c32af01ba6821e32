"""The answers are those of the model, on any number of ranks; and no number is stale, or wrong without a word."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from stages import score
from stages.base import code, outputs, publish
from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.base.identity import TokenFingerprints
from stages.base.packed import TRAIN, VALIDATION
from stages.evaluation import generation, sharing
from stages.export.lineage import InitialModel, Lineage
from stages.export.scores import Scores
from stages.model.manifest import MODEL_MANIFEST, TOKENIZER
from stages.model.tokenizer import load as load_tokenizer
from stages.pack import PackParams, PackRuntime, pack
from stages.ranks import asking, handoff
from stages.score import ScoreParams, ScoreRuntime
from stages.scoring import packages, public, rank
from stages.scoring.request import Answer, Found, Measurements, Request
from tests import public_tasks
from tests.artifacts import describe
from tests.corpus import keep_all, make_corpus
from tests.hub_server import COMMIT, Hub
from tests.network import CAN_UNSHARE, IN_A_NAMESPACE
from tests.project import REPO, Project, flip_bit, make_nano, run_python, save_weights
from tests.ranks import Ranks

PARAMS = ScoreParams(experiment_name="exp", tasks=["evals/mc.yaml"], task_limit=None, task_chat=False)
RUNTIME = ScoreRuntime(num_workers=1, nproc_per_node=1, reuse_gib=1, timeout_minutes=5)
ROWS = [
    {"q": f"Question {number}: which word follows {'and so on ' * (number % 5)}?", "c": ["the", f"a {number}", "of it"],
     "a": number % 3, "text": f"The file of number {number} says it {number * 3} times. " * (number + 1)}
    for number in range(20)
]  # fmt: skip
BASE = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "evals/rows.jsonl"}}, "test_split": "test"}
TASKS: dict[str, dict[str, Any]] = {
    "mc": {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "c", "doc_to_target": "a",
        "num_fewshot": 2, "fewshot_split": "test",
    },
    "qa": {
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{c[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "ppl": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
}  # fmt: skip
OF_WORDS = [{"metric": "word_perplexity"}]
OF_EVALUATE = {"metric": "bleurt", "hf_evaluate": True, "aggregation": "mean", "higher_is_better": True}


@pytest.fixture(scope="session")
def installed() -> Path:
    """The packages of lm-eval, in this copy of the project."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        patch.delenv("DVC_ROOT", raising=False)
        return packages.ensure_installed()


@pytest.fixture(scope="session")
def lm_eval_packages(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with few tasks, whose thousands of files lm-eval would read again and again."""
    target = tmp_path_factory.mktemp("packages") / installed.name
    public_tasks.link_packages(installed, target)
    return target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, lm_eval_packages: Path) -> Project:
    """An initial model, one that was trained from it, and tasks."""
    project = Project(tmp_path_factory.mktemp("score"))
    for name in ("params.yaml", "dvc.yaml", packages.LOCK):
        shutil.copy(REPO / name, project.path)
    (project / "stages").symlink_to(REPO / "stages")
    (project / packages.directory().parent.name).symlink_to(lm_eval_packages.parent)
    make_nano(project / "models/nano", max_position_embeddings=128)
    save_weights(project / "models/nano")
    model = project / "outputs/exp/model"
    shutil.copytree(project / "models/nano", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        describe("models/nano").write()
        publish.write_text(TOKENIZER, load_tokenizer(Path("models/nano")).content)
        train_on(["A document to train on."] * 9)
        change_weights(model)
        (project / "evals").mkdir()
        write_rows(ROWS)
        for name in TASKS:
            write_task(name)
    project.set(experiment_name="exp", tasks=[f"evals/{name}.yaml" for name in TASKS])
    return project


def train_on(documents: list[str]) -> None:
    """Have them in the training data."""
    make_corpus([documents, ["A document that is held out."] * 9])
    keep_all()
    pack(PackParams(seq_length=8, validation_splits=1, fast_encoder=False), PackRuntime(num_workers=1, reuse_gib=1))


def change_weights(model: Path, factor: float = 1.5) -> None:
    """Train a model, in a way, and describe it as `consolidate` does."""
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    files = {file.name: publish.sha256_file(file) for file in sorted(model.iterdir()) if file.name != "lineage.json"}
    data = TokenFingerprints(*(Dataset.read(directory, "pack").fingerprint for directory in (TRAIN, VALIDATION)))
    Lineage(
        run_id="0123", step=3, adopted=None, data=data, params={}, code="c",
        model=InitialModel("nano", "main", None, publish.sha256_file(MODEL_MANIFEST), lineage=None), packages={},
        checkpoint="cs", weights={path.name: files.pop(path.name)}, files=files,
    ).write(model / "lineage.json")  # fmt: skip


def write_rows(rows: list[dict[str, Any]]) -> None:
    Path("evals/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_task(name: str, **changes: Any) -> None:
    Path(f"evals/{name}.yaml").write_text(yaml.safe_dump({"task": name, **BASE, **TASKS[name], **changes}))


@pytest.fixture
def project(made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it as the current directory."""
    copy = made.copy(tmp_path / "project")
    monkeypatch.chdir(copy.path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return copy


@pytest.fixture
def lm_eval(lm_eval_packages: Path, mesh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval can be imported, and this process is the only rank."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(lm_eval_packages)])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def measure(request: Request, _: int | None = None) -> Measurements:
    """In this process, in place of ranks."""
    import torch

    from stages.forward.attention import deactivate_kernels
    from stages.ranks.watchdog import Heartbeat
    from stages.scoring.measure import measure

    try:
        found = measure(request, Heartbeat(), Path(tempfile.mkdtemp(dir=".")))
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "which prepares itself for each length"
        return found
    finally:
        deactivate_kernels()


def ask(*names: str, **changes: Any) -> Scores:
    """Run the stage in this process."""
    tasks = [f"evals/{name}.yaml" for name in names]
    print(score.score(dataclasses.replace(PARAMS, tasks=tasks, **changes), RUNTIME, measure))
    return Scores.read(outputs.TASKS)


def answers(task: str) -> list[dict[str, Any]]:
    lines = map(json.loads, outputs.ANSWERS.read_text().splitlines())
    return [line for line in lines if line["task"] == task]


def be_rank(_: int, *requests: tuple[Path, int]) -> None:
    """One of the ranks that the stage starts, for one request after the other: where, and the free memory."""
    for directory, free_bytes in requests:
        sharing.free_memory = lambda free_bytes=free_bytes: free_bytes  # type: ignore[misc]
        if not free_bytes:
            generation.load = None  # type: ignore[assignment]  # no copy of a model
        os.environ[handoff.DIRECTORY] = str(directory)
        rank.main()


ALL = dataclasses.replace(PARAMS, tasks=[f"evals/{name}.yaml" for name in TASKS])


@pytest.fixture(scope="module")
def asked(made: Project, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """After two ranks have answered all tasks, and then some again, with models that do not fit into memory."""
    project = made.copy(tmp_path_factory.mktemp("asked") / "project")

    def measure(request: Request, _: int | None) -> Measurements:
        again = dataclasses.replace(request, limit=6, store="other")
        for name, each in (("whole", request), ("sharded", again)):
            (project / name).mkdir()
            each.write(project / name / asking.REQUEST)
        ranks.call(be_rank, (project / "whole", 2**40), (project / "sharded", 0))
        return Measurements.read(project / "whole" / asking.ANSWER)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.path)
        patch.delenv("DVC_ROOT", raising=False)
        score.score(ALL, RUNTIME, measure)
    return project


def test_the_answers_are_those_of_the_model(asked: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """With examples before each question."""
    monkeypatch.chdir(asked.path)
    check_with_transformers(Path("outputs/exp/model"), "answer")
    check_with_transformers(Path("models/nano"), "answer_of_initial")


def test_a_text_begins_as_the_documents_of_the_training_and_nothing_ends_it(project: Project, lm_eval: None) -> None:
    """Where the tokenizer also puts EOS after a text, and where lm-eval puts BOS before a window."""
    start = begin_with_bos(Path("outputs/exp/model"))
    ask(*TASKS)
    check_with_transformers(Path("outputs/exp/model"), "answer", start)


def test_a_conversation_begins_as_its_template_begins_it(project: Project, lm_eval: None) -> None:
    shutil.copy(REPO / "models/templates/plain.jinja", "outputs/exp/model/chat_template.jinja")
    begin_with_bos(Path("outputs/exp/model"))
    ask("qa", task_chat=True)
    assert answers("qa")
    check_with_transformers(Path("outputs/exp/model"), "answer")


def test_the_config_alone_may_name_eos(project: Project, lm_eval: None) -> None:
    """Which `download` accepts."""
    expected, path = ask(*TASKS, task_limit=2), Path("outputs/exp/model/tokenizer_config.json")
    config = publish.read_json(path)
    publish.write_json(path, {name: config[name] for name in config if name not in ("eos_token", "pad_token")})
    change_weights(path.parent, 1.0)
    assert ask(*TASKS, task_limit=2) == expected


def test_another_number_of_ranks_writes_the_same_bytes(project: Project, lm_eval: None, asked: Project) -> None:
    score.score(ALL, RUNTIME, measure)
    for path in (outputs.TASKS, outputs.SCORES, outputs.ANSWERS):
        assert path.read_bytes() == (asked.path / path).read_bytes()


def test_the_command_asks_no_nameserver_and_listens_on_loopback_alone(project: Project) -> None:
    """In a network namespace that has no way out."""
    project.set(tasks=["evals/mc.yaml"], task_limit=2, runtime={"nproc_per_node": 1})
    output = project.run(*(IN_A_NAMESPACE if CAN_UNSHARE else ()), "python", "-m", "stages.score")
    assert "  mc acc  " in output
    if CAN_UNSHARE:
        observed = json.loads(output.split("observed ")[1])
        assert (observed["names"], observed["everywhere"]) == ([], [])


def begin_with_bos(directory: Path) -> list[int]:
    """Have the tokenizer of a trained model put BOS before a text, and EOS after it; returns the former."""
    path, config, bos = directory / "tokenizer.json", directory / "tokenizer_config.json", 4000
    tokenizer = Tokenizer.from_file(str(path))
    names = [(tokenizer.id_to_token(token), token) for token in (bos, 0)]
    tokenizer.post_processor = TemplateProcessing(single=f"{names[0][0]} $A {names[1][0]}", special_tokens=names)
    tokenizer.save(str(path))
    publish.write_json(config, publish.read_json(config) | {"bos_token": names[0][0]})
    change_weights(directory, 1.0)
    return [bos]


def check_with_transformers(directory: Path, key: str, start: list[int] | None = None) -> None:
    """Of a model whose texts begin with `start`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)

    def nats(prompt: list[int], continuation: list[int]) -> float:
        ids = [*prompt, *continuation]
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(found[len(ids) - n - 1, ids[-n]]) for n in range(1, len(continuation) + 1))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    for row in answers("mc")[:5]:
        assert row["prompt"].count("Question") == 3
        prompt = encode(row["prompt"])
        continuations = [encode(row["prompt"] + choice)[len(prompt) :] for choice in row["choices"]]
        expected = [nats([*(start or []), *prompt], continuation) for continuation in continuations]
        assert row[key] == pytest.approx(expected, abs=1e-5)
    for row in answers("ppl")[:3]:  # in one window
        before = start or [tokenizer.eos_token_id]
        assert row[key] == pytest.approx(nats(before, encode(row["prompt"])), abs=1e-4)
        assert row[key] == round(row[key], 6)
    for row in answers("qa")[:5]:
        ids = torch.tensor([[*(start or []), *encode(row["prompt"])]])
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                                    repetition_penalty=1.0, pad_token_id=0)  # fmt: skip
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert row[key] == text.partition("\n")[0]


def test_a_sharded_model_gives_the_answers_of_a_whole_one(asked: Project) -> None:
    """Although the ranks have different requests, and different numbers of them: each pass is a collective."""
    whole, sharded = (Measurements.read(asked / name / asking.ANSWER) for name in ("whole", "sharded"))
    for found, expected in ((sharded.trained, whole.trained), (sharded.initial, whole.initial)):
        for task in ALL.tasks:
            assert len(found[task].answers) == 6
            for one, other in zip(found[task].answers, expected[task].answers[:6], strict=True):
                is_text = isinstance(other.answer, str) and "ppl" not in task
                assert one.answer == (other.answer if is_text else pytest.approx(other.answer, abs=1e-5))


def test_one_answer_that_changes_changes_the_number(project: Project, lm_eval: None) -> None:
    """Although the file has the same name, size and time."""
    file = Path("evals/rows.jsonl")
    (before,) = ask("mc", task_limit=1).tasks
    (row,) = answers("mc")
    best = int(np.argmax(row["answer"]))
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    write_rows([ROWS[0] | {"a": (best + 1) % 3 if row["target"] == best else best}, *ROWS[1:]])
    os.utime(file, ns=times)
    (after,) = ask("mc", task_limit=1).tasks
    assert {before.score, after.score} == {0.0, 1.0}


def test_what_was_measured_of_the_initial_model_is_used_again(
    project: Project, lm_eval: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until something changes that decides it."""

    def num_reused(*names: str, **changes: Any) -> int:
        ask(*names, **changes)
        return int(re.findall(r"(\d)  results? +reused\n", capsys.readouterr().out)[-1])

    assert num_reused("mc", task_limit=3) == 0
    assert len(answers("mc")) == 3
    assert num_reused("mc", task_limit=3) == 2
    initial = [row["answer_of_initial"] for row in answers("mc")]
    change_weights(Path("outputs/exp/model"))  # another experiment
    assert num_reused("mc", task_limit=3) == 1
    assert initial == [row["answer_of_initial"] for row in answers("mc")]
    assert num_reused("mc", task_limit=2) == 0
    assert len(answers("mc")) == 2
    write_task("mc", num_fewshot=1)
    assert num_reused("mc", "qa", task_limit=2) == 0
    Path("evals/utils.py").write_text("x = 1\n")
    assert num_reused("qa", task_limit=2) == 0
    assert num_reused("qa", task_limit=2) == 2
    loads, parse = Path(generation.__file__).read_bytes(), code._parse
    monkeypatch.setattr(code, "_parse", lambda source: ("an edit", frozenset()) if source == loads else parse(source))
    assert num_reused("qa", task_limit=2) == 0


def test_a_group_is_shown_or_what_is_in_it_and_an_edit_of_it_is_noticed(project: Project, lm_eval: None) -> None:
    def ask_group(**config: Any) -> list[tuple[str, str, int, int]]:
        Path("evals/top.yaml").write_text(yaml.safe_dump({"group": "top", **config}))
        return [(each.task, each.metric, each.questions, each.too_short) for each in ask("top", task_limit=3).tasks]

    Path("evals/other.yaml").write_text(yaml.safe_dump({"task": "other", **BASE, **TASKS["mc"], "num_fewshot": 0}))
    mean = {"aggregate_metric_list": [{"metric": "acc"}]}
    inner = {"group": "inner", "task": ["mc", "other"], **mean}
    of_others = ask_group(task=["qa", inner])
    assert [each[:3] for each in of_others] == [("qa", "exact_match", 3), ("top::inner", "acc", 6)]
    assert [found for _, _, _, found in of_others] == [3, 4]
    assert [each[:3] for each in ask_group(task=["mc", "other"])] == [("mc", "acc", 3), ("other", "acc", 3)]
    assert [each[:3] for each in ask_group(task=["mc", "other"], **mean)] == [("top", "acc", 6)]


@pytest.mark.parametrize(("by_size", "chance"), [(True, (20 / 3 + 4 / 2) / 24), (False, None)])
def test_the_chance_of_a_group_is_that_of_a_mean_over_questions(
    project: Project, lm_eval: None, by_size: bool, chance: float | None
) -> None:
    rows = [row | {"c": row["c"][:2], "a": 0} for row in ROWS[:4]]
    Path("evals/two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = {**BASE, **TASKS["mc"], "task": "other", "dataset_kwargs": {"data_files": {"test": "evals/two.jsonl"}}}
    Path("evals/other.yaml").write_text(yaml.safe_dump(other))
    metrics = [{"metric": "acc", "weight_by_size": by_size}]
    group = {"group": "top", "task": ["mc", "other"], "aggregate_metric_list": metrics}
    Path("evals/top.yaml").write_text(yaml.safe_dump(group))
    (found,) = ask("top").tasks
    assert found.chance == (chance and pytest.approx(chance, rel=1e-5))


def test_random_initial_weights_are_not_asked(project: Project, lm_eval: None) -> None:
    describe("models/nano", "random").write()
    with pytest.raises(StageError, match="is not of the model that run 0123 was trained from: run `dvc repro score`"):
        ask("mc", task_limit=2)
    change_weights(Path("outputs/exp/model"))
    (found,) = ask("mc", task_limit=2).tasks
    assert (found.initial, found.difference, found.difference_stderr) == (None, None, None)
    assert found.stderr
    assert {row["answer_of_initial"] for row in answers("mc")} == {None}


def test_the_standard_errors_are_those_of_statistics(asked: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(asked.path)
    of_choices, _, of_text = Scores.read(outputs.TASKS).tasks
    right = [float(max(row["answer"]) == row["answer"][row["target"]]) for row in answers("mc")]
    assert of_choices.stderr == pytest.approx(np.std(right, ddof=1) / math.sqrt(20), rel=1e-5)
    assert of_choices.chance == pytest.approx(1 / 3, rel=1e-5)
    # The bits of all bytes: with the jackknife, which needs no formula for it.
    bits = np.array([[float(row[key]) for row in answers("ppl")] for key in ("answer", "answer_of_initial")])
    bits = (bits[0] - bits[1]) / -math.log(2)
    sizes = np.array([len(row["prompt"].encode()) for row in answers("ppl")])
    left_out = (bits.sum() - bits) / (sizes.sum() - sizes)
    assert of_text.difference == pytest.approx(bits.sum() / sizes.sum(), abs=1e-5)
    jackknife = math.sqrt(19 / 20 * ((left_out - left_out.mean()) ** 2).sum())
    assert of_text.difference_stderr == pytest.approx(jackknife, rel=0.2)
    assert json.loads(outputs.SCORES.read_text())["mc"]["acc"] == of_choices.score


@pytest.mark.parametrize(
    ("changes", "code", "chance"),
    [
        ({}, "", 1 / 3),
        ({"doc_to_target": "right"}, "", 2 / 3),
        ({"metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}]}, "", 1 / 3),
        ({"metric_list": [{"metric": "acc_norm"}, {"metric": "acc"}]}, "", 1 / 3),
        ({}, "process_results: !function utils.compare\n", None),
    ],
    ids=["one right choice", "two right choices", "choices without the question", "two metrics", "its own comparison"],
)
def test_the_chance_is_what_guessing_gives(
    project: Project, lm_eval: None, changes: dict[str, Any], code: str, chance: float | None
) -> None:
    write_rows([row | {"right": [0, 2]} for row in ROWS])
    Path("evals/utils.py").write_text("def compare(row, answers):\n    return {'acc': 0.5} if row['a'] else {}\n")
    write_task("mc", num_fewshot=0, **changes)
    with Path("evals/mc.yaml").open("a") as file:
        file.write(code)
    (found,) = ask("mc", task_limit=3).tasks
    assert found.metric == changes.get("metric_list", [{"metric": "acc"}])[0]["metric"]
    assert found.chance == (chance and pytest.approx(chance, rel=1e-5))
    assert [(len(row["choices"]), row["prompt"]) for row in answers("mc")] == [(3, row["q"]) for row in ROWS[:3]]


def test_a_question_in_the_training_documents_is_counted_and_the_score_of_the_others_shown(
    project: Project, lm_eval: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [" ".join(f"{word}{number}" for word in ("at", "be", "to", "in", "on")) for number in range(20)]
    write_rows([row | {"q": f"Is {words[number]} it, or {words[-number]}?"} for number, row in enumerate(ROWS[:12])])
    write_task("mc", num_fewshot=0, doc_to_text="Q: {{q}}\nA:")
    planted = f"So is {words[4]} it? Or {words[-4]}! {ROWS[4]['c'][ROWS[4]['a']]} and so on"
    train_on(["A document to train on."] * 9 + [planted])
    change_weights(Path("outputs/exp/model"))
    (found,) = ask("mc").tasks
    right = [float(max(row["answer"]) == row["answer"][row["target"]]) for row in answers("mc")]
    assert [row["row"] for row in answers("mc") if row["in_training"]] == [4]
    assert (found.contaminated, found.too_short) == (1, 0)
    assert found.clean_score == pytest.approx((sum(right) - right[4]) / 11, rel=1e-5)
    warning = f"warning: 1 question of mc in the documents to train on; acc without them is {found.clean_score:.4f}\n"
    assert warning in capsys.readouterr().out
    metrics = json.loads(outputs.SCORES.read_text())["mc"]
    assert metrics == {"acc": found.score, "acc_clean": found.clean_score, "contaminated": 1, "too_short": 0}


def bad_rows(number: int, **changes: Any) -> None:
    write_rows([row | changes if index == number else row for index, row in enumerate(ROWS)])


@pytest.mark.parametrize(
    ("spoil", "name", "message"),
    [
        (lambda: None, "mcc", r"evals/mcc.yaml is no file below evals/ .*did you mean evals/mc.yaml"),
        (lambda: Path("evals/x.yaml").write_text("task: [1\nq: 2"), "mc", r"evals/x.yaml is no valid YAML.*line 2"),
        (lambda: Path("evals/x.yaml").write_text("a: 1"), "x", "evals/x.yaml has no name: add a line .* `task: x`"),
        (lambda: Path("evals/x.yaml").write_text("task: 2024"), "mc", "evals/x.yaml: task is 2024, .* in quotes"),
        (lambda: write_task("mc", doc_to_text="{{question}}"), "mc", "'question' is undefined: .* columns are a, c, q"),
        (lambda: write_task("mc", doc_to_text="question"), "mc", "mc: doc_to_text: question is no column: .* a, c, q"),
        (lambda: write_task("mc", dataset_kwargs={"data_files": ["a.jsonl"]}), "mc", "a.jsonl is not below evals/"),
        (lambda: write_task("mc", dataset_kwargs={"data_files": "evals/a.jsonl"}), "mc", "a.jsonl, .*, is missing"),
        (lambda: write_task("qa", metric_list=[OF_EVALUATE]), "qa", "qa uses bleurt, which is no metric of lm-eval"),
        (lambda: write_task("mc", unsafe_code=True), "mc", "mc runs code that the model writes"),
        (lambda: write_task("mc", dataset_path="org/name"), "mc", r"set org/name \(default .*\) is not in .*--fetch"),
        (lambda: bad_rows(4, a=None), "mc", "mc: evals/rows.jsonl, row 5: a is missing or empty: correct or remove it"),
        (lambda: bad_rows(4, a=3), "mc", r"row 5: the answer 3 is none of the choices \['the', 'a 4', 'of it'\]"),
        (lambda: bad_rows(4, a=-1), "mc", "row 5: the answer -1 is none of the choices"),
        (lambda: bad_rows(4, c=["the", "", "of"]), "mc", "row 5: c is missing or empty"),
        (lambda: bad_rows(0, c=["", "the", "of"]), "mc", r"mc.yaml \(IndexError .*, or .* empty choice"),
        (lambda: write_rows([]), "mc", r"mc.yaml \(StopIteration\): its first row may be missing"),
        (lambda: bad_rows(6, c=[" "]), "qa", "row 7: c is missing or empty"),
        (lambda: bad_rows(6, text=None), "ppl", "row 7: text is missing or empty"),
        (lambda: write_task("qa", doc_to_target="{{c[0] if a else ''}}"), "qa", "row 1: the answer is empty"),
        (lambda: Path("evals/rows.jsonl").write_text('{"q": 1'), "mc", "rows.jsonl cannot be read: .*JSON"),
        (lambda: shutil.copy("evals/mc.yaml", "evals/x.yaml"), "mc x", "mc is in evals/mc.yaml and evals/x.yaml"),
        (lambda: change_weights(Path("outputs/exp/model"), math.nan), "mc", "the model gives NaN"),
        (lambda: (bad_rows(0, text="\u4e2d" * 400), write_task("ppl", metric_list=OF_WORDS)), "ppl", "bits_per_byte"),
        (lambda: write_task("mc", fewshot_split=None), "mc", "mc: .* own answer: .* `test_split: test` and `fewshot_"),
        (lambda: write_task("mc", num_fewshot=12), "mc", r"requests of evals/mc.yaml are longer than the 128 tokens"),
        (lambda: write_task("qa", generation_kwargs={"max_gen_toks": 120}), "qa", "requests of .* longer"),
    ],
)  # fmt: skip
def test_what_would_give_a_wrong_number_is_refused(
    spoil: Callable[[], Any], name: str, message: str, project: Project, lm_eval: None
) -> None:
    spoil()
    with pytest.raises(StageError, match=message):
        ask(*name.split(), task_limit=1)
    assert not outputs.TASKS.exists()


def test_requests_that_are_cut_are_counted_where_a_task_allows_it(project: Project, lm_eval: None) -> None:
    write_task("mc", num_fewshot=12, metadata={"allow_truncation": True})
    (found,) = ask("mc", task_limit=2).tasks
    assert 0 < found.truncated <= 2 * 6


def test_the_generation_config_of_a_model_changes_no_answer(project: Project, lm_eval: None) -> None:
    ask("qa", task_limit=3)
    before, directory = answers("qa"), Path("outputs/exp/model")
    config = json.loads((directory / "generation_config.json").read_text())
    changed = {**config, "repetition_penalty": 9.0, "do_sample": True, "num_beams": 3, "min_new_tokens": 5}
    (directory / "generation_config.json").write_text(json.dumps(changed))
    change_weights(directory, 1.0)
    shutil.rmtree("data/.reuse")
    ask("qa", task_limit=3)
    assert answers("qa") == before


def test_questions_can_be_written_with_the_chat_template(project: Project, lm_eval: None) -> None:
    """The initial model gets the same ones, though it has no template."""
    with pytest.raises(StageError, match="task_chat is true, and the model has no chat template"):
        ask("qa", task_chat=True)
    shutil.copy(REPO / "models/templates/plain.jinja", "outputs/exp/model/chat_template.jinja")
    change_weights(Path("outputs/exp/model"), 1.0)
    ask("qa", task_chat=True, task_limit=1)
    assert answers("qa")[0]["prompt"] == f"User: {ROWS[0]['q']}\nAssistant:"
    assert answers("qa")[0]["answer_of_initial"] is not None
    write_task("qa", num_fewshot=2, fewshot_split="test")
    ask("qa", task_chat=True, task_limit=1)
    turns = r"(User: Question .*\nAssistant: the<.endoftext.>\n){2}User: Question .*\nAssistant:"
    assert re.fullmatch(turns, answers("qa")[0]["prompt"])


@pytest.fixture
def hub(tmp_path: Path, installed: Path) -> Iterator[Hub]:
    """A Hub with public tasks."""
    with Hub().serve() as hub:
        public_tasks.serve_all(hub, tmp_path / "hub", installed)
        yield hub


NAMES_THE_HUB = """
import socket, sys
find = socket.getaddrinfo
def getaddrinfo(host, *args, **kwargs):
    sys.audit("socket.getaddrinfo", host)
    return find("127.0.0.1" if host == "hub.test" else host, *args, **kwargs)
socket.getaddrinfo = getaddrinfo
"""


ARC = Path("evals/public/allenai--ai2_arc/ARC-Easy/test-00000-of-00001.parquet")
TWICE = f"""
from pathlib import Path
from stages import score
score.main()
Path("{ARC}").unlink()
score.main()
"""


def fetch(
    project: Project, hub: Hub, *names: str, program: tuple[str, str] = ("-m", "stages.score"), status: int = 0
) -> str:
    """Run `--fetch` with a cache of its own, and the Hub as a machine that is not this one."""
    (project.path.parent / "sitecustomize.py").write_text(NAMES_THE_HUB)
    settings = {"HF_ENDPOINT": hub.url.replace("127.0.0.1", "hub.test"), "PYTHONPATH": str(project.path.parent)}
    settings |= {"HF_HOME": str(project.path.parent / "hf"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "no_proxy": "*"}
    return project.run("python", *program, "--fetch", *names, status=status, **settings)


def test_a_public_task_is_fetched_and_then_asked_from_its_files_alone(
    project: Project, lm_eval: None, hub: Hub
) -> None:
    """One that was removed is fetched again."""
    output = fetch(project, hub, "arc_easy", program=("-c", TWICE))
    assert "fetching allenai/ai2_arc at fedcba987654: 8 files" in output and "dvc add evals/public/*--*" in output
    directory, manifest = Path("evals/public/allenai--ai2_arc"), project.json("evals/public/manifest.json")
    found = manifest["datasets"]["allenai/ai2_arc"]
    assert (manifest["tasks"], found["commit"]) == ({"arc_easy": ["allenai/ai2_arc"]}, COMMIT)
    assert found["configs"]["ARC-Easy"]["test"] == ["ARC-Easy/test-00000-of-00001.parquet"]
    assert {"README.md", "LICENSE"} < {*found["files"]}
    for name, entry in found["files"].items():
        assert entry["sha256"] == publish.sha256_file(directory / name)

    tasks = dataclasses.replace(PARAMS, tasks=["arc_easy"])
    score.score(tasks, RUNTIME, measure)
    (score_of_arc,) = Scores.read(outputs.TASKS).tasks
    assert (score_of_arc.metric, score_of_arc.questions, score_of_arc.chance) == ("acc", 6, 0.5)
    copy = shutil.copy(ARC, ARC.with_name("test-00001-of-00001.parquet"))
    with pytest.raises(StageError, match=r"ARC-Easy/test-00001-of-00001.parquet is not in .*: remove it"):
        score.score(tasks, RUNTIME, measure)
    copy.unlink()
    flip_bit(ARC, 900)
    with pytest.raises(StageError, match=r"ARC-Easy/test-00000-of-00001.parquet is damaged .*: `dvc pull evals/public"):
        score.score(tasks, RUNTIME, measure)
    (directory / "LICENSE").unlink()
    with pytest.raises(StageError, match="LICENSE is missing"):
        public.check(["arc_easy", "evals/mc.yaml"])
    Path("evals/public/manifest.json").write_text(json.dumps(manifest | {"datasets": {}}))
    with pytest.raises(StageError, match="'arc_easy' is neither in evals/ nor fetched"):
        public.check(["arc_easy"])


@pytest.mark.slow
def test_what_is_not_as_the_hub_lists_it_or_needs_more_than_data_sets_is_not_fetched(
    project: Project, hub: Hub
) -> None:
    write_code_that_asks_the_network()
    for name, message in (
        ("humaneval", "humaneval needs the package evaluate, which would fetch more than data, or run what the model"),
        ("arc_esy", "'arc_esy' is neither a task of lm-eval nor a file (did you mean arc_easy"),
        ("evals/mc.yaml", "evals/mc.yaml asks the network for 192.0.2.1"),
    ):
        assert f"error: tasks: {message}" in fetch(project, hub, name, status=2)
    assert [request for request in hub.requests if "datasets" in request.path] == []
    assert "error: tasks: squadv2 needs the package evaluate" in fetch(project, hub, "squadv2", status=2)  # to compare
    assert "error: the Hub does not give aps/super_glue (" in fetch(project, hub, "boolq", status=2)
    name = "ARC-Easy/test-00000-of-00001.parquet"
    hub.changed[name] = hub.models["datasets/allenai/ai2_arc"][name].replace(b"PAR1", b"PAR2")
    assert f"ai2_arc/{name} is damaged or was changed: its SHA-256" in fetch(project, hub, "arc_easy", status=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"'group' is neither in evals/ nor fetched: correct it, or run `python -m stages.score --fetch group`"),
        ({"group": "group", "task": ["mc", "qq"]}, r"'qq' is neither in evals/ nor fetched \(did you mean qa\?\)"),
        ({"group": "group", "task": [{"task": "boolq", "num_fewshot": 1}]}, "'boolq' is neither"),
        ({"group": "group", "task": ["mc", {"task": "own", **BASE}]}, None),
        ({"group": "group", "task": [{"task": "own", **BASE, "dataset_kwargs": {"data_files": "x"}}]}, "x is not b"),
        ({"group": "group", "task": [{"group": "inner", "task": ["mc", "qq"]}]}, "'qq' is neither"),
        ({"group": "group", "task": [{"group": "mmlu", "num_fewshot": 1}]}, "'mmlu' is neither"),
        ({"task": "group", "include": "mc.yaml"}, None),
        ({"task": "group", "include": "mc.yaml", "dataset_path": "a/b"}, r"data set a/b \(default .*\) is not in"),
        ({"task": "x", "tag": "group"}, None),
        ({"task": "group", **BASE, "output_type": "multiple_choise"}, r"'multiple_choise' \(did you mean multiple_"),
        ({"group": "group", "task": [{"task": "own", **BASE, "output_type": "x"}]}, "not valid: .*output_type is 'x'"),
        ({"task": "group", **BASE, "doc_to_txt": "x"}, r"'doc_to_txt' is no key of a task \(did you mean doc_to_text"),
        ({"group": "group", "task": [{"task": "mc", "fewshots": 1}]}, "'fewshots' is no key of a task"),
        ({"task": "group", "class": "!function own.Task", "own": 1}, None),
        ({"task": "group", **BASE, "test_split": "validation"}, "split 'validation', but .* have test"),
        ({"task": "group", **BASE, "dataset_kwargs": {"data_files": "evals/rows.jsonl"}}, "but .* have train"),
        ({"group": "group", "task": ["group", 3]}, "not valid: ValueError: 3 is neither a name nor"),
        (["group"], "evals/group.yaml is no valid YAML of a task: ValueError: it has no keys"),
    ],
)
def test_names_are_checked_without_lm_eval(project: Project, config: Any, message: str | None) -> None:
    Path("evals/group.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(StageError, match=message) if message else nullcontext():
        public.check(["group"])


def test_the_keys_of_tasks_are_those_of_lm_eval(installed: Path) -> None:
    code = """
from dataclasses import fields
from lm_eval.config.group import GroupConfig
from lm_eval.config.task import TaskConfig
print(*(field.name for config in (GroupConfig, TaskConfig) for field in fields(config)))"""
    found = run_python(code, PYTHONPATH=os.pathsep.join([str(REPO), str(installed)]))
    assert {*found.stdout.split(), "class", "include", "tag", "task_list"} == public.TASK_KEYS, found.stderr


def test_a_second_fetch_waits_before_it_reads_the_manifest(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write what the first one has added out of it."""

    def wait(target: Path) -> NoReturn:
        raise InterruptedError(target)

    monkeypatch.setattr(publish, "lock", wait)
    monkeypatch.setattr(sys, "argv", ["score", "--fetch", "arc_easy"])
    with pytest.raises(InterruptedError, match=r"^evals/public$"):
        score.main()
    assert not [*empty_project.iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_public_tasks_are_asked_in_a_namespace_without_a_network(project: Project, hub: Hub) -> None:
    names = ["arc_easy", "gsm8k", "hellaswag", "mmlu"]
    fetch(project, hub, *names)
    for model in (Path("models/nano"), Path("outputs/exp/model")):  # for five answered examples of gsm8k
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    describe("models/nano").write()
    change_weights(Path("outputs/exp/model"))
    project.set(tasks=names, task_limit=2, runtime={"nproc_per_node": 2})
    output = project.run(*(IN_A_NAMESPACE if CAN_UNSHARE else ()), "python", "-m", "stages.score", timeout=600)
    assert re.findall(r"^ +[\d.]+  (\w+) (?:acc|exact_match) ", output, re.M) == names, output


def write_code_that_asks_the_network() -> None:
    Path("evals/utils.py").write_text(
        "import socket\ndef rows(found):\n    try:\n        socket.create_connection(('192.0.2.1', 80), 1)\n"
        "    except OSError:\n        pass\n    return found\n"
    )
    with Path("evals/mc.yaml").open("a") as file:
        file.write("process_docs: !function utils.rows\n")


def be_refused(number: int, directory: Path) -> None:
    with pytest.raises((StageError, SystemExit)) as refused:  # the second rank says nothing
        be_rank(number, (directory, 2**40))
    Path(f"refused-{number}").write_text(str(refused.value))


def test_a_connection_to_another_machine_is_refused_and_named(project: Project, ranks: Ranks) -> None:
    """Also where a library takes the error for an answer."""
    write_code_that_asks_the_network()
    score.make_request(PARAMS, RUNTIME).write(project / asking.REQUEST)
    ranks.call(be_refused, project.path)
    found = sorted(Path(f"refused-{number}").read_text() for number in range(2))
    assert found == [
        "2",
        "tasks: evals/mc.yaml asks the network for 192.0.2.1, and score uses files alone: leave it out",
    ]


def test_a_lost_rank_is_no_error_of_the_task(lm_eval: None) -> None:
    """The rank that was lost says why."""
    from torch.distributed import DistNetworkError

    from stages.scoring.tasks import explained_task

    with pytest.raises(DistNetworkError), explained_task("mc", "ask"):
        raise DistNetworkError("another rank has ended")
    with pytest.raises(StageError, match=r"cannot ask mc: .*no such column"), explained_task("mc", "ask"):
        raise ValueError("no such column")


def test_answers_of_any_size_are_read(empty_project: Path) -> None:
    """Those of a task with long documents are larger than a file of somebody else may be."""
    answer = Answer("ppl", 0, "x" * publish.LARGEST, [], "", "")
    Measurements({"ppl": Found([], [answer])}, {}, 0, {}).write(Path(asking.ANSWER))
    assert Measurements.read(Path(asking.ANSWER)).trained["ppl"].answers == [answer]


def test_without_tasks_the_stage_ends_at_once(project: Project) -> None:
    project.set(tasks=[])
    code = "import sys; from stages import score; score.main(); sys.exit(bool({'torch', 'datasets'} & {*sys.modules}))"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=-1, text=True).stdout
    assert " ".join(output.split()) == "0 tasks nothing is asked, as tasks is []"
    assert Scores.read(outputs.TASKS).tasks == []
    assert (outputs.SCORES.read_text(), outputs.ANSWERS.read_text()) == ("{}\n", "")


def test_the_bars_of_lm_eval_are_off_on_each_rank() -> None:
    """They are before anything imports tqdm, which reads the environment once."""
    code = (
        "from pathlib import Path\n"
        "from stages.ranks import asking\n"
        "from stages.scoring import packages, rank\n"
        "def answer(*_):\n"
        "    packages.use(Path('packages'))\n"
        "    from tqdm import tqdm\n"
        "    assert len([*tqdm(range(2))]) == 2\n"
        "asking.answer = answer\n"
        "rank.main()"
    )
    process = run_python(code)
    assert (process.returncode, process.stderr) == (0, "")


def test_no_other_process_sees_the_packages(installed: Path) -> None:
    code = (
        "import importlib.util, requests, sys\n"
        "sys.exit('chardet' in sys.modules or importlib.util.find_spec('lm_eval') is not None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"lm_eval", "sacrebleu", "accelerate", "lxml"} <= {path.name for path in installed.iterdir()}
    assert not {"requests", "chardet", "torch", "datasets"} & {path.name for path in installed.iterdir()}


def test_packages_that_cannot_be_installed_are_one_line(
    empty_project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", os.devnull), ("PIP_FIND_LINKS", "")):
        monkeypatch.setenv(name, value)
    shutil.copy(REPO / packages.LOCK, empty_project)
    with pytest.raises(StageError, match=r"could not install requirements-score\.lock"):
        packages.ensure_installed()
    assert "score: installing lm-eval" in capfd.readouterr().out
    assert not packages.directory().exists()
