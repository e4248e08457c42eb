"""The languages that candidates may be written in: one entry each. How to add one: docs/sandbox.md."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_posttrain.sandbox.bubblewrap import SandboxUnavailable
from rl_posttrain.sandbox.limits import Limits
from rl_posttrain.sandbox.seccomp import Profile

# Of compilers. They are trusted programs on hostile input: generous, but bounded.
COMPILE_LIMITS = Limits(
    cpu_seconds=20.0,
    wall_seconds=60.0,
    memory_bytes=2 << 30,
    processes=64,
    file_bytes=64 << 20,
    output_bytes=1 << 16,
    open_files=256,
)


@dataclass(frozen=True)
class Language:
    """How source text becomes a running program. Paths are those inside a container."""

    name: str
    source: str  # its file name
    # argv of the program, in /tmp; "{heap}" stands for three quarters of the memory limit in MiB. Empty: it runs in
    # the harness's own interpreter.
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()  # argv of the compiler, which leaves `artifact`
    artifact: str = ""
    package: str = ""  # what to install where a program is missing
    programs: tuple[str, ...] = ()  # that must be there
    # Where the toolchain lies on this machine, or None; containers see it as /toolchains/NAME.
    toolchain: Callable[[], str | None] | None = None
    profile: Profile = "single"  # "multi": programs of this language start processes as a matter of course
    threads: int = 0  # of the runtime's own, on top of `Limits.processes`
    proc: bool = False  # the runtime does not start without a /proc
    # None: the memory limit is on address space, a hard bound. Else the runtime reserves address space freely: the
    # limit is on writable memory, with so many bytes on top that it sets aside and hardly uses.
    reserved_bytes: int | None = None
    out_of_memory: tuple[str, ...] = ()  # what the runtime says on stderr when it ends for want of memory
    environment: Mapping[str, str] = field(default_factory=dict)
    # Fills /shared/NAME of the containers once, for the compiler: (folder) -> None.
    share: Callable[[Path], None] | None = None
    hello: str = ""  # a program that reads a line and prints it twice, to see whether it works here

    def limits(self, limits: Limits) -> Limits:
        """`limits` with room for the runtime's own threads."""
        return dataclasses.replace(limits, processes=limits.processes + self.threads) if self.threads else limits

    def command(self, limits: Limits) -> list[str]:
        """argv of a program that runs under `limits`."""
        heap = limits.memory_bytes * 3 // 4 >> 20
        return [part.format(heap=heap) for part in self.run]

    def missing(self) -> str | None:
        """What has to be installed before candidates can be written in it; None when all is there."""
        absent = [path for path in self.programs if not os.path.exists(path)]
        if self.toolchain is not None and self.toolchain() is None:
            absent.append(f"a toolchain of {self.name}")
        return f"{absent[0]} is missing: `apt-get install {self.package}`" if absent else None


def precompile_header(folder: Path) -> None:
    """Compiles <bits/stdc++.h> ahead: it takes three times as long as most programs that include it."""
    target = folder / "bits" / "stdc++.h.gch"
    target.parent.mkdir(parents=True)
    command = [
        "/usr/bin/g++",
        *CPP_FLAGS,
        "-x",
        "c++-header",
        "-o",
        str(target),
        "-include",
        "bits/stdc++.h",
        "/dev/null",
    ]
    subprocess.run(command, check=True, capture_output=True, env={"PATH": "/usr/bin:/bin"})


CPP_FLAGS = ("-std=gnu++20", "-O2")


@functools.cache
def rust_toolchain() -> str | None:
    """The folder that has bin/rustc: a distribution's, else the one that rustup has made the default."""
    found = shutil.which("rustc") or shutil.which("rustc", path=os.path.expanduser("~/.cargo/bin"))
    return None if found is None else _ask([found, "--print", "sysroot"])


@functools.cache
def go_toolchain() -> str | None:
    """GOROOT."""
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    return None if found is None else _ask([found, "env", "GOROOT"])


def _ask(command: list[str]) -> str | None:
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 and answer.stdout.strip() else None


def compile_go_library(folder: Path) -> None:
    """Compiles Go's standard library ahead, with a list of its packages for the compiler and the linker.

    Go keeps the results in its own cache, so that this takes a minute once per machine, then seconds.
    """
    root = go_toolchain()
    form = "{{if .Export}}{{.ImportPath}}={{.Export}}{{end}}"
    listed = subprocess.run(
        [f"{root}/bin/go", "list", "-export", "-trimpath", "-f", form, "std"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **GO_ENVIRONMENT, "GOROOT": str(root)},
    )
    lines = []
    for number, line in enumerate(listed.stdout.split()):
        package, _, archive = line.partition("=")
        shutil.copy(archive, folder / f"{number}.a")
        lines.append(f"packagefile {package}=/shared/go/{number}.a\n")
    (folder / "importcfg").write_text("".join(lines))


def find_toolchains() -> dict[str, str]:
    """The folders of toolchains on this machine, by language."""
    found = {name: language.toolchain() for name, language in LANGUAGES.items() if language.toolchain is not None}
    return {name: path for name, path in found.items() if path is not None}


TOOLCHAINS = "/toolchains"  # inside a container
GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": ""}

LANGUAGES: dict[str, Language] = {
    language.name: language
    for language in (
        Language(
            name="python",
            source="main.py",
            run=(),
            hello="line = input()\nprint(line, line)\n",
        ),
        Language(
            name="c",
            source="main.c",
            compile=("/usr/bin/gcc", "-std=gnu17", "-O2", "-o", "main", "main.c", "-lm"),
            artifact="main",
            run=("/tmp/main",),
            package="gcc libc6-dev",
            programs=("/usr/bin/gcc",),
            hello='#include <stdio.h>\nint main(){char s[99];scanf("%98s",s);printf("%s %s\\n",s,s);}\n',
        ),
        Language(
            name="cpp",
            source="main.cpp",
            compile=("/usr/bin/g++", *CPP_FLAGS, "-I/shared/cpp", "-o", "main", "main.cpp"),
            artifact="main",
            run=("/tmp/main",),
            package="g++",
            programs=("/usr/bin/g++",),
            share=precompile_header,
            out_of_memory=("std::bad_alloc",),
            hello="#include <bits/stdc++.h>\nint main(){std::string s;std::cin>>s;std::cout<<s<<' '<<s<<std::endl;}\n",
        ),
        Language(
            name="javascript",
            source="main.js",
            run=("/usr/bin/node", "--max-old-space-size={heap}", "/tmp/main.js"),
            package="nodejs",
            programs=("/usr/bin/node",),
            threads=32,
            reserved_bytes=384 << 20,
            out_of_memory=("heap out of memory", "Array buffer allocation failed", "Zone Allocation failed"),
            hello="const s = require('fs').readFileSync(0, 'utf8').trim(); console.log(s, s);\n",
        ),
        Language(
            name="bash",
            source="main.sh",
            run=("/bin/bash", "/tmp/main.sh"),
            package="bash",
            programs=("/bin/bash",),
            profile="multi",
            out_of_memory=("cannot allocate",),
            hello='read -r s; echo "$s $s"\n',
        ),
        Language(
            name="rust",
            source="main.rs",
            compile=(f"{TOOLCHAINS}/rust/bin/rustc", "--edition", "2021", "-O", "-o", "main", "main.rs"),
            artifact="main",
            run=("/tmp/main",),
            package="rustc",
            toolchain=rust_toolchain,
            proc=True,  # for the compiler, which finds its libraries through it
            out_of_memory=("memory allocation of",),
            hello=(
                "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap(); "
                'println!("{} {}", s.trim(), s.trim()); }\n'
            ),
        ),
        Language(
            name="go",
            source="main.go",
            compile=(
                "/bin/sh",
                "-c",
                f"go={TOOLCHAINS}/go/bin/go; list=/shared/go/importcfg; "
                "$go tool compile -p main -complete -importcfg $list -o main.a main.go && "
                "$go tool link -importcfg $list -o main main.a",
            ),
            artifact="main",
            run=("/tmp/main",),
            package="golang-go",
            toolchain=go_toolchain,
            threads=32,
            reserved_bytes=256 << 20,
            out_of_memory=("runtime: out of memory", "cannot allocate memory"),
            environment={**GO_ENVIRONMENT, "GOROOT": f"{TOOLCHAINS}/go", "GOCACHE": "/tmp/cache"},
            share=compile_go_library,
            hello=('package main\nimport "fmt"\nfunc main() { var s string; fmt.Scan(&s); fmt.Println(s, s) }\n'),
        ),
        Language(
            name="java",
            source="Main.java",
            compile=("/bin/sh", "-c", "javac -d classes Main.java && jar --create --file main.jar -C classes ."),
            artifact="main.jar",
            run=(
                "/usr/bin/java",
                *(
                    "-XX:-UsePerfData",
                    "-XX:+UseSerialGC",
                    "-XX:TieredStopAtLevel=1",
                    "-Xms16m",
                    "-Xmx{heap}m",
                    "-Xss64m",  # of the main thread, which the launcher makes;
                    "-XX:ThreadStackSize=1024",  # KiB, of all others: a dozen of the runtime's own among them
                ),
                *("-cp", "/tmp/main.jar", "Main"),
            ),
            package="default-jdk-headless",
            programs=("/usr/bin/java", "/usr/bin/javac", "/usr/bin/jar"),
            threads=48,
            proc=True,
            reserved_bytes=384 << 20,
            out_of_memory=("OutOfMemoryError", "os::commit_memory"),
            hello=(
                "public class Main { public static void main(String[] a) { String s = new java.util.Scanner(System.in)"
                '.next(); System.out.println(s + " " + s); } }\n'
            ),
        ),
    )
}


def find(name: str) -> Language:
    """The language `name`.

    Raises:
      ValueError: there is no such entry.
      SandboxUnavailable: its programs are not installed on this machine.
    """
    if name not in LANGUAGES:
        raise ValueError(f"language={name!r}: one of {', '.join(LANGUAGES)}")
    missing = LANGUAGES[name].missing()
    if missing is not None:
        raise SandboxUnavailable(f"candidates in {name} cannot be run here: {missing}")
    return LANGUAGES[name]
