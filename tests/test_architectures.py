"""Architectures through the whole pipeline: one of each kind; `make architectures` tries all."""

from pathlib import Path

import pytest

from tests import architectures
from tests.conftest import made_once
from tests.project import Project
from tests.ranks import Ranks

QUICK = {"mamba2": "padded"}
"""With what `auto` takes for each on CPUs."""
SLOW = {
    "llama": "sdpa", "gpt_neox": "sdpa", "gemma4_text": "sdpa", "deepseek_v3": "sdpa", "gpt_oss": "padded",
    "bloom": "padded", "falcon_h1": "padded", "nemotron_h": "padded", "qwen3_5_text": "padded",
}  # fmt: skip


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return made_once(tmp_path_factory, "architectures", architectures.make_base)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "attention"),
    [*QUICK.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())],
)
def test_an_architecture_goes_through_the_whole_pipeline(
    name: str, attention: str, base: Project, ranks: Ranks, tmp_path: Path
) -> None:
    finding = architectures.attempt_in_fork(name, base, ranks, log=tmp_path / "log")
    assert (finding.status, finding.attention) == ("trained", attention), (tmp_path / "log").read_text()
