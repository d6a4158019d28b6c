#!/usr/bin/env python3
"""Every struct, field and constant of the header, and for Python every function, as the bindings have them.

    check_bindings.py LIBRARY --build FOLDER [--only python|rust|go]...

Python: STRUCTS, CONSTANTS and FUNCTIONS of examples/python/sageattn/_abi.py. Rust and Go: what their programs
`layout` print, a line each of "struct NAME SIZE", "field STRUCT NAME OFFSET SIZE" and "const NAME VALUE".
Exits with 77 if a part could not be checked because cargo or go is missing.
"""

import argparse
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys

import check_abi

# What a binding leaves out: {binding: {"struct sageattn_x", "field sageattn_x.y" or "const SAGEATTN_Z": why}}.
LEFT_OUT = {"python": {}, "rust": {}, "go": {}}

SCALARS = {"void": None, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
           "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double}


class Missing(Exception):
    pass


def items_of(interface):
    """{"const X": value, "struct X": size, "field X.y": (offset, size)}"""
    items = {f"const {name}": value for name, value in interface.constants.items()}
    for name, (size, fields) in interface.structs.items():
        items[f"struct {name}"] = size
        items.update({f"field {name}.{field}": tuple(place[:2]) for field, place in fields.items()})
    return items


def compare(binding, interface, found):
    """What is wrong with the items of a binding. It may have the version, too."""
    header, left_out = items_of(interface), LEFT_OUT[binding]
    version = dict(zip(("MAJOR", "MINOR", "PATCH"), interface.version))
    version["NUMBER"] = version["MAJOR"] * 10000 + version["MINOR"] * 100 + version["PATCH"]
    for part, value in version.items():
        if f"const SAGEATTN_VERSION_{part}" in found:
            header[f"const SAGEATTN_VERSION_{part}"] = value
    faults = [f"{item}: is left out with a reason, but the header has no such thing"
              for item in left_out if item not in header]
    for item, value in header.items():
        if item not in found:
            if item not in left_out:
                faults.append(f"{item}: is missing")
        elif found[item] != value:
            faults.append(f"{item}: is {found[item]}, in the header {value}")
        elif item in left_out:
            faults.append(f"{item}: is left out with a reason, but is there")
    faults += [f"{item}: is not in the header" for item in found if item not in header]
    return faults


def load_python(path):
    spec = importlib.util.spec_from_file_location("sageattn_abi", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_type(found, declared):
    """Whether a ctypes type is passed as the C type is."""
    if "*" in declared:
        return found in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(
            found, (ctypes._Pointer, ctypes._CFuncPtr))  # pylint: disable=protected-access
    return found is SCALARS[declared]


def check_python(folder, header):
    module = load_python(os.path.join(folder, "sageattn", "_abi.py"))
    found = {f"const {name}": value for name, value in module.CONSTANTS.items()}
    faults = []
    for name, struct in module.STRUCTS.items():
        found[f"struct {name}"] = ctypes.sizeof(struct)
        declared = header.structs.get(name, (0, {}))[1]
        for field, type_ in struct._fields_:  # pylint: disable=protected-access
            place = getattr(struct, field)
            found[f"field {name}.{field}"] = (place.offset, place.size)
            if field in declared and declared[field][2] in SCALARS and not is_type(type_, declared[field][2]):
                faults.append(f"field {name}.{field}: is {type_.__name__}, in the header {declared[field][2]}")
    for name, prototype in header.functions.items():
        if name not in module.FUNCTIONS:
            faults.append(f"function {name}: is missing")
            continue
        result, arguments = module.FUNCTIONS[name]
        declared_result, declared = prototype[:-1].split(" (", 1)
        declared = [] if declared == "void" else declared.split(", ")
        if len(declared) != len(arguments) or not all(map(is_type, [result, *arguments],
                                                          [declared_result, *declared])):
            faults.append(f"function {name}: is {result}, {arguments}, in the header {prototype}")
    faults += [f"function {name}: is not in the header" for name in module.FUNCTIONS
               if name not in header.functions]
    return faults + compare("python", header, found)


def run_layout(tool, command, folder, environment):
    if not shutil.which(tool):
        raise Missing(f"there is no {tool}")
    run = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
                         check=False)
    if run.returncode:
        raise check_abi.Fault(f"{' '.join(command)}:\n{run.stderr}")
    return items_of(check_abi.parse_layout(run.stdout))


def check_rust(folder, header, library, build):
    command = ["cargo", "run", "--quiet", "--offline", "-p", "sageattn-sys", "--example", "layout"]
    found = run_layout("cargo", command, folder,
                       {"SAGEATTN_LIB_DIR": library, "LD_LIBRARY_PATH": library,
                        "CARGO_TARGET_DIR": os.path.join(build, "rust")})
    return compare("rust", header, found)


def check_go(folder, header, library, build):
    found = run_layout("go", ["go", "run", "./cmd/layout"], folder,
                       {"CGO_CFLAGS": f'"-I{os.path.join(check_abi.ROOT, "include")}"',
                        "CGO_LDFLAGS": f'"-L{library}" -lsageattn', "LD_LIBRARY_PATH": library,
                        "GOCACHE": os.path.join(build, "go"), "GOPROXY": "off"})
    return compare("go", header, found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--build", required=True, help="where cargo and go build")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--only", action="append", choices=sorted(LEFT_OUT))
    parser.add_argument("--examples", default=os.path.join(check_abi.ROOT, "examples"))
    args = parser.parse_args()
    header = check_abi.read_header(check_abi.HEADER, args.cc)
    library, build = os.path.dirname(os.path.abspath(args.library)), os.path.abspath(args.build)
    checks = {"python": lambda folder: check_python(folder, header),
              "rust": lambda folder: check_rust(folder, header, library, build),
              "go": lambda folder: check_go(folder, header, library, build)}
    failed = skipped = False
    for binding in args.only or checks:
        try:
            faults = checks[binding](os.path.join(args.examples, binding))
        except Missing as missing:
            skipped = True
            print(f"{binding}: skipped: {missing}")
            continue
        except (check_abi.Fault, OSError) as error:
            faults = [str(error)]
        for fault in faults:
            print(f"{binding}: {fault}", file=sys.stderr)
        failed = failed or bool(faults)
        if not faults:
            print(f"{binding}: as the header has it")
    return 1 if failed else 77 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
