"""A model whose GPUs are in several machines: one process per machine, one of them leads."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.runtime.settings import EngineArguments, SettingsError, setting
from millstream_server.runtime.settings.declare import is_host_port


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Which part of the model a process runs; all have the same settings but the rank."""

    nodes: int = setting(1, help="processes that one model is spread over, each on its own machine")
    node_rank: int = setting(
        0,
        help="this process's number of them, from 0; 0 leads and serves the requests, the others "
        "serve health only",
    )
    leader_address: str = setting(
        "",
        help="HOST:PORT where the processes of one model meet: a free port of the one with rank 0",
    )

    @property
    def follows(self) -> bool:
        """Whether another process leads."""
        return self.node_rank > 0

    def check(self, arguments: EngineArguments) -> None:
        """Check these settings, with SGLang's own arguments.

        Raises:
            SettingsError: they contradict each other.
        """
        if self.nodes < 1:
            raise SettingsError(f"--nodes is {self.nodes}, not 1 or more")
        if self.node_rank >= self.nodes:
            raise SettingsError(
                f"--node-rank {self.node_rank}: with --nodes {self.nodes} ranks are 0 to "
                f"{self.nodes - 1}"
            )
        if self.nodes == 1:
            return
        if not is_host_port(self.leader_address):
            raise SettingsError(
                f"--nodes {self.nodes} needs --leader-address HOST:PORT, the same for all of them; "
                f"it is {self.leader_address!r}"
            )
        sizes = {name: arguments.values.get(name, 1) for name in ("tp_size", "pp_size")}
        parts = sizes["tp_size"] * sizes["pp_size"]
        if min(sizes.values()) < 1 or parts % self.nodes:
            raise SettingsError(
                f"--nodes {self.nodes}: SGLang's tp_size x pp_size is {parts}, which {self.nodes} "
                f"processes can't share evenly; give -- --tp-size {self.nodes * max(1, parts)}"
            )

    def refuse(self, engine: str) -> None:
        """Refuse several nodes for an engine that runs in one process.

        Raises:
            SettingsError: there are several.
        """
        if self.nodes != 1 or self.node_rank:
            raise SettingsError(
                f"--nodes {self.nodes}, --node-rank {self.node_rank}: the {engine} engine runs in "
                "one process"
            )
