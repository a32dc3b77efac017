"""Make a virtual environment with torch's CUDA wheel, and build the libraries that it links.

    python -m tests.pretended_cuda.install .venv-pretended-2.11.0 2.11.0

Needs Python 3.11 or newer, gcc, g++ and binutils. What torch requires is installed without NVIDIA's packages, which
have gigabytes of libraries that a machine without a GPU cannot use (pip says that they are missing); two of them have
the headers that the runtime is compiled with, and are unpacked outside of the environment's packages. Versions are
those of constraints-*.txt, but for torch and what torch asks for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tests.pretended_cuda.libraries import build

ROOT = Path(__file__).parents[2]
NOT_INSTALLED = re.compile(r"(nvidia|cuda)-")  # of torch's requirements
FOR_TESTS = ("hypothesis", "pytest", "pytest-xdist", "transformers")
SITE = Path(__file__).parent / "site"  # has sitecustomize.py
HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt")


class Environment:
    """A virtual environment with a pretended CUDA."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.python = self.folder / "bin" / "python"
        self.libraries = self.folder / "pretended" / "lib"
        self.headers = self.folder / "pretended" / "headers"

    @property
    def packages(self) -> Path:
        """The folder of the installed packages, which has the version of Python in its path."""
        (found,) = (self.folder / "lib").glob("python3*/site-packages")
        return found

    @property
    def release(self) -> str:
        """The release of torch: 2.11.0."""
        return self._torch().version.partition("+")[0]

    @property
    def built(self) -> bool:
        """True where the environment was made, and its libraries were built."""
        return self.python.exists() and any(self.libraries.glob("libcudart.so*"))

    def make(self, torch: str) -> None:
        """Install what is missing, and build the libraries."""
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        self._pip("--no-deps", f"torch=={torch}")
        self._pip("--no-deps", *(r for r in self._of_torch() if r.startswith("triton")))
        others = [*(r for r in self._of_torch() if not r.startswith("triton")), *_of_fxremat(), *FOR_TESTS]
        self._pip("--constraint", str(self._constraints()), *others)
        if not self.headers.exists():
            wanted = [f"{name}=={self._cuda()}.*" for name in HEADERS]
            self._pip("--no-deps", "--target", str(self.headers), *wanted)
        self.build()

    def build(self) -> None:
        """Build the libraries anew."""
        (header,) = self.headers.rglob("cuda_runtime_api.h")
        build(self.packages / "torch", header.parent, self.libraries)

    def variables(self, **settings: object) -> dict[str, str]:
        """The environment variables of a process with a pretended CUDA.

        Args:
            settings: of the device, without PRETENDED_ before their names, as in `CUDA_BYTES=1 << 30`.
        """
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.libraries),
            "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "99",
            "HF_HUB_OFFLINE": "1",
            **{f"PRETENDED_{name}": str(value) for name, value in settings.items()},
        }

    def _pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True)

    def _of_torch(self) -> Iterator[str]:
        """Requirements of the installed torch that are neither NVIDIA's nor of an extra."""
        for requirement in self._torch().requires or ():
            what, _, condition = requirement.partition(";")
            if "extra ==" not in condition and not NOT_INSTALLED.match(what):
                yield what.strip()

    def _torch(self) -> Distribution:
        (found,) = (d for d in distributions(path=[str(self.packages)]) if d.metadata["Name"] == "torch")
        return found

    def _constraints(self) -> Path:
        """Those of the repository, without torch."""
        lines = [line for name in ("dev", "libraries") for line in _lines(ROOT / f"constraints-{name}.txt")]
        file = self.folder / "constraints.txt"
        file.write_text("\n".join(line for line in lines if not re.match("torch", line)) + "\n")
        return file

    def _cuda(self) -> str:
        """The release of CUDA that torch was built for: 13.0."""
        text = (self.packages / "torch" / "version.py").read_text()
        (found,) = re.findall(r"^cuda\b.*= '(.*)'", text, re.MULTILINE)
        return found


def _of_fxremat() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [requirement for requirement in project["dependencies"] if not requirement.startswith("torch")]


def _lines(file: Path) -> list[str]:
    return [line.partition("#")[0].strip() for line in file.read_text().splitlines()]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("torch", help="the release: 2.11.0")
    given = parser.parse_args(arguments)
    Environment(given.folder).make(given.torch)


if __name__ == "__main__":
    main(sys.argv[1:])
