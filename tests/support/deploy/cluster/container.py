"""The container of a pod, as a process of this machine.

Command, arguments, environment and configuration are those of the manifest. What must differ here
is `Container.here`, in one list: a pod's address is a loopback address of its own, so that all pods
can have the same ports, and a container's files are below a folder of its own.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.deploy.deploy_tools import Manifest
from tests.support.processes import forked


@dataclass
class Objects:
    """What pods refer to: ConfigMaps and Secrets by name, as text."""

    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Take over those of a render; a secret that is there stays, as the chart keeps it."""
        for manifest in manifests:
            name, data = manifest["metadata"]["name"], manifest.get("data", {})
            if manifest["kind"] == "ConfigMap":
                self.config_maps[name] = dict(data)
            elif manifest["kind"] == "Secret":
                decoded = {key: base64.b64decode(text).decode() for key, text in data.items()}
                self.secrets.setdefault(name, decoded | manifest.get("stringData", {}))

    def files(self, volume: Mapping[str, Any]) -> dict[str, str]:
        """Return what a volume contains at first: texts by file name."""
        if "configMap" in volume:
            return self.config_maps[volume["configMap"]["name"]]
        if "secret" in volume:
            found = self.secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items")
            return {item["path"]: found[item["key"]] for item in items} if items else found
        return {}


@dataclass
class Container:
    """The one container of a pod. Init containers aren't run: the models are there."""

    pod_name: str
    template: Mapping[str, Any]
    objects: Objects
    folder: Path
    ip: str
    workers: Path
    """A file with the addresses of all workers, in place of the headless service's DNS name; that
    of Processors is beside it."""
    models: Path
    """The folder that containers have as /models."""
    process: forked.Process | None = None

    @property
    def spec(self) -> Mapping[str, Any]:
        (container,) = self.template["spec"]["containers"]
        assert isinstance(container, Mapping)
        return container

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def here(self) -> dict[str, str]:
        """What a container's words mean on this machine: the only difference to the manifest."""
        mounts = [mount["mountPath"] for mount in self.spec["volumeMounts"]]
        return {
            r"\b0\.0\.0\.0(?=:\d)": self.ip,
            r"\b127\.0\.0\.1(?=:\d)": self.ip,
            r"\bdns:[\w-]+-processors\.[\w.-]+:\d+": f"file:{self.workers.parent}/processors.txt",
            r"\b(dns|k8s):[\w./-]+(:\d+)?": f"file:{self.workers}",
            r"(?<![\w.-])/models\b": str(self.models),
            **{
                rf"(?<![\w.-]){re.escape(path)}\b": f"{self.folder}{path}"
                for path in mounts
                if not path.startswith("/models")
            },
        }

    def local(self, text: str) -> str:
        """Put what a text means here in its place."""
        here = self.here()
        pattern = "|".join(f"(?P<g{i}>{part})" for i, part in enumerate(here))
        names = {f"g{i}": value for i, value in enumerate(here.values())}

        def put(match: re.Match[str]) -> str:
            return next(value for name, value in names.items() if match[name] is not None)

        return re.sub(pattern, put, text)

    def start(self) -> None:
        """Mount and start, or start again."""
        self._mount()
        # The images' entry point is an init process, so all of the command is in `args`.
        command = [self.local(word) for word in self.spec["args"]]
        assert command[:2] == ["python", "-m"], command
        with self.log.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            self.process = forked.start(
                "services", command[2], command[3:], (nothing, log, log), self._environment()
            )

    async def run(self, *command: str | Path) -> tuple[int, str]:
        """Mount, and run a command in the container's place; returns exit code and output."""
        self._mount()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(),
        )
        printed, _ = await process.communicate()
        return await process.wait(), printed.decode()

    def _mount(self) -> None:
        volumes = {volume["name"]: volume for volume in self.template["spec"].get("volumes", ())}
        for mount in self.spec["volumeMounts"]:
            path = Path(f"{self.folder}{mount['mountPath']}")
            files = self.objects.files(volumes[mount["name"]])
            if mount.get("subPath") in files:
                path, files = path.parent, {path.name: files[mount["subPath"]]}
            path.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (path / name).write_text(self.local(text), encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        outer = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        # Many processes on few cores.
        found = {**outer, "OMP_NUM_THREADS": "1"}
        for variable in self.spec.get("env", ()):
            found[variable["name"]] = self.local(self._value(variable))
        return found

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            return self.objects.secrets[reference["name"]][reference["key"]]
        fields = {"status.podIP": self.ip, "metadata.name": self.pod_name}
        return fields[source["fieldRef"]["fieldPath"]]

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> int:
        """End it at once; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait()
