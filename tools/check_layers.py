#!/usr/bin/env python3
"""A file includes only its own folder and folders of a lower layer.

The layers are those of the table in docs/architecture.md. Layer 0, the launcher and
the `hasten` program must not see LibTorch; their CMake targets hold them to that.
"""

import re

import tree

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
PRIVATE = re.compile(r"(\w+)/[\w/]*\w\.h$")  # "state/state_contents.h": a header in src/
WITHOUT_TORCH = ("base", "config", "launch", "report", "tracking", "hub")


def read_layers(root):
    """{folder: layer} from the table's rows: `| 3 | `flat`, `data` | … |`."""
    layers = {}
    for line in (root / "docs/architecture.md").read_text().splitlines():
        row = re.match(r"\|\s*(\d+)\s*\|([^|]*)\|", line)
        if row:
            for folder in re.findall(r"`(\w+)`", row[2]):
                layers[folder] = int(row[1])
    return layers


def part_of(path):
    """The part a file belongs to: include/hasten/<part>/, src/<part>/, tests/<part>/."""
    parts = path.parts
    if parts[:2] == ("include", "hasten") and len(parts) > 3:
        return parts[2]
    if parts[0] in ("src", "tests") and len(parts) > 2:
        return parts[1]
    return None


def check(root):
    layers = read_layers(root)
    if not layers:
        return [tree.Problem("docs/architecture.md", 1, "has no table of layers")]
    problems = []
    for path in tree.files(root, ("include", "src", "tests"), tree.SOURCES):
        own = part_of(path)
        if own not in layers:
            if path.parts[0] == "src" or path.parts[0] == "include" and own:
                problems.append(
                    tree.Problem(str(path), 1, f"folder {own} is in no layer of docs/architecture.md")
                )
            continue
        for number, line in enumerate((root / path).read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            included = match[1]
            if ".." in included.split("/"):
                problems.append(tree.Problem(str(path), number, f"includes {included}: name it from hasten/"))
            if own in WITHOUT_TORCH and TORCH.match(included):
                problems.append(tree.Problem(str(path), number, f"{own} must not see LibTorch: {included}"))
            target = re.match(r"hasten/(\w+)/", included)
            inside = (root / "src" / own / included).exists()  # "meet/store.h": a folder of the part
            if not target and path.parts[0] == "src" and '"' in line and not inside:
                target = PRIVATE.match(included)
            if not target or target[1] == own:
                continue
            if target[1] not in layers:
                problems.append(tree.Problem(str(path), number, f"{included} is in no known layer"))
            elif layers[target[1]] >= layers[own]:
                problems.append(
                    tree.Problem(
                        str(path),
                        number,
                        f"{own} (layer {layers[own]}) includes {included} (layer {layers[target[1]]})",
                    )
                )
    return problems


if __name__ == "__main__":
    tree.main(check)
