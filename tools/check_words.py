#!/usr/bin/env python3
"""The tree speaks of itself alone: no path of one machine, no tracker number, no
promise for later, no typographic quotes in code. Public text uses plain verbs, and names and
comments of C++ use the field's words."""

import re

import tree

# Split so that this file does not contain what it looks for.
RULES = (
    (re.compile(r"(?<![\w.$}])/" + r"(work|root|home|Users)/"), "a path of one machine"),
    (re.compile(r"\.\./" + r"shared\b"), "a path outside the tree"),
    (re.compile(r"\b[Ii]ssue" + r" ?#?\d+\b"), "a tracker's number"),
    (re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"), "a promise for later"),
    (re.compile("[\u2018\u2019\u201c\u201d]"), "a typographic quote"),
)
# Words that made sentences of public text hard to read, and fragments "Of …:".
PLAIN = re.compile(
    r"\b(told|beside|lets? go|puts? together|whoever|signs? of life|asked|behind|goes on|of its own)\b"
    r"|^\s*///? Of [a-z][^.]*:",
    re.I,
)
# Not words: names in backquotes in public text. Of the sources, only literals are public text.
NAME = re.compile(r"`[^`]*`")
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PUBLIC = ("include/", "docs/", "examples/", *PAGES)
TEXT = (".h", ".cpp", ".py", ".sh", ".md", ".txt", ".cmake", ".json", ".in", "")
# Texts to tokenize are of any script and quote.
SKIP = ("tools/golden/", "tests/golden/", "tests/data/", "LICENSE")
# Words of our own for what the field has names for, alone or in a name.
PRIVATE = re.compile(
    r"\b(deal(s|t|ers?|ing)?|lends?|lent|lendable|stale|hurr(y|ies|ied)|heed(s|ed)?|asides?|standing"
    r"|tells?|told|telling|untaken|doors?|quiet models|serve peers|gives? place|look for places)\b"
)
TURN = re.compile(r"(?<!\bin )(?<!\btake )\bturns?\b(?!.*\b(on|off|into)\b)")
# Where a name of several words begins the next one.
WORD_START = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Its literals are pieces of generated reviews.
REVIEWS = "src/text/synthetic_reviews.cpp"


def public_text(name, line):
    """The part of a line that users read."""
    if name.startswith(PUBLIC):
        return NAME.sub("", line)
    if name.startswith("src/") and name != REVIEWS and not line.lstrip().startswith("//"):
        return " ".join(LITERAL.findall(line))
    return ""


def private_word(name, line):
    """A word of PRIVATE in a name or comment. Tests may count turns of a loop."""
    if not name.endswith((".h", ".cpp")) or name == REVIEWS:
        return None
    words = WORD_START.sub(" ", LITERAL.sub('""', line)).lower()
    return PRIVATE.search(words) or (not name.startswith(("tests/", "benchmarks/")) and TURN.search(words))


def check(root):
    problems = []
    for path in tree.files(root, suffixes=TEXT):
        name = str(path)
        if name.startswith(SKIP):
            continue
        try:
            text = (root / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for pattern, what in RULES:
                if pattern.search(line):
                    problems.append(tree.Problem(name, number, f"{what}: {line.strip()[:80]}"))
            if found := private_word(name, line):
                problems.append(tree.Problem(name, number, f'"{found[0]}": use the field\'s word'))
            if found := PLAIN.search(public_text(name, line)):
                problems.append(
                    tree.Problem(name, number, f'"{found[0].strip()}": say it with a plain verb')
                )
    return problems


if __name__ == "__main__":
    tree.main(check)
