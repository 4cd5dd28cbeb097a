"""Write the demo batch inputs next to this file, from docstrings of the stdlib.

``demo_requests.jsonl`` asks the same six questions about each document. The
document comes first in every message and the question last, so the six prompts of
a document share all but their tails, and the lines are shuffled, as a user's file
would be, so nothing about the file gives that away.
``demo_embeddings.jsonl`` holds one short sentence per line.

The text depends on the Python that runs this: the committed files are from 3.11.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MIN_BYTES, MAX_BYTES = 300, 1200  # of one document, UTF-8
SENTENCES = 60
# Some distributions package these apart, so they are not on every machine.
NOT_EVERYWHERE = {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter"}
SYSTEM = (
    "You read Python documentation for busy engineers. "
    "Answer from the text alone, briefly, and say so when it holds no answer."
)
# Name: (the question, max_tokens of its answer).
TASKS = {
    "summarise": ("Summarise the text above in one sentence.", 40),
    "facts": ("List three facts that the text above states, one per line.", 48),
    "french": ("Translate the first sentence of the text above into French.", 36),
    "quiz": ("Write one quiz question that the text above answers.", 32),
    "names": (
        "List the functions, classes and modules named in the text above, "
        "separated by commas.",
        24,
    ),
    "tone": (
        "Classify the tone of the text above as formal, neutral or informal. "
        "Answer with one word.",
        16,
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent,
        help="directory for both files (default: this script's)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=40,
        help=f"number of documents, with {len(TASKS)} requests each (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the choice of documents and their order (default: %(default)s)",
    )
    options = parser.parse_args(argv)

    found = dict(docstrings())
    documents = one_per_module(found)
    if not 1 <= options.documents <= len(documents):
        parser.error(
            f"--documents is {options.documents}; this Python has "
            f"{len(documents)} to choose from, so give 1 to {len(documents)}"
        )
    rng = random.Random(options.seed)
    requests = chat_requests(rng, documents, options.documents)
    embeddings = embedding_requests(rng, found)

    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / "demo_requests.jsonl", requests)
    write(options.output / "demo_embeddings.jsonl", embeddings)


def docstrings() -> Iterator[tuple[str, str]]:
    """Dotted name and docstring of public modules and their definitions, sorted.

    A source that carries a copyright notice of its own is left out: its docstrings
    may not be under Python's licence.
    """
    library = Path(sysconfig.get_path("stdlib"))
    for module in sorted(sys.stdlib_module_names - NOT_EVERYWHERE):
        candidates = (library / f"{module}.py", library / module / "__init__.py")
        source = next((path for path in candidates if path.is_file()), None)
        if module.startswith("_") or source is None:
            continue
        text = source.read_text("utf-8")
        if "copyright" in text.lower():
            continue
        tree = ast.parse(text)
        for name, node in [(module, tree), *public_definitions(module, tree)]:
            docstring = ast.get_docstring(node)
            # An address in it is a person's: not ours to pass on.
            if docstring and "@" not in docstring:
                yield name, docstring


def public_definitions(
    module: str, tree: ast.Module
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
            yield f"{module}.{node.name}", node


def one_per_module(found: dict[str, str]) -> dict[str, str]:
    """The longest document of each module that has any, by dotted name."""
    chosen: dict[str, tuple[str, str]] = {}
    for name, docstring in found.items():
        document = shortened(docstring)
        module = name.partition(".")[0]
        if document and len(document) > len(chosen.get(module, ("", ""))[1]):
            chosen[module] = (name, document)
    return dict(chosen.values())


def shortened(docstring: str) -> str | None:
    """The docstring up to a paragraph or sentence end, None if that is too short."""
    text = docstring.strip()
    if len(text.encode()) > MAX_BYTES:
        # One byte more than fits, so that an end right at the limit is seen.
        head = text.encode()[: MAX_BYTES + 1].decode(errors="ignore")
        # Not after a colon: the text that it announces would be cut off.
        ends = [m.start() for m in re.finditer(r"(?<!:)\n\n", head)]
        if not ends or len(head[: ends[-1]].encode()) < MIN_BYTES:
            ends = [m.end() for m in re.finditer(r"[.!?](?=\s)", head)]
        text = head[: ends[-1]].rstrip() if ends else ""
    return text if len(text.encode()) >= MIN_BYTES else None


def chat_requests(
    rng: random.Random, documents: dict[str, str], count: int
) -> list[dict[str, Any]]:
    """Batch lines for every task on ``count`` documents, in random order."""
    requests = [
        {
            "custom_id": f"{name}/{task}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "demo",
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {
                        "role": "user",
                        "content": f"{name}\n\n{documents[name]}\n\n{question}",
                    },
                ],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
        for name in rng.sample(list(documents), count)
        for task, (question, max_tokens) in TASKS.items()
    ]
    rng.shuffle(requests)
    return requests


def embedding_requests(
    rng: random.Random, found: dict[str, str]
) -> list[dict[str, Any]]:
    """Batch lines, one for each of :data:`SENTENCES` different first sentences."""
    sentences: dict[str, str] = {}
    for name, docstring in found.items():
        if sentence := first_sentence(docstring):
            sentences.setdefault(sentence, name)
    return [
        {
            "custom_id": f"sentence/{sentences[sentence]}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "all-MiniLM-L6-v2", "input": sentence},
        }
        for sentence in rng.sample(list(sentences), SENTENCES)
    ]


def first_sentence(docstring: str) -> str | None:
    """A sentence of 5 to 25 words on one line, None if it does not start with one."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    match = re.match(r"[A-Z][a-z]*\b[^<>`=]*?[a-z)][.!?](?=\s|$)", paragraph)
    # A dot inside brackets ends an abbreviation, not the sentence.
    if match is None or match[0].count("(") != match[0].count(")"):
        return None
    return match[0] if 5 <= len(match[0].split()) <= 25 else None


def write(path: Path, requests: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(request, ensure_ascii=False) + "\n" for request in requests]
    path.write_bytes("".join(lines).encode())
    print(f"{path}: {len(lines)} requests, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
