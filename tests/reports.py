"""A project whose stages have left their records, without running them: for the tests of the report."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from stages.base import outputs, publish
from stages.base.files import write_sealed
from stages.base.origin import DATA_METRICS

PHASES = ("data", "forward", "backward", "update", "validation", "saving", "other")
MODEL = Path("outputs/exp/model")
LINEAGE = MODEL / "lineage.json"


def make_records(lr: float = 0.003, loss: float = 2.5, steps: int = 200) -> None:
    """Write, into the current directory, all that the report reads."""
    params = {"experiment_name": "exp", "lr": lr, "fsdp": {"preset": "single_node_fsdp", "size": None}}
    origin = {"params": {"num_splits": 4, "fallback_encoding": "cp1252"}, "packages": {"pyarrow": "21"}}
    tokens = {"train": "t" * 64, "validation": "v" * 64}
    organized = {
        "files": 3, "bytes": 3_000_000, "formats": {"json": {"files": 2, "bytes": 2_000_000},
        "text.gz": {"files": 1, "bytes": 1_000_000}}, "passed_over_counts": {"hidden": 7},
        "origin": origin,
    }  # fmt: skip
    write_json(DATA_METRICS["organize"], organized)
    extracted = {
        "fallback_encoded_files": 0, "rejected_files": 2, "strings": 1234,
        "mean_characters": 17, "short_strings": 691,
        "characters": 567_890, "rejected": {"invalid YAML": 2}, "origin": origin, "fingerprint": "corpus",
        "source": publish.sha256_file(DATA_METRICS["organize"]),
    }  # fmt: skip
    write_json(DATA_METRICS["extract"], extracted)
    example = {"similarity": 0.84, "skipped": "An <old> version", "kept": "A new version", "split": 1, "row": 2,
               "kept_split": 0, "kept_row": 3}  # fmt: skip
    deduplicated = {
        "all": {"documents": 1234, "equal": 5, "similar": 6}, "sources": {}, "largest": [], "examples": [example],
        "origin": origin, "source": "corpus", "fingerprint": "without duplicates",
    }  # fmt: skip
    write_json(DATA_METRICS["deduplicate"], deduplicated)
    part = {"documents": 30, "characters": 900, "tokens": 300, "characters_per_token": 3.25, "unknown_share": 0.001,
            "rows": 10}  # fmt: skip
    packed = {
        "train": part, "validation": part | {"tokens": 100}, "encoder": {"name": "tokenizers 1.0"}, "origin": origin,
        "source": "without duplicates", "fingerprint": publish.sha256_json([*tokens.values()]),
    }  # fmt: skip
    write_json(DATA_METRICS["pack"], packed)
    write_json(Path("data/model.json"), {"weights": []})
    outputs.OUTPUTS.mkdir(exist_ok=True)
    outputs.ROWS.write_text("⟦...⟧ is read but not predicted\n\nrow 7\n  ⟦The⟧ <text>\n\nrow 8\n  ⟦An⟧other\n")
    lineage = {
        "run_id": f"run{lr}", "step": steps, "adopted": None, "params": params, "data": tokens, "code": "c" * 64,
        "model": {"name": "<tiny & small>", "revision": "main", "commit": None, "manifest": "m", "lineage": None},
        "packages": {"torch": "2.13.0"}, "checkpoint": "r", "weights": {},
        "origins": {"organize": origin, "pack": {"params": {"seq_length": 32}, "packages": {}}},
    }  # fmt: skip
    write_sealed(LINEAGE, lineage)
    write_json(MODEL / "config.json", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "n_head": 4})
    write_courses(loss, lr, steps)
    cost = {"training_seconds": 4000.0, "milliseconds": dict.fromkeys(PHASES, 2.0), "tokens_per_second": 5120.0,
            "mfu": 0.41, "memory_peak_gib": 1.5, "launches": 3}  # fmt: skip
    place = {"device": "NVIDIA H100", "ranks": 16, "nodes": 2, "commit": "0123456789abcdef", "date": "2026-03-01 10:31"}
    trained = {"steps": steps, "tokens": 4096, "skipped_steps": 0, "cost": cost, "place": place}
    write_json(outputs.TRAIN_METRICS, trained)
    measured = {"rows": 10, "tokens": 310, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": 1.25}
    evaluation = {
        "run_id": f"run{lr}", "step": steps, "dtype": "bfloat16", "num_parameters": 2_345_678, "validation": measured,
        "untrained": measured | {"loss": 8.5},
        "trained": measured, "exported": measured, "samples": [{"prompt": "Once <b>", "continuation": " upon\n a",
        "reference": " there", "ends": False}],
    }  # fmt: skip
    write_json(outputs.EVALUATION, evaluation)
    task = {"task": "sums", "metric": "exact_match", "higher_is_better": True, "questions": 1_200, "num_fewshot": 2,
            "initial": 0.125, "score": 0.75, "stderr": 0.02, "difference": 0.625, "difference_stderr": 0.0312,
            "chance": None, "truncated": 0, "contaminated": 3, "too_short": 40, "clean_score": 0.7412}  # fmt: skip
    write_json(outputs.TASKS, {"tasks": [task], "lm_eval": "0.4.13", "task_limit": None, "task_chat": True})


def write_courses(loss: float, lr: float, steps: int) -> None:
    """Write history.tsv and speed.tsv of a training that takes this many steps."""
    history = ["step\tepoch\ttokens\tloss\tlr\tgrad_norm\tvalidation_loss", "0\t0.0\t0\t\t\t\t8.5"]
    speed = ["step\tseconds\ttokens_per_second\tmfu\tmemory_gib\tmemory_peak_gib"]
    speed[0] += "".join(f"\t{name}_ms" for name in PHASES)
    for step in range(1, steps + 1):
        now = loss + 6 * math.exp(-5 * step / steps) + 0.1 * math.sin(step)
        validation = repr(now) if step % max(1, steps // 10) == 0 else ""
        history.append(
            f"{step}\t{step / steps}\t{step * 8}\t{now}\t{lr * (1 - step / steps)}\t{0.5 + now}\t{validation}"
        )
        times = "\t".join(str(10.0 + number + math.sin(step)) for number in range(len(PHASES)))
        speed.append(f"{step}\t{step * 0.1}\t{5000 + 300 * math.sin(step)}\t\t1.2\t1.5\t{times}")
    outputs.HISTORY.write_text("\n".join(history) + "\n")
    outputs.SPEED.write_text("\n".join(speed) + "\n")


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def chromium() -> str | None:
    """A browser that can do without a window and a network, if there is one, and we may take its network away."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return found if found and os.geteuid() == 0 and shutil.which("unshare") else None
