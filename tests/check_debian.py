#!/usr/bin/env python3
"""Makes the Debian packages of a build tree, inspects them, installs them into a root of their own,
uses what is there, and removes them again without a trace.

Exits with 77 where dpkg-dev is missing; also where nothing can be installed, for lack of root and
fakeroot, but only after all else has passed.
"""

import argparse
import gzip
import os
import re
import shlex
import shutil
import sys
import tempfile

from check_consumers import C_FLAGS, CONSUMER, ROOT, Failed, run

TOOLS = ("dpkg", "dpkg-deb", "dpkg-query", "dpkg-shlibdeps", "dpkg-parsechangelog")
SECTIONS = {"libsageattn0": "libs", "libsageattn-dev": "libdevel", "sageattn-tools": "science"}
LIBRARIES = ("libc6", "libgcc-s1", "libstdc++6")  # that packages may depend on
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # dpkg wants to see ldconfig


def require(condition, message):
    if not condition:
        raise Failed(message)


def read(path, opener=open):
    with opener(path, "rt", encoding="utf-8") as file:
        return file.read()


class Packages:
    def __init__(self, args, scratch):
        self.args = args
        self.root = os.path.join(scratch, "root")
        self.unpacked = os.path.join(scratch, "unpacked")
        self.version = run([args.tool, "--version"]).strip() + "-1"
        self.architecture = run(["dpkg", "--print-architecture"]).strip()
        self.triplet = run(["dpkg-architecture", "-qDEB_HOST_MULTIARCH"]).strip()
        folder = os.path.join(scratch, "packages")
        run([args.cpack, "--config", os.path.join(args.build, "CPackConfig.cmake"), "-B", folder])
        self.files = {name: os.path.join(folder, f"{name}_{self.version}_{self.architecture}.deb")
                      for name in SECTIONS}
        made = sorted(name for name in os.listdir(folder) if name.endswith(".deb"))
        require(made == sorted(map(os.path.basename, self.files.values())), f"cpack made {made}")
        os.mkdir(self.unpacked)
        for name, file in self.files.items():
            run(["dpkg-deb", "-R", file, os.path.join(self.unpacked, name)])

    def path(self, package, *parts):
        return os.path.join(self.unpacked, package, *parts)

    def control(self):
        depends = {
            "libsageattn0": r"libc6 \(>= [\d.]+\)",
            "libsageattn-dev": rf"libsageattn0 \(= {re.escape(self.version)}\)",
            "sageattn-tools": r"libc6 \(>= [\d.]+\), libgcc-s1 \(>= [\d.]+\), "
                              r"libstdc\+\+6 \(>= [\d.]+\)"}
        for name, file in self.files.items():
            fields = run(["dpkg-deb", "-f", file])
            values = dict(re.findall(r"^([\w-]+): (.*)", fields, re.MULTILINE))
            expected = {"Package": name, "Version": self.version, "Section": SECTIONS[name],
                        "Priority": "optional", "Architecture": self.architecture,
                        "Source": "libsageattn"}
            for field, value in expected.items():
                require(values.get(field) == value, f"{name}: {field} is {values.get(field)}")
            require(re.fullmatch(depends[name], values.get("Depends", "")),
                    f"{name}: Depends is {values.get('Depends')}")
            require(re.fullmatch(r".+ <\S+@\S+>", values["Maintainer"]), f"{name}: no maintainer")
            require(values["Description"].startswith("quantized attention (SageAttention)"),
                    f"{name}: Description is {values['Description']}")
            if name != "libsageattn-dev":
                require("NVRTC" in fields, f"{name}: the description says nothing of NVRTC")
            extra = set(os.listdir(self.path(name, "DEBIAN"))) - {"control", "md5sums"}
            wanted = {"shlibs", "symbols", "triggers"} if name == "libsageattn0" else set()
            require(extra == wanted, f"{name}: control files {sorted(extra)}")
        upstream = self.version.rpartition("-")[0]
        for file, text in {
                "shlibs": f"libsageattn 0 libsageattn0 (>= {upstream})\n",
                "symbols": read(os.path.join(ROOT, "src", "package", "libsageattn0.symbols")),
                "triggers": "activate-noawait ldconfig\n"}.items():
            found = read(self.path("libsageattn0", "DEBIAN", file))
            require(found == text, f"libsageattn0: {file} is\n{found}")

    def contents(self):
        libdir = f"usr/lib/{self.triplet}"
        expected = {
            "libsageattn0": [f"{libdir}/libsageattn.so.0"],
            "libsageattn-dev": [f"{libdir}/libsageattn.so", f"{libdir}/pkgconfig/sageattn.pc",
                                f"{libdir}/cmake/sageattn/sageattn-config.cmake",
                                "usr/include/sageattn.h",
                                "usr/share/doc/libsageattn-dev/docs/api.md",
                                "usr/share/doc/libsageattn-dev/examples/c/attention.c"],
            "sageattn-tools": ["usr/bin/sageattn", "usr/share/man/man1/sageattn.1.gz",
                               "usr/share/sageattn/data/minilm-l6-v2.safetensors"]}
        seen = {}
        for name, file in self.files.items():
            paths = set()
            for line in run(["dpkg-deb", "-c", file]).splitlines():
                mode, owner, *_, path = line.split(" -> ")[0].split()
                require(owner == "root/root", f"{name}: {path} is of {owner}")
                executable = mode[0] == "d" or path == "./usr/bin/sageattn"
                require(mode[0] == "l" or mode[1:] == ("rwxr-xr-x" if executable else "rw-r--r--"),
                        f"{name}: {path} has mode {mode}")
                require(path.startswith("./usr/"), f"{name}: {path} is outside /usr")
                if mode[0] != "d":
                    paths.add(path[2:])
                    require(path not in seen, f"{path} is in {name} and in {seen.get(path)}")
                    seen[path] = name
            missing = set(expected[name]) - paths
            require(not missing, f"{name} lacks {sorted(missing)}")
            self.documents(name)
        manual = read(self.path("sageattn-tools", expected["sageattn-tools"][1]), gzip.open)
        commands = run([self.args.tool, "--help"]).split("Subcommands:\n")[1].split("\n\n")[0]
        for command in re.findall(r"^  (\w+)", commands, re.MULTILINE):
            require(f"\n.B {command}\n" in manual, f"the manual page says nothing of {command}")

    def documents(self, name):
        folder = self.path(name, "usr", "share", "doc", name)
        require("License: Apache-2.0" in read(os.path.join(folder, "copyright")), f"{name}: licence")
        require(read(os.path.join(folder, "changelog.gz"), gzip.open)
                == read(os.path.join(ROOT, "CHANGELOG.md")), f"{name}: another changelog")
        changelog = os.path.join(self.unpacked, "changelog")
        with open(changelog, "w", encoding="utf-8") as file:
            file.write(read(os.path.join(folder, "changelog.Debian.gz"), gzip.open))
        version = run(["dpkg-parsechangelog", "-l", changelog, "-S", "Version"]).strip()
        require(version == self.version, f"{name}: the changelog is of {version}")

    # ---- A root of their own ---------------------------------------------------------------------

    def dpkg(self, *arguments):
        as_root = [] if os.getuid() == 0 else ["fakeroot"]
        return run([*as_root, "dpkg", f"--root={self.root}", f"--log={self.root}/var/log/dpkg.log",
                    "--force-not-root", "--force-script-chrootless", *arguments], PATH=SYSTEM_PATH)

    def install(self):
        """In a system that has the machine's versions of the libraries that they may depend on."""
        database = os.path.join(self.root, "var", "lib", "dpkg")
        os.makedirs(os.path.join(database, "info"))
        os.makedirs(os.path.join(self.root, "var", "log"))
        form = ("Package: ${Package}\nStatus: install ok installed\nMaintainer: ${Maintainer}\n"
                "Architecture: ${Architecture}\nMulti-Arch: same\nVersion: ${Version}\n"
                "Description: ${binary:Summary}\n\n")
        with open(os.path.join(database, "status"), "w", encoding="utf-8") as file:
            file.write(run(["dpkg-query", "-W", "-f", form,
                            *(f"{name}:{self.architecture}" for name in LIBRARIES)]))
        self.dpkg("--install", *self.files.values())
        faults = self.dpkg("--audit", *self.files)
        require(not faults, f"dpkg --audit: {faults}")

    def use(self):
        usr = os.path.join(self.root, "usr")
        libdir = os.path.join(usr, "lib", self.triplet)
        program = os.path.join(self.root, "consumer")
        flags = [f"-I{usr}/include", f"-L{libdir}", "-lsageattn"]
        if shutil.which("pkg-config"):
            flags = shlex.split(run(["pkg-config", "--cflags", "--libs", "sageattn"],
                                    PKG_CONFIG_PATH=os.path.join(libdir, "pkgconfig")))
            require(f"-I{usr}/" in " ".join(flags), f"pkg-config says {flags}")
        run([self.args.cc, *C_FLAGS, os.path.join(CONSUMER, "main.c"), "-o", program, *flags])
        run([program], LD_LIBRARY_PATH=libdir)
        os.remove(program)

        project = os.path.join(self.root, "project")
        run([self.args.cmake, "-S", CONSUMER, "-B", project, "-G", self.args.generator,
             f"-DCMAKE_C_COMPILER={self.args.cc}", f"-DCMAKE_PREFIX_PATH={usr}"])
        run([self.args.cmake, "--build", project])
        run([os.path.join(project, "consumer")])
        shutil.rmtree(project)

        tool = os.path.join(usr, "bin", "sageattn")
        version = run([tool, "--version"], LD_LIBRARY_PATH=libdir).strip()
        require(self.version.startswith(version + "-"), f"the program is of {version}")
        run([tool, "selftest"], LD_LIBRARY_PATH=libdir)

    def remove(self):
        try:
            self.dpkg("--remove", "libsageattn0")
        except Failed:
            pass
        else:
            raise Failed("dpkg removed libsageattn0, which libsageattn-dev depends on")
        self.dpkg("--purge", *self.files)
        left = [os.path.relpath(os.path.join(path, name), self.root)
                for path, folders, files in os.walk(self.root) for name in folders + files]
        left = [path for path in left if not re.match(r"var(/log|/lib|/lib/dpkg.*)?$|var/log/dpkg",
                                                      path) or "sageattn" in path]
        require(not left, f"left behind: {left}")
        require("sageattn" not in read(os.path.join(self.root, "var/lib/dpkg/status")),
                "dpkg still knows the packages")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", help="build tree to package")
    parser.add_argument("tool", help="its program sageattn")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--cpack", default="cpack")
    parser.add_argument("--generator", default="Ninja")
    parser.add_argument("--cc", default="cc")
    args = parser.parse_args()

    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        print(f"skipped: no {', '.join(missing)} (Debian's packages dpkg and dpkg-dev)")
        return 77
    with tempfile.TemporaryDirectory() as scratch:
        try:
            packages = Packages(args, scratch)
            packages.control()
            packages.contents()
            if os.getuid() != 0 and not shutil.which("fakeroot"):
                print("skipped: installing the packages needs root or fakeroot")
                return 77
            packages.install()
            packages.use()
            packages.remove()
        except (Failed, OSError) as failure:
            print(failure, file=sys.stderr)
            return 1
    print(f"made, installed, used and removed: {', '.join(SECTIONS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
