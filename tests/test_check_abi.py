#!/usr/bin/env python3
"""check_abi.py and check_bindings.py see what they are there for: each change of the header, of the symbols
file and of a binding gets the verdict that it must."""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from unittest import mock

import check_abi
import check_bindings

# (what changes, text of the header, what it becomes, words of the complaint; none: nothing is wrong)
HEADER = [
    ("two fields change places", "  int64_t nonfinite_out; /* NaN or Inf in out */\n  int64_t nonfinite_ref;",
     "  int64_t nonfinite_ref;\n  int64_t nonfinite_out;", "sageattn_compare_result.nonfinite_out: was"),
    ("a constant changes", "SAGEATTN_QK_I4 = 2", "SAGEATTN_QK_I4 = 5", "SAGEATTN_QK_I4: was 2, is 5"),
    ("a constant is gone", "  SAGEATTN_PV_MODEL_HMMA = 2", "", "SAGEATTN_PV_MODEL_HMMA: is gone"),
    ("a function is gone", "SAGEATTN_API const char *sageattn_source_id(void);", "",
     "function sageattn_source_id: is gone"),
    ("a parameter's type changes", "sageattn_status_name(int32_t status)", "sageattn_status_name(int64_t status)",
     "sageattn_status_name: was"),
    ("a parameter loses const", "sageattn_plan_get_info(const sageattn_plan *plan",
     "sageattn_plan_get_info(sageattn_plan *plan", "sageattn_plan_get_info: was"),
    ("a result's type changes", "SAGEATTN_API uint32_t sageattn_version(void)",
     "SAGEATTN_API int32_t sageattn_version(void)", "sageattn_version: was"),
    ("a hook's parameter changes", "void (*free)(void *user, void *memory)", "void (*free)(void *user, char *memory)",
     "sageattn_context_desc.free: was"),
    ("a field's type changes, not its size", "  float softcap;", "  int32_t softcap;", "attn_desc.softcap: was"),
    ("a field grows", "  char macros[128];", "  char macros[256];", "sageattn_kernel_info.macros: was"),
    ("a field is gone", "  double max_abs_error;\n", "", "sageattn_compare_result.max_abs_error: was"),
    ("a field in the middle", "  int32_t status;\n  char message", "  int32_t status, more;\n  char message",
     "sageattn_error.message: was"),
    ("a frozen struct grows", "  int64_t stride_dim;\n} sageattn_tensor;",
     "  int64_t stride_dim;\n  int64_t more;\n} sageattn_tensor;", "sageattn_tensor.more: the struct is frozen"),
    ("a field is appended", "} sageattn_error;", "  int64_t more;\n} sageattn_error;", None),
    ("a reserved field gets a name", "  int32_t reserved;\n} sageattn_attn_desc;",
     "  int32_t more;\n} sageattn_attn_desc;", None),
    ("a constant is added", "SAGEATTN_QK_E4M3 = 4", "SAGEATTN_QK_E4M3 = 4, SAGEATTN_QK_MORE = 5", None),
    ("a function is added", "SAGEATTN_API uint32_t sageattn_version(void);",
     "SAGEATTN_API uint32_t sageattn_version(void);\nSAGEATTN_API int32_t sageattn_more(void);",
     "sageattn_more: in the header, not in the file"),  # what the symbols file still lacks
    ("a parameter gets another name", "sageattn_status_name(int32_t status)", "sageattn_status_name(int32_t code)",
     None),
]
SYMBOLS = [
    ("a symbol is missing", " sageattn_execute@SAGEATTN_0 0.1.0\n", "", "sageattn_execute: in the header"),
    ("a symbol too many", " sageattn_execute@", " sageattn_more@SAGEATTN_0 0.1.0\n sageattn_execute@",
     "sageattn_more: in the file"),
    ("another node", "sageattn_execute@SAGEATTN_0", "sageattn_execute@SAGEATTN_1", "not SAGEATTN_0"),
    ("a later version", "sageattn_execute@SAGEATTN_0 0.1.0", "sageattn_execute@SAGEATTN_0 0.2.0", "still to come"),
]

failures = []


def verdict(main, *arguments):
    """Exit code and output of a program's main."""
    with io.StringIO() as text, contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), \
            mock.patch.object(sys, "argv", ["program", *arguments]):
        return main(), text.getvalue()


def expect(what, outcome, words):
    code, text = outcome
    if (code == 0) != (words is None) or words is not None and words not in text:
        failures.append(f"{what}: exit code {code}, '{text.strip()}', expected {words or 'success'}")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def changed(folder, name, text, old, new):
    if text.count(old) != 1:
        failures.append(f"{name}: '{old}' must be there once")
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace(old, new))
    return path


def check_headers(folder, cc):
    header, symbols = read(check_abi.HEADER), read(check_abi.SYMBOLS)
    for what, old, new, words in HEADER:
        path = changed(folder, "changed.h", header, old, new)
        expect(what, verdict(check_abi.main, "--cc", cc, "--header", path), words)
    for what, old, new, words in SYMBOLS:
        path = changed(folder, "symbols", symbols, old, new)
        expect(what, verdict(check_abi.main, "--cc", cc, "--symbols", path), words)


def check_update(folder, cc):
    """--update records what is compatible, and the rest with a new minor version only."""
    header, baseline = read(check_abi.HEADER), os.path.join(folder, "baseline.txt")

    def update(old, new, minor=1):
        text = header.replace("SAGEATTN_VERSION_MINOR 1", f"SAGEATTN_VERSION_MINOR {minor}")
        shutil.copy(check_abi.BASELINE, baseline)
        path = changed(folder, "updated.h", text, old, new)
        return verdict(check_abi.main, "--cc", cc, "--header", path, "--baseline", baseline, "--update")

    appended = ("} sageattn_error;", "  int64_t more;\n} sageattn_error;")
    dropped = ("SAGEATTN_API const char *sageattn_source_id(void);", "")
    expect("update, compatible", update(*appended), None)
    if "field sageattn_error more 1024 8 int64_t" not in read(baseline):
        failures.append("update: the new field was not written")
    expect("update, incompatible", update(*dropped), "not updated")
    if read(baseline) != read(check_abi.BASELINE):
        failures.append("update: a refused change was written")
    expect("update, incompatible, new minor version", update(*dropped, minor=2), None)
    if "sageattn_source_id" in read(baseline):
        failures.append("update: the accepted change was not written")


def check_layouts(cc):
    """What a binding may get wrong."""
    header = check_abi.read_header(check_abi.HEADER, cc)
    text = check_abi.format_interface(header)
    for what, old, new, words in [
            ("the same", "", "", None),
            ("its version", "version 0.1.0", "const SAGEATTN_VERSION_MINOR 1", None),
            ("another version", "version 0.1.0", "const SAGEATTN_VERSION_MINOR 2", "SAGEATTN_VERSION_MINOR: is 2"),
            ("a constant is missing", "const SAGEATTN_QK_I4 2\n", "", "const SAGEATTN_QK_I4: is missing"),
            ("another value", "const SAGEATTN_QK_I4 2", "const SAGEATTN_QK_I4 3", "SAGEATTN_QK_I4: is 3"),
            ("a constant too many", "const SAGEATTN_QK_I4 2", "const SAGEATTN_QK_I4 2\nconst SAGEATTN_MORE 1",
             "SAGEATTN_MORE: is not in the header"),
            ("another size", "struct sageattn_error 1024", "struct sageattn_error 1032", "sageattn_error: is 1032"),
            ("another offset", "field sageattn_error status 4 4", "field sageattn_error status 8 4",
             "sageattn_error.status: is (8, 4)"),
            ("a field is missing", "field sageattn_attn_desc bias 140 4 int32_t\n", "",
             "field sageattn_attn_desc.bias: is missing")]:
        found = check_bindings.items_of(check_abi.parse_layout(text.replace(old, new, 1) if old else text))
        faults = check_bindings.compare("go", header, found)
        expect(f"binding, {what}", (len(faults), "\n".join(faults)), words)
    with mock.patch.dict(check_bindings.LEFT_OUT, {"go": {"const SAGEATTN_OK": "none", "const SAGEATTN_NONE": ""}}):
        faults = "\n".join(check_bindings.compare("go", header, check_bindings.items_of(header)))
        expect("binding, left out but there", (1, faults), "SAGEATTN_OK: is left out with a reason, but is there")
        expect("binding, left out but nowhere", (1, faults), "SAGEATTN_NONE: is left out with a reason, but the header")


def main():
    cc = sys.argv[1] if len(sys.argv) > 1 else "cc"
    with tempfile.TemporaryDirectory() as folder:
        check_headers(folder, cc)
        check_update(folder, cc)
    check_layouts(cc)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
