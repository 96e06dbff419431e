"""What a measurement was made on. Used by bench/compare.py; other measurements may use it too."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from kdit.version import __version__

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
LIBRARIES = ("torch", "diffusers", "transformers", "safetensors")


def machine_description(threads: int) -> dict[str, object]:
    """Processor, its features that matter for matrix products, libraries, and the commit if there is one."""
    model, flags = _processor()
    return {
        "machine.cpu": model,
        "machine.features": [name for name in FEATURES if name in flags],
        "machine.cores": os.cpu_count(),
        "machine.threads": threads,
        "machine.memory_bytes": _memory_bytes(),
        "machine.load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "machine.platform": platform.platform(),
        "machine.python": platform.python_version(),
        **{f"machine.{name}": version(name) for name in LIBRARIES},
        "machine.kdit": __version__,
        "machine.commit": _commit(),
    }


def _processor() -> tuple[str, frozenset[str]]:
    """Model name and feature flags, as Linux tells them; elsewhere what Python knows."""
    info: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    flags = info.get("flags") or info.get("Features") or ""
    model = info.get("model name") or platform.processor() or platform.machine()
    family = [f"{name} {info[name]}" for name in ("cpu family", "model") if name in info]
    return f"{model} ({', '.join(family)})" if family else model, frozenset(flags.split())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _commit() -> str | None:
    """The commit of the checkout that kdit runs from, with a + if its files were changed since."""
    git, root = shutil.which("git"), Path(__file__).resolve().parents[3]
    if git is None or not (root / ".git").exists():
        return None
    done = subprocess.run(
        [git, "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def peak_memory_bytes() -> int:
    """The most memory that this process had resident so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
