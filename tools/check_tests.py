#!/usr/bin/env python3
"""Every *_test.cpp is compiled, none is switched off, no skip is silent.

No two files define a type of one name in one namespace: the linker would keep one of the two
definitions' functions for both, in silence.
"""

import re

import tree


DEFINITION = re.compile(r"^(?:struct|class|enum class|enum) (\w+)[^;]*$|^TORCH_MODULE\((\w+)\)")


def types(text):
    """(namespace::name, line) of the types that a file defines outside of functions."""
    within = []
    for number, line in enumerate(text.splitlines(), 1):
        opened = re.match(r"namespace ?([\w:]*) \{$", line)
        if opened:
            within.append(opened[1] or None)
        elif line.startswith("} // namespace") and within:
            within.pop()
        defined = DEFINITION.match(line)
        if defined and None not in within:  # a file's own otherwise
            yield "::".join([*within, defined[1] or defined[2]]), number


def check(root):
    problems = []
    registered, defined = {}, {}
    for path in tree.files(root, ("tests",)):
        if path.name == "CMakeLists.txt":
            text = re.sub(r"#.*", "", (root / path).read_text())
            registered[path.parent] = set(re.findall(r"[\w/.-]+_test\.cpp", text))
    for path in tree.files(root, ("tests",), (".cpp",)):
        if path.name.endswith("_test.cpp"):
            names = registered.get(path.parent, set())
            if path.name not in names:
                problems.append(
                    tree.Problem(str(path), 1, f"is in no hasten_tests() of {path.parent}/CMakeLists.txt")
                )
        for name, number in types((root / path).read_text()):
            other = defined.setdefault(name, path)
            if other != path:
                problems.append(tree.Problem(str(path), number, f"defines {name}, as {other} does"))
        for number, line in enumerate((root / path).read_text().splitlines(), 1):
            if re.search(r"\bDISABLED_", line) or re.match(r"\s*#\s*if 0\b", line):
                problems.append(tree.Problem(str(path), number, "a test that is switched off"))
            if "GTEST_SKIP()" in line and "<<" not in line:
                problems.append(tree.Problem(str(path), number, "GTEST_SKIP() without its reason on the line"))
    for folder, names in registered.items():
        for name in sorted(names):
            if not (root / folder / name).is_file():
                problems.append(tree.Problem(f"{folder}/CMakeLists.txt", 1, f"names {name}, which is not there"))
    return problems


if __name__ == "__main__":
    tree.main(check)
