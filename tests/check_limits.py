#!/usr/bin/env python3
"""The library accepts the bounds that docs/limits.md states, refuses what is beyond, and the header says the same.

    check_limits.py LIBRARY
"""

import ctypes
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INVALID_ARGUMENT = 100
CPU = 2
TYPES = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def struct(header, name):
    """A struct of the header: numbers as they are, all else (pointers, hooks) as a pointer."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\n\}} {name};", re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL), re.DOTALL)
    fields = []
    for line in body.group(1).split(";")[:-1]:
        kind, _, field = line.strip().rpartition(" ")
        number = TYPES.get(kind)
        fields.append((field, number) if number else (f"pointer_{len(fields)}", ctypes.c_void_p))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Error(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("status", ctypes.c_int32), ("message", ctypes.c_char * 1016)]


class Library:
    def __init__(self, path, header):
        self.library = ctypes.CDLL(path)
        self.Context, self.Desc = struct(header, "sageattn_context_desc"), struct(header, "sageattn_attn_desc")
        self.context = ctypes.c_void_p()
        self.make_context({})

    def make_context(self, fields):
        """The message of the error, or None."""
        error, desc = Error(struct_size=ctypes.sizeof(Error)), self.Context(backend=CPU, **fields)
        desc.struct_size = ctypes.sizeof(desc)
        handle = ctypes.c_void_p()
        if self.library.sageattn_context_create(ctypes.byref(desc), ctypes.byref(handle), ctypes.byref(error)):
            return error.status, error.message.decode()
        self.library.sageattn_context_destroy(self.context)
        self.context = handle
        return None

    def query(self, fields):
        error, desc = Error(struct_size=ctypes.sizeof(Error)), self.Desc(q_dtype=3, head_dim=64, num_qo_heads=1,
                                                                         max_qo_len=64, max_kv_len=64)
        desc.struct_size = ctypes.sizeof(desc)
        for field, value in fields.items():
            setattr(desc, field, value)
        self.library.sageattn_plan_query(self.context, ctypes.byref(desc), None, ctypes.byref(error))
        return (error.status, error.message.decode()) if error.status else None


def with_what_it_needs(field, value):
    fields = {field: value}
    if field.startswith("max_total"):
        fields["batch_mode"] = 1
    if field == "num_kv_heads" and value > 0:
        fields["num_qo_heads"] = min(value, 65536)
    if field == "sm_scale":
        fields["sm_scale_set"] = 1
    return fields


def number(text):
    base, _, exponent = text.partition("^")
    return float(text) if "e" in text else int(base) ** int(exponent or 1)


def main():
    header = read("include/sageattn.h")
    library = Library(sys.argv[1], header)
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (.*) \|$", read("docs/limits.md"), re.MULTILINE)
    assert len(rows) > 10, rows
    faults = []
    for field, least, most, if_zero in rows:
        call = library.make_context if field == "num_threads" else library.query
        low, high = number(least), number(most)
        below, above = (low * 1.01, high * 1.01) if isinstance(low, float) else (low - 1 if if_zero == "refused" else -1, high + 1)
        for value in {low, high} if if_zero == "refused" else {low, high, 0}:
            refused = call(with_what_it_needs(field, value))
            if refused:
                faults.append(f"{field} = {value}: refused: {refused[1]}")
        for value in (below, above):
            refused = call(with_what_it_needs(field, value))
            if refused is None:
                faults.append(f"{field} = {value}: accepted")
            elif refused[0] != INVALID_ARGUMENT or field not in refused[1]:
                faults.append(f"{field} = {value}: {refused[1]}")
        stated = f"up to {most}" if isinstance(high, float) else f"{least}..{most}"
        comment = re.search(rf"\b{field};\s*/\*(.*?)\*/", header, re.DOTALL).group(1)
        if stated not in comment and not re.search(r"likewise|divides num_qo_heads", comment):
            faults.append(f"{field}: include/sageattn.h does not say {stated}")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(rows)} limits")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
