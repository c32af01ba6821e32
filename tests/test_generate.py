"""Text from a model directory: printed as it is generated, reproducible, and clear errors."""

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages import generate
from stages.artifacts.errors import StageError
from tests.project import make_nano


@pytest.fixture(autouse=True)
def model(empty_project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the experiment `exp`."""
    directory = Path("outputs/exp/model")
    make_nano(directory, initializer_range=1.0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    Path("params.yaml").write_text("experiment_name: exp\n")
    return directory


def text_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    generate.main()
    return capsys.readouterr().out.strip()


def test_the_text_follows_the_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = text_of(monkeypatch, capsys, "a b", "--max-new-tokens", "12")
    assert first.startswith("a b")
    assert len(first) > 5
    assert first == text_of(monkeypatch, capsys, "a b", "--max-new-tokens", "12", "--model", "outputs/exp/model")
    others = {text_of(monkeypatch, capsys, "a b", "--max-new-tokens", "12", "--seed", str(seed)) for seed in range(5)}
    assert len(others) > 1
    greedy = {text_of(monkeypatch, capsys, "a b", "--temperature", "0", "--seed", str(seed)) for seed in range(3)}
    assert len(greedy) == 1


def test_the_prompt_may_be_on_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = text_of(monkeypatch, capsys, "a b")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b"))
    assert text_of(monkeypatch, capsys) == expected


def test_each_token_is_printed_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", printed.append)
    monkeypatch.setattr(sys, "argv", ["generate", "a b c", "--max-new-tokens", "20", "--temperature", "3"])
    generate.main()
    assert len([text for text in printed if text.strip()]) > 3


def test_what_is_wrong_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StageError, match="none is not a model directory: run `dvc repro`"):
        text_of(monkeypatch, capsys, "a", "--model", "none")
    with pytest.raises(StageError, match="the prompt has no token"):
        text_of(monkeypatch, capsys, "")
    for wrong in (["--max-new-tokens", "0"], ["--temperature", "-1"], ["--temperature", "hot"]):
        with pytest.raises(SystemExit, match="2"):
            text_of(monkeypatch, capsys, "a", *wrong)
