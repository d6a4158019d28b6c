#!/usr/bin/env python3
"""Writes the reference in docs/api.md from include/sageattn.h.

    make_api.py [--check] [DOCS]

DOCS is the folder of api.md (default: docs). With --check nothing is written, and the exit code is 1 if the
reference is not what the header gives.
"""

import os
import re

import generated_document

# Title and names of each group of functions. One that is in none is an error.
GROUPS = [
    ("Contexts", r"sageattn_context_\w+"),
    ("Plans", r"sageattn_attn_desc_init|sageattn_plan_\w+"),
    ("Executing", r"sageattn_execute"),
    ("Checking", r"sageattn_compare|sageattn_selftest"),
    ("The library", r"sageattn_version\w*|sageattn_source_id|sageattn_status_name"),
]
COMMENT = r"/\*((?:[^*]|\*(?!/))*)\*/"
INTRODUCTION = """## Reference

Written by `tests/make_api.py` from [include/sageattn.h](../include/sageattn.h), whose beginning has the rules that hold for every
call. [Functions](#functions), [structs](#structs), [constants](#constants). Errors are named without `SAGEATTN_E_`; every
function that can fail also returns `INTERNAL` where the library itself is wrong.
"""


def words(comment):
    """A comment's text in one line."""
    return " ".join(re.sub(r"^\s*\*(?=\s|$)", "", line).strip() for line in comment.splitlines()).strip()


class Header:
    def __init__(self, text):
        self.text = re.sub(r"^#.*(?:\\\n.*)*$", "", text, flags=re.MULTILINE)
        self.structs = [match.groups() for match in re.finditer(
            COMMENT + r"\s*typedef struct (\w+) \{\n(.*?)^\} \2;", self.text, re.DOTALL | re.MULTILINE)]
        self.enums = [match.groups() for match in re.finditer(
            r"(?:" + COMMENT + r"\s*)?^enum \{(.*?)\};", self.text, re.DOTALL | re.MULTILINE)]
        self.functions = []  # (comment, name, parameters)
        for comment, declarations in re.findall(COMMENT + r"\n((?:SAGEATTN_API[^;]*;\s*)+)", self.text):
            for name, parameters in re.findall(r"(\w+)\(([^)]*)\);", declarations):
                self.functions.append((comment, name, parameters))
        self.linked = {name for _, name, _ in self.structs} | {name for _, name, _ in self.functions}
        self.families = {self.family(body) for _, body in self.enums}

    @staticmethod
    def family(body):
        """What the constants of an enum have in common: SAGEATTN_QK_*."""
        names = re.findall(r"(SAGEATTN_\w+) =", body)
        if "SAGEATTN_OK" in names:
            return "SAGEATTN_E_*"
        prefix = os.path.commonprefix(names)
        prefix = prefix[:prefix.rindex("_") + 1]
        return prefix + "*" if prefix != "SAGEATTN_" else ", ".join(names)

    def prose(self, text):
        """With names set as code, and linked where they are explained."""
        def name(word):
            if word in self.linked:
                return f"[`{word}`](#{word})"
            if word in self.families:
                return f"[`{word}`](#{word.lower().rstrip('*')})"
            return f"`{word}`"

        parts = re.split(r"(\$[A-Z_]+(?:/[\w./]+\w)?|\bSAGEATTN_\w+\*?|(?<![\w/])\b[a-z]+(?:_[a-z0-9]+)+\b(?!\.\w)|\*needed\b)",
                         words(text))
        return "".join(name(part) if number % 2 else re.sub(r"([*|<])", r"\\\1", part)
                       for number, part in enumerate(parts))


def function_rows(header, pattern):
    for comment, name, parameters in header.functions:
        if not re.fullmatch(pattern, name):
            continue
        summary, _, errors = comment.partition("Errors:")
        summary = re.split(r"\n \* {2,}\w+ {2,}", summary)[0]  # what follows tells of parameters
        names = re.findall(r"(\w+)(?:,|$)", "" if parameters == "void" else words(parameters))
        yield f'<a id="{name}"></a>`{name}({", ".join(names)})`', header.prose(summary), header.prose(errors).removesuffix(".") or "none"


def struct_rows(header, body):
    """A field, or several declared together; a comment on a line of its own tells of those below it."""
    item = re.compile(rf"\s*(?:{COMMENT}|([^;/]+?)(\w+(?:, \w+)*|\(\*\w+\)\([^)]*\)|\w+\[\d+\]);[ \t]*(?:{COMMENT})?)")
    end = 0
    while body[end:].strip():
        match = item.match(body, end)
        assert match, body[end:]
        above, kind, names, comment = match.groups()
        end = match.end()
        if above is not None:
            yield "", "", f"*{header.prose(above)}*"
            continue
        pointer = re.fullmatch(r"\(\*(\w+)\)(\([^)]*\))", names)
        array = re.fullmatch(r"(\w+)(\[\d+\])", names)
        if pointer:
            names, kind = pointer.group(1), kind + "(*)" + pointer.group(2)
        elif array:
            names, kind = array.group(1), kind + array.group(2)
        kind = words(kind)
        if names == "struct_size" and not comment:
            comment = "sizeof of the caller's struct"
        kind = header.prose(kind) if kind in header.linked else f"`{kind}`"
        yield ", ".join(f"`{name}`" for name in names.split(", ")), kind, header.prose(comment or "")


def enum_rows(header, body):
    for above, name, value, comment in re.findall(rf"\s*(?:{COMMENT}\s*)?(SAGEATTN_\w+) = (\d+),?[ \t]*(?:{COMMENT})?", body):
        if re.match(r"\s*\d+\.\.", above):  # tells of several
            yield "", "", f"*{header.prose(above)}*"
            above = ""
        yield f"`{name}`", value, header.prose(comment or above)


def lines(header):
    yield from [INTRODUCTION, "### Functions", ""]
    missing = {name for _, name, _ in header.functions}
    for title, pattern in GROUPS:
        missing -= {name for name in missing if re.fullmatch(pattern, name)}
        rows = list(function_rows(header, pattern))
        yield from [f"**{title}**", "", *generated_document.markdown(["function", "what it does", "errors"], rows), ""]
    if missing:
        raise SystemExit(f"in no group of tests/make_api.py: {', '.join(sorted(missing))}")
    yield from ["### Structs", ""]
    for comment, name, body in header.structs:
        yield from [f"#### {name}", "", header.prose(comment), ""]
        yield from [*generated_document.markdown(["field", "type", "meaning"], struct_rows(header, body)), ""]
    yield from ["### Constants", ""]
    for comment, body in header.enums:
        yield from [f"#### `{header.family(body)}`", ""]
        if comment:
            yield from [header.prose(comment), ""]
        yield from [*generated_document.markdown(["constant", "value", "meaning"], enum_rows(header, body)), ""]


def document(docs):
    header = Header(generated_document.read(os.path.join(generated_document.ROOT, "include", "sageattn.h")))
    text = generated_document.read(os.path.join(docs, "api.md"))
    return generated_document.with_part(text, __file__, "\n".join(lines(header)).rstrip())


if __name__ == "__main__":
    generated_document.main(__file__, __doc__, "api.md", document)
