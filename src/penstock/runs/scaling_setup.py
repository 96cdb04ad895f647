# SPDX-License-Identifier: Apache-2.0
"""Wires the autoscaler of a run to its launcher, its commands and its folder. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from penstock.config import RunConfig
from penstock.config.device_layout import launched_nodes
from penstock.dataflow.report.shape import BalanceReport
from penstock.devices import visible_devices
from penstock.errors import ConfigError, LaunchError
from penstock.fleet.autoscaler import NodeType
from penstock.fleet.device_plan import deal_devices
from penstock.fleet.hands import CommandHands, Hands, LauncherHands
from penstock.fleet.launchers.local import LocalLauncher
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.scaling_records import ScalingRecord
from penstock.fleet.services import ServiceSpec, inherited_env, local_services
from penstock.runs.scaling import Scaler
from penstock.runs.tokens import issue, revoke
from penstock.wire.auth import Role
from penstock.wire.keys import make_private_folder, write_secret

NODE_TOKEN_TTL_S = 24 * 3600.0
NODE_RENEW_S = 30 * 24 * 3600.0
"""A node renews its own token while it runs, as one that joined by hand."""


def build_scaler(
    config: RunConfig,
    folder: RunFolder,
    launcher: LocalLauncher,
    *,
    log_dir: Path,
    read_report: Callable[[], BalanceReport | None],
    notify: Callable[[str], None],
) -> Scaler:
    """The autoscaler of this launch. It knows the nodes that commands started for an earlier one;
    children of an earlier launcher have died with it. The mode is the run file's; with `act`, the
    wanted size outlives a launch, else the run file's replicas count again."""
    scaling = config.autoscale
    stored = folder.scaling() or ScalingRecord(mode=scaling.mode)
    known = {name: n for name, n in stored.nodes.items() if n.node_type in scaling.node_types}
    return Scaler(
        folder=folder,
        node_types={
            name: NodeType(
                name=name,
                gpus=one.gpus,
                cost_per_hour=one.cost_per_hour,
                spot=one.spot,
                max_nodes=one.max_nodes,
            )
            for name, one in scaling.node_types.items()
        },
        hands=_hands(config, folder, launcher, log_dir),
        launched=launcher.nodes,
        launched_type=scaling.launched_type,
        not_scaled=frozenset(n.name for n in launched_nodes(config) if n.evaluates_only),
        start_timeout_s=scaling.start_timeout_s,
        read_report=read_report,
        notify=notify,
        record=ScalingRecord(
            mode=scaling.mode,
            wanted_gpus=stored.wanted_gpus if scaling.mode == "act" else None,
            next_number=stored.next_number,
            nodes=known,
            request_at=stored.request_at,
            actions=stored.actions,
        ),
        revoke=partial(_revoke, folder),
    )


def _hands(
    config: RunConfig, folder: RunFolder, launcher: LocalLauncher, log_dir: Path
) -> Mapping[str, Hands]:
    endpoints, env = folder.trusted_endpoints(), inherited_env()
    found: dict[str, Hands] = {}
    for name, one in config.autoscale.node_types.items():
        if not one.start:
            num_devices = len(visible_devices())
            found[name] = LauncherHands(launcher, partial(_make_node, config, folder, num_devices))
            continue
        found[name] = CommandHands(
            node_type=name,
            start_command=one.start,
            stop_command=one.stop,
            placeholders=partial(_placeholders, folder, endpoints.dataflow, ",".join(one.tags)),
            env=env,
            work_dir=Path(endpoints.work_dir),
            log=log_dir / f"scale-{name}.log",
        )
    return found


def _placeholders(folder: RunFolder, url: str, tags: str, node: str) -> Mapping[str, str]:
    """For the commands of this node. Its token is issued when it is first asked for."""
    token_file = folder.keys / "nodes" / node
    if not token_file.exists():
        token, _ = issue(
            folder, Role.ROLLOUT, name=node, ttl_s=NODE_TOKEN_TTL_S, renew_s=NODE_RENEW_S
        )
        make_private_folder(token_file.parent)
        write_secret(token_file, token)
    return {
        "name": node,
        "url": url,
        "token_file": str(token_file),
        "tags": tags or "gpus=1",
        "run_dir": str(folder.path),
    }


def _revoke(folder: RunFolder, node: str) -> None:
    with suppress(ConfigError, OSError):  # a full disk; the token expires within a day
        revoke(folder, name=node)
        (folder.keys / "nodes" / node).unlink(missing_ok=True)


def _make_node(config: RunConfig, folder: RunFolder, num_devices: int, index: int) -> ServiceSpec:
    """The replica of this index, as if the run file had asked for it, with its devices."""
    policy, model = next(iter(config.models.items()))
    if config.served_with(policy):
        raise LaunchError(
            "each policy of this run has its own nodes, and the launcher cannot tell which "
            "of them to scale; set replicas in the run file and start the run again, or give "
            "autoscale.node_types start and stop commands"
        )
    replicas = max(model.replicas, index + 1)
    models = {**config.models, policy: model.model_copy(update={"replicas": replicas})}
    scaled = config.model_copy(update={"models": models})
    devices = deal_devices(scaled, num_devices)
    name = [n.name for n in launched_nodes(scaled) if n.policy == policy][index]
    return next(one for one in local_services(scaled, folder, devices) if one.name == name)
