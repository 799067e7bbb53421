"""The container of a pod, in the image that the chart names, as a container engine runs it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.images.programs import run
from tests.support.deploy.cluster.container import Container

USER = 65532
_HOME = "/home/millstream"
_PUBLISHED = "/run/published"
"""Where containers see the addresses of all workers."""


@dataclass(frozen=True)
class Mount:
    """A directory or a file of this machine in a container, read-only."""

    source: Path
    target: str


class Engine(Protocol):
    """What runs containers."""

    def command(
        self, container: ImageContainer, environment: Mapping[str, str], mounts: list[Mount]
    ) -> list[str]:
        """Return the command that runs it in the foreground, and passes signals on."""

    def kill_command(self, name: str) -> list[str]:
        """Return the command that ends a container at once."""

    def root(self, image: str) -> Path | None:
        """Return where the image's files are; None: nowhere."""


@dataclass
class ImageContainer(Container):
    """A container of an image. Network and addresses are this machine's."""

    engine: Engine | None = None
    name: str = ""
    """Of the container that runs; each start has another."""

    def here(self) -> dict[str, str]:
        """See `Container.here`. Files are where the manifest says."""
        return {
            r"\b0\.0\.0\.0(?=:\d)": self.ip,
            r"\b127\.0\.0\.1(?=:\d)": self.ip,
            r"\b(dns|k8s):[\w./-]+(:\d+)?": f"file:{_PUBLISHED}/{self.workers.name}",
        }

    @property
    def image(self) -> str:
        return str(self.spec["image"])

    @property
    def words(self) -> list[str]:
        return [self.local(word) for word in self.spec["args"]]

    def start(self) -> None:
        """Mount and start, or start again."""
        assert self.engine is not None
        self._mount()
        self.name = f"{self.pod_name}-{os.urandom(3).hex()}"
        command = self.engine.command(self, self._variables(), self._mounts())
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> int:
        """End it at once, and not only the program that waits for it; returns the exit code."""
        assert self.engine is not None
        assert self.process is not None
        subprocess.run(self.engine.kill_command(self.name), check=False, capture_output=True)
        return self.process.wait()

    def _variables(self) -> dict[str, str]:
        found = {one["name"]: self.local(self._value(one)) for one in self.spec["env"]}
        # Many processes on few cores.
        return {"OMP_NUM_THREADS": "1", **found}

    def _mounts(self) -> list[Mount]:
        mounts = [Mount(self.workers.parent, _PUBLISHED)]
        for one in self.spec["volumeMounts"]:
            path = one["mountPath"]
            if path.startswith("/models/"):
                mounts.append(Mount(self.models / path.removeprefix("/models/"), path))
            elif path.startswith("/etc/millstream"):
                mounts.append(Mount(Path(f"{self.folder}{path}"), path))
        return mounts


@dataclass(frozen=True)
class Daemon:
    """Docker or podman."""

    program: str

    def command(
        self, container: ImageContainer, environment: Mapping[str, str], mounts: list[Mount]
    ) -> list[str]:
        """See `Engine.command`."""
        words = [self.program, "run", "--rm", "--network", "host", "--read-only", "--cap-drop"]
        words += ["ALL", "--security-opt", "no-new-privileges", "--user", f"{USER}:{USER}"]
        words += ["--tmpfs", "/tmp:mode=1777", "--tmpfs", f"{_HOME}:uid={USER},gid={USER}"]
        words += ["--shm-size", "1g", "--name", container.name]
        words += [word for key, value in environment.items() for word in ("-e", f"{key}={value}")]
        words += [word for each in mounts for word in ("-v", f"{each.source}:{each.target}:ro")]
        return [*words, container.image, *container.words]

    def kill_command(self, name: str) -> list[str]:
        """See `Engine.kill_command`."""
        return [self.program, "kill", name]

    def root(self, image: str) -> Path | None:
        """See `Engine.root`."""
        del image
        return None


class Bundles:
    """An OCI runtime, runc or crun, on images that buildah has mounted. As root."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._roots: dict[str, Path] = {}
        self._working: list[str] = []

    def root(self, image: str) -> Path:
        """Return where the image's files are."""
        if image not in self._roots:
            self._working.append(run("buildah", "from", "--pull=never", image).strip())
            self._roots[image] = Path(run("buildah", "mount", self._working[-1]).strip())
        return self._roots[image]

    def close(self) -> None:
        """Unmount the images."""
        for name in self._working:
            run("buildah", "rm", name)

    def command(
        self, container: ImageContainer, environment: Mapping[str, str], mounts: list[Mount]
    ) -> list[str]:
        """See `Engine.command`."""
        bundle = container.folder / "bundle"
        bundle.mkdir(exist_ok=True)
        about = json.loads(run("buildah", "inspect", "--type", "image", container.image))
        image = about["OCIv1"]["config"]
        process = {
            "user": {"uid": USER, "gid": USER},
            "args": [*image["Entrypoint"], *container.words],
            "env": [*image["Env"], *(f"{key}={value}" for key, value in environment.items())],
            "cwd": image["WorkingDir"],
            "capabilities": {kind: [] for kind in _CAPABILITIES},
            "noNewPrivileges": True,
        }
        config = {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": str(self.root(container.image)), "readonly": True},
            "hostname": container.pod_name[:63],
            "mounts": [*_SYSTEM, *(_bind(each.source, each.target) for each in mounts)],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
            },
        }
        (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return [self._runtime, "run", "--bundle", str(bundle), container.name]

    def kill_command(self, name: str) -> list[str]:
        """See `Engine.kill_command`."""
        return [self._runtime, "delete", "--force", name]


def _bind(source: Path | str, target: str) -> dict[str, Any]:
    options = ["rbind", "ro", "nosuid", "nodev"]
    return {"destination": target, "type": "bind", "source": str(source), "options": options}


def _memory(target: str, *options: str) -> dict[str, Any]:
    every = ["nosuid", "nodev", *options]
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": every}


_CAPABILITIES = ("bounding", "effective", "inheritable", "permitted", "ambient")
_SYSTEM = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "mode=755", "size=64k"],
    },
    _memory("/dev/shm", "noexec", "mode=1777", "size=1g"),
    _bind("/sys", "/sys"),
    # The image's root has neither, or not this machine's.
    *(_bind(name, name) for name in ("/etc/hosts", "/etc/resolv.conf")),
    _memory("/tmp", "mode=1777"),
    _memory(_HOME, f"uid={USER}", f"gid={USER}", "mode=0700"),
]
