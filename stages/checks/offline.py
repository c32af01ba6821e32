"""What would open a connection to another machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.checks.findings import Finding, error, ok, warning
from stages.checks.inputs import ExecutorRuntime, InputParams
from stages.model import hub, hub_cache

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def check_hub(params: InputParams, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether `download` would ask the Hub. The caller has set HF_HUB_OFFLINE for this process.

    Args:
        params: Which model.
        environment: That of the stages.
    """
    if Path(params.model_name).is_dir():
        yield ok(f"the model {params.model_name} is a directory: no stage asks the Hub")
    elif name := hub_cache.offline_variable(environment):
        yield ok(f"{name} is set: no stage asks the Hub")
    else:
        try:
            hub.resolve(params.model_name, params.model_revision, params.initial_weights != "random")
        except hub.Lacking:
            yield error(
                f"`download` would connect to the Hub: {hub_cache.repository(params.model_name).parent} lacks files of "
                f"{params.model_name}, and HF_HUB_OFFLINE is not set",
                f"`hf download {params.model_name} --revision {params.model_revision}` where there is a network, bring "
                "its HF_HOME here, and `export HF_HUB_OFFLINE=1`",
            )
        else:
            yield ok(f"HF_HOME has the files of {params.model_name}: no stage asks the Hub")


def check_proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Proxies: only their names, because the addresses may have a password."""
    if found := [name for name in environment if name.lower() in _PROXIES and environment[name]]:
        yield warning(
            f"{', '.join(sorted(found))} is set",
            "unset it where no model is downloaded: other stages need no proxy, and one may be far away",
        )
    else:
        yield ok("no proxy is set")


def check_services(executor: ExecutorRuntime, tracker: str) -> Iterator[Finding]:
    """Parameters that name another machine or a service."""
    if tracker == "wandb":
        yield ok("tracker wandb writes files only; `wandb sync` would upload them")
    if executor.executor == "dask" and (executor.dask_scheduler or "").startswith(("tcp://", "tls://")):
        yield warning(
            f"the data stages connect to {executor.dask_scheduler}",
            "runtime.executor: processes keeps them on this machine",
        )


def check_dvc(config: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Connections of DVC itself, and remotes on other machines."""
    core, found = config["core"], []
    if core.get("analytics", True) and not environment.get("DVC_NO_ANALYTICS"):
        found.append(warning("each dvc reports its use to its makers", "`dvc config core.analytics false`"))
    if core.get("check_update", True):
        found.append(warning("dvc asks for newer versions of itself", "`dvc config core.check_update false`"))
    for name, remote in config.get("remote", {}).items():
        scheme, separator, _ = str(remote.get("url", "")).partition("://")
        if separator and scheme != "file":
            what = f"`dvc push` and `pull` connect to the remote {name} ({scheme})"
            found.append(warning(what, f"`dvc remote add --local --default {name}-here DIR` with a directory here"))
    yield from found or [ok("DVC opens no connections, and has no remote on another machine")]
