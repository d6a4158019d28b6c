#!/usr/bin/env python3
"""What the attention kernels of the presets became in machine code, at head_dim 128.

    check_sass.py COMPILER [--update]

COMPILER is the program test_kernels_compile. Prints a table of the main loops and compares it with
tests/nvrtc/sass.tsv, which --update rewrites. Exits with 77 (skipped) without NVRTC, without
nvdisasm (in $NVDISASM, $PATH, a CUDA toolkit, or the Python package nvidia-cuda-nvdisasm), or if
NVRTC is not the build that the table is of; only what must hold for every build is then checked.
If $NVDISASM is set it must be there.
"""

import argparse
import collections
import concurrent.futures
import csv
import glob
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TABLE = os.path.join(ROOT, "tests", "nvrtc", "sass.tsv")
HEAD_DIM = 128
SKIPPED = 77

# What the kernels of a preset must multiply with: on these archs nothing else is emulated.
S8, S4 = r"IMMA\.16832\.S8\.S8", r"IMMA\.\w+\.S4\.S4"
FP8, F16 = r"QMMA\.16832\.F\w+\.E4M3\.E4M3", r"HMMA\.16816\.F\w+"
EXPECTED = {
    ("sage1", "sm_80"): (S8, F16), ("sage1", "sm_86"): (S8, F16), ("sage1", "sm_89"): (S8, F16),
    ("exact", "sm_80"): (F16,), ("exact", "sm_86"): (F16,), ("exact", "sm_89"): (F16,),
    ("sage2_8b", "sm_89"): (S8, FP8), ("sage2pp", "sm_89"): (S8, FP8),
    ("sage2_4b", "sm_89"): (S4, FP8),
    ("sage1", "sm_120"): (S8, F16), ("exact", "sm_120"): (F16,),
    ("sage2_8b", "sm_120"): (S8, FP8), ("sage2pp", "sm_120"): (S8, FP8),
    ("sage2_4b", "sm_120"): (S8, FP8),  # which has no INT4: it becomes INT8
}

# griddepcontrol.wait and .launch_dependents, and what touches global memory.
WAITS, STARTS = "ACQBULK", "PREEXIT"
GLOBAL = r"(LDG|STG|LDGSTS|ATOMG?|REDG?|LD|ST|UBLKCP|UBLKRED|UBLKPF|CCTL\w*)(\.|$)"

# Of a multiprocessor (CUDA C++ Programming Guide, table of technical specifications): warps,
# blocks, bytes of shared memory. All have 65536 registers, in units of 256 a warp.
LIMITS = {"80": (64, 32, 164 << 10), "86": (48, 16, 100 << 10), "89": (48, 24, 100 << 10),
          "90": (64, 32, 228 << 10), "120": (48, 24, 100 << 10)}
SYSTEM_SHARED = 1024  # a block; on no arch does ptxas count it

COLUMNS = ("kernel", "macros", "arch", "instructions", "mma", "per_qk_mma", "per_pv_mma",
           "registers", "smem", "blocks_per_sm")


def find_nvdisasm():
    """Its path, or None. What a user names must be there."""
    named = os.environ.get("NVDISASM")
    if named:
        if not shutil.which(named):
            sys.exit(f"check_sass.py: $NVDISASM is '{named}', but there is no such program")
        return named
    folders = [os.path.join(ROOT, "build", "tools")]  # tests/tools.sh puts it there
    folders += site.getsitepackages() + [site.getusersitepackages()]
    places = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH")
              if os.environ.get(name)]
    places += glob.glob("/usr/local/cuda*/bin")
    places += [place for folder in folders for place in glob.glob(f"{folder}/nvidia/cu*/bin")]
    return shutil.which("nvdisasm") or next(
        (found for place in places if (found := shutil.which("nvdisasm", path=place))), None)


# target: index of the instruction that it may jump to, or None.
Instruction = collections.namedtuple("Instruction", "opcode target conditional")


def instructions_of(nvdisasm, cubin):
    """The Instructions of the code in a cubin."""
    text = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True,
                          check=True).stdout
    labels, found = {}, []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)(.*)", line):
            # Of a jump, a predicate may also stand before the label.
            target = re.search(r"(!?U?P\w+,\s*)?`\((\.L_x_\d+)\)", code[3])
            jumps = target and code[2].startswith("BRA")
            found.append(Instruction(code[2], target[2] if jumps else None,
                                     bool(code[1] or jumps and target[1])))
    return [one._replace(target=labels.get(one.target)) for one in found]


def may_end_before(code, opcode):
    """Whether a thread may come to the end of a kernel without such an instruction."""
    open_ends, seen = [0], set()
    while open_ends:
        at = open_ends.pop()
        if at in seen or at >= len(code):
            continue
        seen.add(at)
        one = code[at]
        if one.opcode == opcode and not one.conditional:
            continue
        if one.opcode == "EXIT":
            return True
        if one.target is not None:
            open_ends.append(one.target)
        if one.conditional or not one.opcode.startswith("BRA"):
            open_ends.append(at + 1)
    return False


def is_mma(opcode):
    return re.match(r"[A-Z]*MMA\b", opcode) is not None


def main_loop(code):
    """Opcodes of the smallest loop that multiplies in as many ways as any: from the target of a
    jump backwards to the jump. Empty if no loop has an MMA."""
    loops = [[one.opcode for one in code[jump.target:end + 1]]
             for end, jump in enumerate(code) if jump.target is not None and jump.target <= end]
    loops = [loop for loop in loops if any(map(is_mma, loop))]
    return min(loops, key=lambda loop: (-len(set(filter(is_mma, loop))), len(loop)), default=[])


def counts(opcodes):
    return {opcode: opcodes.count(opcode) for opcode in sorted(set(opcodes))}


def blocks_per_sm(arch, threads, registers, static_smem, dynamic_smem):
    number = re.match(r"sm_(\d+)", arch)[1]
    max_warps, max_blocks, max_shared = LIMITS[number]
    warps = -(-threads // 32)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    shared = static_smem + dynamic_smem + SYSTEM_SHARED
    by_shared = max_shared // max(-(-shared // 128) * 128, 1)
    return min(max_warps // warps, max_blocks, by_registers, by_shared)


def describe(row, code):
    """A row of the table, or None if it is not a kernel of attention with an MMA in a loop."""
    loop = main_loop(code) if row["kernel"].startswith("attn_") else []
    if not loop:
        return None
    mma = counts([opcode for opcode in loop if is_mma(opcode)])
    # Scores are integer products; the others are P V, but for kernels that have no integers.
    qk = sum(count for opcode, count in mma.items() if re.match(r"I\w*MMA", opcode))
    pv = sum(mma.values()) - qk
    static, dynamic = int(row["static_smem"]), int(row["dynamic_smem"])
    values = (row["kernel"], row["macros"], row["arch"], len(loop),
              " ".join(f"{opcode}={count}" for opcode, count in mma.items()),
              f"{len(loop) / qk:.1f}" if qk else "-", f"{len(loop) / pv:.1f}" if pv else "-",
              row["registers"], static + dynamic,
              blocks_per_sm(row["arch"], int(row["threads"]), int(row["registers"]), static,
                            dynamic))
    return dict(zip(COLUMNS, map(str, values), strict=True))


def read_table(path):
    """The first line, and the rows."""
    with open(path, encoding="utf-8") as file:
        build = file.readline().rstrip("\n")
        return build, list(csv.DictReader(file, delimiter="\t"))


def faults_of_launch(row, code):
    """From sm_90 a kernel may be launched while the one before it runs: it says when the next may start,
    and does not end, nor, as far as the order of the code tells, touch global memory before it waits."""
    if int(re.match(r"sm_(\d+)", row["arch"])[1]) < 90:
        return
    opcodes = [one.opcode for one in code]
    if STARTS not in opcodes:
        yield f"has no {STARTS} (griddepcontrol.launch_dependents)"
    if may_end_before(code, WAITS):
        yield f"may end without {WAITS} (griddepcontrol.wait)"
    if WAITS not in opcodes:
        return
    early = {opcode for opcode in opcodes[:opcodes.index(WAITS)] if re.match(GLOBAL, opcode)}
    if early:
        yield f"has {', '.join(sorted(early))} before {WAITS} (griddepcontrol.wait)"


def faults_of_products(row, code):
    for preset in row["presets"].split():
        opcodes = {one.opcode for one in code}
        for pattern in EXPECTED.get((preset, row["arch"]), ()):
            if not any(re.match(pattern, opcode) for opcode in opcodes):
                has = ", ".join(sorted(filter(is_mma, opcodes))) or "no MMA"
                yield f"{preset} should use {pattern}, has {has}"


def key_of(row):
    return row["kernel"], row["macros"], row["arch"]


def compile_kernels(compiler, folder):
    done = subprocess.run([compiler, "--presets", str(HEAD_DIM), "--cubins", folder],
                          capture_output=True, text=True, check=False)
    if done.returncode == SKIPPED:
        print(done.stdout, end="")
        sys.exit(SKIPPED)
    if not os.path.exists(os.path.join(folder, "rows.tsv")):
        sys.exit(done.stdout + done.stderr)
    return read_table(os.path.join(folder, "rows.tsv"))  # that kernels spill is not our concern


def print_table(rows):
    widths = [max(len(row[column]) for row in [dict(zip(COLUMNS, COLUMNS)), *rows])
              for column in COLUMNS]
    for row in [dict(zip(COLUMNS, COLUMNS)), *rows]:
        print("  ".join(row[column].ljust(width)
                        for column, width in zip(COLUMNS, widths)).rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compiler")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        print("skipped: no nvdisasm; pip install nvidia-cuda-nvdisasm")
        return SKIPPED

    with tempfile.TemporaryDirectory() as folder:
        build, compiled = compile_kernels(args.compiler, folder)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            codes = list(pool.map(
                lambda row: instructions_of(nvdisasm, os.path.join(folder, row["cubin"])),
                compiled))
    faults, rows = [], []
    for row, code in zip(compiled, codes, strict=True):
        described = describe(row, code)
        found = list(faults_of_launch(row, code))
        if described is not None:
            rows.append(described)
            found += faults_of_products(row, code)
        faults += [f"{' '.join(key_of(row))}: {fault}" for fault in found]
    seen = {(preset, row["arch"]) for row in compiled for preset in row["presets"].split()}
    faults += [f"{preset} has no kernel for {arch}" for preset, arch in EXPECTED
               if (preset, arch) not in seen]
    print_table(rows)

    if args.update:
        with open(TABLE, "w", encoding="utf-8") as file:
            file.write(build + "\n")
            writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    recorded_build, recorded = read_table(TABLE)
    if recorded_build == build:
        were, are = ({key_of(row): row for row in table} for table in (recorded, rows))
        for key in sorted(were.keys() | are.keys()):
            if key not in were:
                faults.append(f"{' '.join(key)}: is not in sass.tsv")
            elif key not in are:
                faults.append(f"{' '.join(key)}: is in sass.tsv, but no preset has it")
            else:
                faults += [f"{' '.join(key)}: {column} = {are[key][column]}, but "
                           f"{were[key][column]} in sass.tsv"
                           for column in COLUMNS if were[key][column] != are[key][column]]
    for fault in faults:
        print(fault)
    if faults:
        return 1
    if recorded_build != build:
        print(f"skipped: sass.tsv is of '{recorded_build}', this is '{build}'")
        return SKIPPED
    print(f"{build}, {len(rows)} main loops as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
