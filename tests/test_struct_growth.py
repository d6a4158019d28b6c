#!/usr/bin/env python3
"""Callers of other versions, by the sizes of their structs: sageattn.h, "Structs".

    test_struct_growth.py LIBRARY

Every struct lies at the end of a page, the next of which cannot be touched: what the library reads or writes
beyond the caller's size ends the process.
"""

import argparse
import ctypes as c
import mmap
import struct
import sys

import check_abi

PAGE = mmap.PAGESIZE
MAX_SIZE = 65536
CANARY = 0x5A

failures = []


def expect(what, got, wanted):
    if got != wanted:
        failures.append(f"{what}: got {got}, expected {wanted}")


class Guarded:
    """Memory that ends where the last page that can be touched ends."""

    def __init__(self):
        size = MAX_SIZE + 2 * PAGE
        self._map = mmap.mmap(-1, size)
        self._start = c.addressof(c.c_char.from_buffer(self._map))
        self.end = self._start + size - PAGE
        libc = c.CDLL(None, use_errno=True)
        if libc.mprotect(c.c_void_p(self.end), c.c_size_t(PAGE), 0) != 0:
            raise OSError(c.get_errno(), "mprotect")

    def put(self, content):
        """The address of the content, which may be misaligned: structs are copied in and out."""
        c.memmove(self.end - len(content), bytes(content), len(content))
        return c.c_void_p(self.end - len(content))

    def get(self, size):
        return c.string_at(self.end - size, size)


class Library:
    """The functions, on raw memory."""

    def __init__(self, path, header):
        self._library, self._header = c.CDLL(path), header
        self.status = header.constants
        self.memory, self.output = Guarded(), Guarded()

    def size(self, name):
        return self._header.structs[name][0]

    def cuts(self, name):
        """Sizes of an older struct: where each field but the first starts, those of structs in it included."""
        structs = self._header.structs
        return [offset + inner for offset, _, type_ in list(structs[name][1].values())[1:]
                for inner in ([place[0] for place in structs[type_][1].values()] if type_ in structs else [0])]

    def pack(self, name, **values):
        """A struct whose size and fields ("a.b" is b of the struct a) are set, the rest 0."""
        size, fields = self._header.structs[name]
        content = bytearray(size)
        struct.pack_into("<I", content, 0, size)
        for field, value in values.items():
            outer, _, inner = field.partition("__")
            offset, bytes_, type_ = fields[outer]
            if inner:
                start = offset
                offset, bytes_, type_ = self._header.structs[type_][1][inner]
                offset += start
            struct.pack_into({4: "<i", 8: "<q"}[bytes_], content, offset, value)
        return content

    def call(self, function, *arguments):
        """(name of the status, message)"""
        error = self.pack("sageattn_error")
        memory = c.create_string_buffer(bytes(error), len(error))
        status = getattr(self._library, function)(*arguments, memory)
        expect(f"{function}: status in the error", struct.unpack_from("<i", memory.raw, 4)[0], status)
        names = [name for name, value in self.status.items()
                 if value == status and (name == "SAGEATTN_OK" or name.startswith("SAGEATTN_E_"))]
        return names[0], memory.raw[8:].split(b"\0")[0].decode()


def with_size(content, size):
    return struct.pack("<I", size) + bytes(content[4:])


def check_input(library, name, parameter, content, call):
    """`call` takes an address and returns what happened, everything that was written included."""
    known = library.size(name)
    whole = call(library.memory.put(content))
    expect(f"{name}", whole[0][0], "SAGEATTN_OK")
    for size in library.cuts(name):  # a struct that lacks fields is one that has zeros there
        zeros = call(library.memory.put(content[:size] + bytes(known - size)))
        expect(f"{name} of {size} bytes", call(library.memory.put(with_size(content[:size], size))), zeros)
    for size in [known + 1, known + 8, MAX_SIZE]:
        longer = with_size(content + bytes(size - known), size)
        expect(f"{name} of {size} bytes", call(library.memory.put(longer)), whole)
        for offset in {known, size - 1}:
            set_ = bytearray(longer)
            set_[offset] = 1
            (status, message), *_ = call(library.memory.put(set_))
            expect(f"{name}, byte {offset}", status, "SAGEATTN_E_UNKNOWN_FIELD")
            expect(f"{name}, byte {offset}: '{message}'", f"{parameter}: the byte at offset {offset} " in message, True)
    for size in (0, 1, 2, 3, MAX_SIZE + 1, 2**31, 2**32 - 1):
        (status, message), *_ = call(library.memory.put(with_size(content[:4], size)))
        expect(f"{name}, struct_size {size}", status, "SAGEATTN_E_INVALID_ARGUMENT")
        expect(f"{name}: '{message}'", f"{parameter}->struct_size = {size}: " in message, True)


def check_output(library, name, parameter, call):
    """`call` takes an address."""
    known = library.size(name)

    def run(size, room):
        address = library.output.put(struct.pack("<I", size) + bytes([CANARY]) * (room - 4))
        return call(address), library.output.get(room)

    outcome, whole = run(known, known)
    expect(name, outcome[0], "SAGEATTN_OK")
    for size in [*range(4, known), known, known + 1, known + 8, MAX_SIZE]:
        outcome, written = run(size, size)
        wanted = struct.pack("<I", size) + whole[4:size] + bytes([CANARY]) * max(0, size - known)
        expect(f"{name} of {size} bytes", (outcome[0], written == wanted), ("SAGEATTN_OK", True))
    for size in (0, 1, 2, 3, MAX_SIZE + 1, 2**32 - 1):
        outcome, written = run(size, 4)
        expect(f"{name}, struct_size {size}", (outcome[0], written),
               ("SAGEATTN_E_INVALID_ARGUMENT", struct.pack("<I", size)))
        expect(f"{name}: '{outcome[1]}'", f"{parameter}->struct_size = {size}: " in outcome[1], True)


def check_error(library, call):
    """The struct of errors may be of any size: what is too small for the status is ignored."""
    known = library.size("sageattn_error")
    for size in [*range(0, 80), known, known + 8, MAX_SIZE, 2**32 - 1]:
        room = max(4, min(size, MAX_SIZE)) if size != 2**32 - 1 else known
        before = struct.pack("<I", size) + bytes([CANARY]) * (room - 4)
        status = call(library.output.put(before))
        after = library.output.get(room)
        expect(f"error of {size} bytes: status", status, library.status["SAGEATTN_E_INVALID_ARGUMENT"])
        if size < 8:
            expect(f"error of {size} bytes", after, before)
            continue
        expect(f"error of {size} bytes: field", struct.unpack_from("<i", after, 4)[0], status)
        expect(f"error of {size} bytes: beyond", after[known:], before[known:])
        if size > 8:
            expect(f"error of {size} bytes: ends", b"\0" in after[8:], True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--cc", default="cc")
    args = parser.parse_args()
    header = check_abi.read_header(check_abi.HEADER, args.cc)
    library = Library(args.library, header)
    constants = header.constants

    context = c.c_void_p()
    plan = c.c_void_p()

    def create_context(desc):
        made = c.c_void_p()
        outcome = library.call("sageattn_context_create", desc, c.byref(made))
        expect("context: a handle or an error", bool(made), outcome[0] == "SAGEATTN_OK")
        library._library.sageattn_context_destroy(made)  # pylint: disable=protected-access
        return (outcome,)

    context_desc = library.pack("sageattn_context_desc", backend=constants["SAGEATTN_BACKEND_CPU"], num_threads=1)
    check_input(library, "sageattn_context_desc", "desc", context_desc, create_context)
    library.call("sageattn_context_create", library.memory.put(context_desc), c.byref(context))

    def query_plan(desc):
        info = bytearray(library.pack("sageattn_plan_info"))
        outcome = library.call("sageattn_plan_query", context, desc, library.output.put(info))
        made = c.c_void_p()
        created = library.call("sageattn_plan_create", context, desc, c.byref(made))
        expect("plan: a handle or an error", bool(made), created[0] == "SAGEATTN_OK")
        library._library.sageattn_plan_destroy(made)  # pylint: disable=protected-access
        expect("plan: query and create", created[0], outcome[0])
        return outcome, library.output.get(len(info))

    attn_desc = library.pack("sageattn_attn_desc", q_dtype=constants["SAGEATTN_F32"], head_dim=8, num_qo_heads=1,
                             max_qo_len=4, max_kv_len=4, qk_format=constants["SAGEATTN_QK_I8"],
                             pv_format=constants["SAGEATTN_PV_F16"], kernel=constants["SAGEATTN_KERNEL_MMA_SYNC"])
    check_input(library, "sageattn_attn_desc", "desc", attn_desc, query_plan)
    library.call("sageattn_plan_create", context, library.memory.put(attn_desc), c.byref(plan))

    check_output(library, "sageattn_plan_info", "info",
                 lambda info: library.call("sageattn_plan_get_info", plan, info))
    desc = c.create_string_buffer(bytes(attn_desc), len(attn_desc))
    check_output(library, "sageattn_plan_info", "info",
                 lambda info: library.call("sageattn_plan_query", context, desc, info))

    tensors = {name: c.create_string_buffer(struct.pack("<16f", *(i % 5 for i in range(16))), 64)
               for name in ("q", "k", "v")}
    out, status = c.create_string_buffer(64), c.create_string_buffer(4)
    info = library.pack("sageattn_plan_info")
    library.call("sageattn_plan_get_info", plan, library.output.put(info))
    at = {name: place[0] for name, place in header.structs["sageattn_plan_info"][1].items()}
    written = library.output.get(len(info))
    size, = struct.unpack_from("<q", written, at["min_workspace"])
    alignment, = struct.unpack_from("<i", written, at["workspace_alignment"])
    room = c.create_string_buffer(size + alignment)
    workspace = c.c_void_p(-(-c.addressof(room) // alignment) * alignment)

    def execute(arguments):
        c.memset(out, CANARY, 64)
        c.memset(status, CANARY, 4)
        outcome = library.call("sageattn_execute", plan, arguments, workspace, c.c_size_t(size), None)
        if outcome[0] != "SAGEATTN_OK":
            expect("execute: outputs untouched", (out.raw, status.raw), (bytes([CANARY]) * 64, bytes([CANARY]) * 4))
        return outcome, out.raw, status.raw

    check_input(library, "sageattn_execute_args", "args",
                library.pack("sageattn_execute_args", batch=1, qo_len=2, kv_len=2, status=c.addressof(status),
                             out__data=c.addressof(out),
                             **{f"{name}__data": c.addressof(data) for name, data in tensors.items()}), execute)

    compare_args = library.pack("sageattn_compare_args", out_dtype=constants["SAGEATTN_F32"],
                                ref_dtype=constants["SAGEATTN_F32"], batch=1, len=2, num_heads=1, head_dim=8,
                                out__data=c.addressof(tensors["q"]), ref__data=c.addressof(tensors["k"]))
    result_size = library.size("sageattn_compare_result")

    def compare(arguments):
        before = struct.pack("<I", result_size) + bytes([CANARY]) * (result_size - 4)
        outcome = library.call("sageattn_compare", arguments, library.output.put(before))
        result = library.output.get(result_size)
        if outcome[0] != "SAGEATTN_OK":
            expect("compare: result untouched", result, before)
        return outcome, result

    check_input(library, "sageattn_compare_args", "args", compare_args, compare)
    fixed = c.create_string_buffer(bytes(compare_args), len(compare_args))
    check_output(library, "sageattn_compare_result", "result",
                 lambda result: library.call("sageattn_compare", fixed, result))

    raw = library._library  # pylint: disable=protected-access
    check_error(library, lambda error: raw.sageattn_plan_get_info(None, None, error))
    raw.sageattn_plan_destroy(plan)
    raw.sageattn_context_destroy(context)

    # What the CPU backend asks of a driver that is there it must not load.
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = maps.read()
    expect("libraries that were loaded", [name for name in ("libcuda", "libnvrtc") if name in loaded], [])
    for failure in failures[:40]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
