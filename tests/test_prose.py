"""The retired words of the glossary stay out of prose and of our own names."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
RETIRED = re.compile(
    r"\b(told|looked|looking|lookers?|sights?|albums?|walks?|walked|walkers?|walking|visits?|"
    r"visited|lessons?|rehears\w*|speaking|speakers?|blame[sd]?|concludes?|concluded|conclusion|"
    r"goes on with|by chance|by itself|nobody|rooms?|houses?|aloud|afar)\b",
    re.IGNORECASE,
)
# Names that other people chose.
FOREIGN = re.compile(r"os\.walk|ast\.walk|\.walk\(|warehouses?|greenhouses?", re.IGNORECASE)
# History, the words themselves, and stored results.
LEFT_OUT = ("CHANGELOG.md", "tests/test_prose.py", "LICENSE", "constraints.txt", "tests/golden/")
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".sh", ".cff", ".sbatch", "Makefile")


def tracked():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if name.endswith(SUFFIXES) and not name.startswith(LEFT_OUT)]


def words_of(identifier):
    """Return the words of a snake_case or CamelCase name."""
    return " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier))


def own_names(source):
    """Yield the line and the words of every name that a Python file defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, words_of(node.name)
        elif isinstance(node, ast.arg):
            yield node.lineno, words_of(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, words_of(node.id)


def sentences(source):
    """Yield the line and the text of every comment and string of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def retired(name, text):
    parts = list(enumerate(text.splitlines(), 1))
    if name.endswith(".py"):
        parts = [*own_names(text), *sentences(text)]
    for line, part in parts:
        for found in RETIRED.finditer(FOREIGN.sub("", part)):
            yield f"{name}:{line}: {found.group()}"


def test_retired_words_stay_retired():
    found = [
        each
        for name in tracked()
        for each in sorted(set(retired(name, (ROOT / name).read_text(encoding="utf-8"))))
    ]
    assert not found, "\n".join(found)


def test_names_comments_and_strings_are_read():
    code = 'class Looker:\n    """Nobody."""\n    told_once = 1  # by chance\n    os.walk(top)\n'
    found = {line.split(": ")[1] for line in retired("x.py", code)}
    assert found == {"Looker", "told", "Nobody", "by chance"}
