#!/usr/bin/env python3
"""The header against tests/abi/baseline.txt: old programs and bindings must keep working.

Fine are a new function, a new constant, a new field at the end of a struct that starts with struct_size, and
a name for a field that was called `reserved`. Everything else that changes a size, an offset, a type, a value
or a prototype is an error. --update writes what the header has now, and accepts errors only if the header's
minor version is larger than the baseline's. The compiler computes sizes and offsets and confirms the types
that are read from the text.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEADER = os.path.join(ROOT, "include", "sageattn.h")
BASELINE = os.path.join(ROOT, "tests", "abi", "baseline.txt")
SYMBOLS = os.path.join(ROOT, "src", "package", "libsageattn0.symbols")
NODE = "SAGEATTN_0"

# version: (major, minor, patch). constants: {name: value}. structs: {name: (size, {field: (offset, size,
# type)})}, fields in order. functions: {name: prototype without names of parameters}.
Interface = collections.namedtuple("Interface", "version constants structs functions")


class Fault(Exception):
    pass


def split(text, separator):
    """Parts of the text between separators that no parenthesis encloses."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in parts + [text[start:]] if part.strip()]


def tidy(type_):
    return re.sub(r"\s*\*\s*", " *", " ".join(type_.split())).replace("* *", "**").strip()


def declare(text):
    """(name, type) of a declaration of one thing; the type has no names of parameters."""
    match = re.fullmatch(r"(.*?)\(\s*\*\s*(\w+)\s*\)\s*\((.*)\)", text, re.DOTALL)  # pointer to a function
    if match:
        return match[2], f"{tidy(match[1])} (*)({parameters(match[3])})"
    match = re.fullmatch(r"(.*?)\b(\w+)\s*((?:\[\w+\])*)", text, re.DOTALL)
    if not match or not match[1].strip():
        raise Fault(f"cannot read the declaration '{text}'")
    return match[2], tidy(match[1]) + match[3]


def parameters(text):
    return "void" if text.strip() == "void" else ", ".join(declare(p)[1] for p in split(text, ","))


def declare_all(text):
    """As declare, of "int32_t a, b"."""
    first, *others = split(text, ",")
    name, type_ = declare(first)
    if others and not re.fullmatch(r"\w+", type_):
        raise Fault(f"declare one field at a time: '{text}'")
    return [(name, type_)] + [(other, type_) for other in others]


def spell(type_, name):
    """The declaration of something of that type."""
    if "(*)" in type_:
        return type_.replace("(*)", f"(*{name})", 1)
    match = re.fullmatch(r"([^\[]*)(\[.*\])?", type_)
    return f"{match[1]} {name}{match[2] or ''}"


def read_header(path, compiler="cc"):
    """The interface that a header declares. Compiles a program that prints the numbers."""
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.DOTALL)
    version = re.findall(r"#define\s+SAGEATTN_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text)
    code = re.sub(r"^\s*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    constants = [declaration.split("=")[0].strip()
                 for body in re.findall(r"\benum\s*{(.*?)}", code, re.DOTALL)
                 for declaration in split(body, ",")]
    structs = {name: [field for member in split(body, ";") for field in declare_all(member)]
               for name, body in re.findall(r"typedef\s+struct\s+(\w+)\s*{(.*?)}\s*\w+\s*;", code, re.DOTALL)}
    functions = {}
    for result, name, arguments in re.findall(r"\bSAGEATTN_API\b([^;(]*?)(\w+)\s*\(([^;]*)\)\s*;", code):
        functions[name] = f"{tidy(result)} ({parameters(arguments)})"
    counts = (len(re.findall(r"\bSAGEATTN_API\b", code)), len(re.findall(r"\bstruct\s+\w+\s*{", code)))
    if (len(functions), len(structs)) != counts or len(version) != 3 or not constants:
        raise Fault(f"{path}: cannot read every declaration")

    lines = ["#include <stddef.h>", "#include <stdio.h>", f'#include "{os.path.abspath(path)}"', "int main(void) {"]
    for name in constants:
        lines.append(f'  printf("const {name} %lld\\n", (long long){name});')
    for name, fields in structs.items():
        lines.append(f'  printf("struct {name} %zu\\n", sizeof({name}));')
        for field, type_ in fields:
            lines.append(f'  printf("field {name} {field} %zu %zu\\n", offsetof({name}, {field}), '
                         f"sizeof((({name} *)0)->{field}));")
            lines.append(f"  {{ {spell(type_, '(*is)')} = &(({name} *)0)->{field}; (void)is; }}")
    for name, prototype in functions.items():
        lines.append(f"  {{ {prototype.replace(' (', ' (*is)(', 1)} = {name}; (void)is; }}")
    lines += ["  return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "dump.c"), os.path.join(folder, "dump")
        with open(source, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        # Nothing is called, but the addresses of functions are taken: link without them.
        run = subprocess.run([compiler, "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-long-long", source,
                              "-o", program], capture_output=True, text=True, check=False)
        if run.returncode:
            raise Fault(f"{path}: the types read from it are not what the compiler sees:\n{run.stderr}")
        numbers = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    layout = parse_layout(numbers)
    return Interface(tuple(map(int, version)), layout.constants,
                     {name: (size, {field: (*fields[field], type_) for field, type_ in structs[name]})
                      for name, (size, fields) in layout.structs.items()}, functions)


def parse_layout(text):
    """Lines "const NAME VALUE", "struct NAME SIZE", "field STRUCT NAME OFFSET SIZE [TYPE]", and of the baseline
    "version ..." and "function NAME PROTOTYPE"."""
    version, constants, structs, functions = (0, 0, 0), {}, {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            if words[0] == "version":
                version = tuple(map(int, words[1].split(".")))
            elif words[0] == "const":
                _, name, value = words
                constants[name] = int(value)
            elif words[0] == "struct":
                _, name, size = words
                structs[name] = (int(size), {})
            elif words[0] == "field":
                _, struct, name, offset, size = words[:5]
                structs[struct][1][name] = (int(offset), int(size), *([" ".join(words[5:])] if words[5:] else []))
            elif words[0] == "function":
                functions[words[1]] = " ".join(words[2:])
            else:
                raise ValueError("unknown word")
        except (ValueError, KeyError) as error:
            raise Fault(f"line {number}: '{line}': {error}") from error
    return Interface(version, constants, structs, functions)


def format_interface(interface):
    lines = ["# What include/sageattn.h promises; written by tests/check_abi.py --update.",
             "version " + ".".join(map(str, interface.version))]
    lines += [f"const {name} {value}" for name, value in interface.constants.items()]
    for name, (size, fields) in interface.structs.items():
        lines.append(f"struct {name} {size}")
        lines += [f"field {name} {field} {offset} {bytes_} {type_}"
                  for field, (offset, bytes_, type_) in fields.items()]
    lines += [f"function {name} {prototype}" for name, prototype in interface.functions.items()]
    return "\n".join(lines) + "\n"


def compare_structs(name, old, new):
    """What is wrong with a struct, and its new fields."""
    (old_size, old_fields), (new_size, new_fields) = old, new
    was, now = list(old_fields.items()), list(new_fields.items())
    faults = []
    for i, (field, place) in enumerate(was):
        if i >= len(now):
            faults.append(f"{name}.{field}: is gone")
        elif now[i][1] != place or now[i][0] != field != "reserved":
            faults.append(f"{name}.{field}: was {place}, in its place is {now[i][0]} {now[i][1]}")
    added = [field for field, _ in now[len(was):]]
    if added and was[0][0] != "struct_size":
        faults.append(f"{name}.{added[0]}: the struct is frozen, it has no struct_size")
    faults += [f"{name}.{field}: at offset {offset}, within the {old_size} bytes that the struct had"
               for field, (offset, _, _) in now[len(was):] if offset < old_size]
    if not added and new_size != old_size:
        faults.append(f"{name}: was {old_size} bytes, is {new_size}")
    return faults, [f"{name}.{field}" for field in added]


def compare(old, new):
    """(what breaks old programs, what is new)."""
    faults, added = [], []
    for kind, was, now in (("constant", old.constants, new.constants), ("function", old.functions, new.functions)):
        for name, value in was.items():
            if name not in now:
                faults.append(f"{kind} {name}: is gone")
            elif now[name] != value:
                faults.append(f"{kind} {name}: was {value}, is {now[name]}")
        added += [f"{kind} {name}" for name in now if name not in was]
    for name, struct in old.structs.items():
        if name not in new.structs:
            faults.append(f"struct {name}: is gone")
            continue
        struct_faults, fields = compare_structs(name, struct, new.structs[name])
        faults += struct_faults
        added += fields
    added += [f"struct {name}" for name in new.structs if name not in old.structs]
    return faults, added


def check_symbols(text, interface):
    """The symbols file of the Debian package names every function, and since when."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("*", "#"))]
    faults = [] if lines[:1] == ["libsageattn.so.0 libsageattn0 #MINVER#"] else ["the first line is not the library's"]
    found = {}
    for line in lines[1:]:
        match = re.fullmatch(r" (\w+)@(\w+) (\d+)\.(\d+)\.(\d+)", line)
        if not match:
            faults.append(f"cannot read '{line}'")
            continue
        found[match[1]] = tuple(map(int, match.groups()[2:]))
        if match[2] != NODE:
            faults.append(f"{match[1]}: the version node is {match[2]}, not {NODE}")
        if found[match[1]] > interface.version:
            faults.append(f"{match[1]}: first in a version that is still to come")
    found.pop(NODE, None)
    faults += [f"{name}: in the header, not in the file" for name in interface.functions if name not in found]
    faults += [f"{name}: in the file, not in the header" for name in found if name not in interface.functions]
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", default=HEADER)
    parser.add_argument("--baseline", default=BASELINE)
    parser.add_argument("--symbols", default=SYMBOLS)
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--dump", action="store_true", help="print the interface, check nothing")
    args = parser.parse_args()
    try:
        new = read_header(args.header, args.cc)
        if args.dump:
            print(format_interface(new), end="")
            return 0
        old = new
        if os.path.exists(args.baseline) or not args.update:
            with open(args.baseline, encoding="utf-8") as file:
                old = parse_layout(file.read())
    except (Fault, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    faults, added = compare(old, new)
    if args.update and (not faults or new.version[:2] > old.version[:2]):
        os.makedirs(os.path.dirname(args.baseline), exist_ok=True)
        with open(args.baseline, "w", encoding="utf-8") as file:
            file.write(format_interface(new))
        for line in faults:
            print(f"accepted with the new minor version: {line}")
        return 0
    if args.update:
        faults.append("not updated: incompatible changes need a new minor version in the header")
    else:
        with open(args.symbols, encoding="utf-8") as file:
            faults += [f"{os.path.basename(args.symbols)}: {fault}" for fault in check_symbols(file.read(), new)]
    for line in added:
        print(f"new, to be recorded with --update before a release: {line}")
    for line in faults:
        print(line, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
