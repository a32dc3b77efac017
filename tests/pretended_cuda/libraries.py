"""Build the shared libraries that torch's CUDA build links, for a machine that has none of them.

    undefined symbols of torch's libraries  -  what native/<library>/ defines  =  functions that return a constant

A function of `native` does what torch relies on: the CUDA runtime allocates, copies and logs; a cuBLAS handle is
some address. Of all others torch only asks for success, or for an error where it has another way (CUDA graphs, memory
that processes share).
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
VENDORS = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)")  # names of libraries that NVIDIA's packages bring
PREFIXES = {  # of functions whose library does not version its symbols
    "cudnn": "libcudnn",
    "cufft": "libcufft",
    "cuFile": "libcufile",
    "curand": "libcurand",
    "cusparseLt": "libcusparseLt",
    "nccl": "libnccl",
    "nvshmem": "libnvshmem_host",
    "cupti": "libcupti",
    "nvrtc": "libnvrtc",
}
OPENED = ("libnvidia-ml.so.1",)  # while torch runs, without being linked: all of their functions are in native/
DRIVER = re.compile(r"cu(?!File)[A-Z]")
NOT_SUPPORTED = 801  # cudaErrorNotSupported
CUDNN = "91900"  # the version that the pretended cuDNN tells


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library to build: its file name, and the undefined symbols that are looked up in it, by symbol version."""

    soname: str
    symbols: Mapping[str, set[str]] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The name without version, which is that of its folder in native/."""
        return self.soname.partition(".so")[0]


def build(torch: Path, headers: Path, target: Path) -> list[Library]:
    """Build all libraries into a folder.

    Args:
        torch: the folder of the installed package.
        headers: has cuda_runtime_api.h.
        target: gets the libraries and, in a folder `objects`, what they are made of.
    """
    libraries = wanted(sorted((torch / "lib").glob("*.so")))
    objects = target / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    order = sorted(libraries, key=lambda library: library.stem != "libcudart")  # the driver's links the runtime's
    for library in order:
        _link(library, [*_compiled(library, headers, objects)], target)
    return order


def wanted(files: Iterable[Path]) -> list[Library]:
    """The libraries of NVIDIA that these files link, with the symbols that they look up in each."""
    sonames: set[str] = set()
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    symbols: set[str] = set()
    for file in files:
        sonames |= {name for name in _linked(file) if VENDORS.match(name)}
        symbols |= _undefined(file)
    for symbol in symbols:
        name, _, version = symbol.partition("@")
        soname = version if version in sonames else _soname(name, sonames)
        if soname is not None:
            found[soname][version].add(name)
    return [Library(soname=soname, symbols=found[soname]) for soname in (*sorted(sonames), *OPENED)]


def _linked(file: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "--dynamic", str(file)))


def _undefined(file: Path) -> set[str]:
    """Undefined symbols as `name@version`, `name` where it has no version."""
    lines = _output("nm", "--dynamic", "--undefined-only", str(file)).splitlines()
    return {line.split()[-1].replace("@@", "@") for line in lines}


def _soname(symbol: str, sonames: Iterable[str]) -> str | None:
    """The library that has a symbol without a version; None for one that is not NVIDIA's."""
    stems = [stem for prefix, stem in PREFIXES.items() if symbol.startswith(prefix)]
    if DRIVER.match(symbol):
        stems.append("libcuda")
    return next((name for name in sonames if name.partition(".so")[0] in stems), None)


def _compiled(library: Library, headers: Path, objects: Path) -> Iterator[Path]:
    """The object files of a library: its sources, and the functions that they lack."""
    flags = ["-fPIC", "-O1", f"-I{NATIVE}", f"-I{headers}", f"-DCUDNN_VERSION={CUDNN}"]
    made = []
    for source in sorted((NATIVE / library.stem).glob("*.c*")):
        made.append(objects / f"{library.stem}-{source.stem}.o")
        compiler = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc", "-std=c11"]
        _run(*compiler, *flags, "-c", str(source), "-o", str(made[-1]))
    rest = objects / f"{library.stem}-rest.c"
    rest.write_text("".join(_returning(name, library) for name in sorted(_lacking(library, made))))
    _run("gcc", *flags, "-c", str(rest), "-o", str(rest.with_suffix(".o")))
    yield from (*made, rest.with_suffix(".o"))


def _lacking(library: Library, objects: Iterable[Path]) -> set[str]:
    """The symbols that no object file defines."""
    lines = "".join(_output("nm", "--defined-only", str(file)) for file in objects).splitlines()
    return set().union(*library.symbols.values()) - {line.split()[-1] for line in lines}


def _returning(name: str, library: Library) -> str:
    """A function of C that returns success; of the runtime, that this is not supported."""
    return f"long {name}(void) {{ return {NOT_SUPPORTED if library.stem == 'libcudart' else 0}; }}\n"


def _link(library: Library, objects: Iterable[Path], target: Path) -> None:
    script = target / "objects" / f"{library.stem}.map"
    script.write_text(version_script(library))
    against = [str(file) for file in target.glob("libcudart.so*")] if library.stem == "libcuda" else []
    options = [f"-Wl,-soname,{library.soname}", f"-Wl,--version-script={script}", "-ldl"]
    made = str(target / library.soname)
    _run("g++", "-shared", "-o", made, *map(str, objects), *against, *options)


def version_script(library: Library) -> str:
    """The linker's script that gives each symbol its version, and exports what Python and the driver's library call.

    >>> print(version_script(Library(soname="libx.so.1", symbols={"libx.so.1": {"xDo", "xAsk"}})), end="")
    libx.so.1 { global: xAsk; xDo; pretended_*; };
    """
    versioned = {version: names for version, names in library.symbols.items() if version}
    if not versioned:
        return "{ global: *; };\n"
    nodes = []
    for version, names in versioned.items():
        exported = " ".join(f"{name};" for name in sorted(names))
        nodes.append(f"{version} {{ global: {exported} pretended_*; }};\n")
    return "".join(nodes)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
