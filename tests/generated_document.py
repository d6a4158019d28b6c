"""What the programs that write a document from measurements have in common: flags, --check, the file."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main(script, usage, name, document):
    """Writes DOCS/name, or, with --check, exits with 1 unless it is what document(DOCS) gives.

    document: returns the text, or None if there is nothing to write; or, with figures, all files' texts by name.
    """
    arguments = sys.argv[1:]
    check = "--check" in arguments
    folders = [argument for argument in arguments if argument != "--check"]
    if len(folders) > 1 or any(folder.startswith("-") for folder in folders):
        sys.exit(usage)
    docs = folders[0] if folders else os.path.join(ROOT, "docs")
    made = document(docs)
    for file_name, text in (made if isinstance(made, dict) else {name: made}).items():
        path = os.path.join(docs, file_name)
        if check:
            present = None
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    present = file.read()
            if present != text:
                sys.exit(f"{path} is not what its data gives: run tests/{os.path.basename(script)}")
        elif text is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
